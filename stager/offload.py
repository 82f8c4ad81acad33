"""Blocking work leaves the event loop through here, by named lanes of fixed width.

Cancelling the awaiting task does not stop a thread that already runs. Whatever is offloaded is therefore one short
unit that leaves a consistent state behind ("fsync, rename, fsync directory" is one call).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, ParamSpec, Protocol, TypeVar

Lane = Literal["disk", "hash", "database", "wire"]
P = ParamSpec("P")
R = TypeVar("R")


class Offload(Protocol):
    """Runs blocking functions somewhere that is not the event loop."""

    async def run(self, lane: Lane, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function's result; its exceptions pass through."""
        ...


class ThreadOffload:
    """Thread pools: ``disk`` for file work, ``hash`` for checksums (they free the GIL), ``database`` with one thread,
    ``wire`` for sockets: as many as there may be connections, since each waits in one. Threads are made when they are used.
    """

    def __init__(
        self, *, disk_threads: int = 8, hash_threads: int | None = None, wire_threads: int = 96
    ) -> None:
        widths: dict[Lane, int] = {
            "disk": disk_threads,
            "hash": hash_threads or max(1, (os.cpu_count() or 2) - 1),
            "database": 1,
            "wire": wire_threads,
        }
        self._pools = {
            lane: ThreadPoolExecutor(width, thread_name_prefix=f"stager-{lane}")
            for lane, width in widths.items()
        }

    async def run(self, lane: Lane, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools[lane], lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Wait for what runs, drop what is queued."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)


class InlineOffload:
    """Runs at once on the loop: for simulation, where everything blocking is simulated as well."""

    async def run(self, lane: Lane, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        # A real pool yields to the loop before the result is there; so does this, or interleavings go unseen.
        await asyncio.sleep(0)
        return function(*args, **kwargs)
