"""What a command that talks to stores by itself works with: the same parts as the daemon, for one run."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from stager.budget import ByteBudget
from stager.clock import Clock, SystemClock
from stager.config import StoreSection, load_store_section
from stager.disk import LocalDisk
from stager.logs import set_up_logging
from stager.offload import ThreadOffload
from stager.sidecar.stores import Stores
from stager.store.api import ObjectStore
from stager.transfer.tools import Tools

R = TypeVar("R")

MEMORY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Session:
    """One command's tools and stores."""

    tools: Tools
    stores: Stores
    clock: Clock

    async def open(self, url: str) -> ObjectStore:
        """The store below ``url``, or below a path from the current directory."""
        return await self.stores.open(url)


@asynccontextmanager
async def session(section: StoreSection) -> AsyncIterator[Session]:
    """Tools for the time of the block."""
    disk, offload, chance = LocalDisk(), ThreadOffload(), random.Random()
    tools = Tools(disk, offload, memory=ByteBudget(MEMORY_BYTES), random=chance)
    stores = Stores(section, disk, offload, chance, base=os.getcwd())
    try:
        yield Session(tools, stores, SystemClock())
    finally:
        await stores.aclose()
        offload.close()


def run_in_session(work: Callable[[Session], Awaitable[R]], *, config: str = "", quiet: bool = True) -> R:
    """The result of ``work``. The store is configured by ``config`` if given, by ``STAGER_STORE__*`` and the SDK's chain."""
    set_up_logging(level="warning" if quiet else "info")
    section = load_store_section(config or None)

    async def run() -> R:
        async with session(section) as opened:
            return await work(opened)

    return asyncio.run(run())
