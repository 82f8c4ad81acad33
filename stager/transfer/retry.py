"""Calls that may be repeated, repeated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stager.backoff import backoff_s, may_pass
from stager.errors import StoreError
from stager.logs import event
from stager.transfer.tools import Tools

log = logging.getLogger("stager.transfer")

R = TypeVar("R")


async def retried(call: Callable[[], Awaitable[R]], tools: Tools, *, doing: str, attempts: int = 6) -> R:
    """The result of ``call``, which is made again while it fails with what may pass; it must bear repeating.

    That includes what the store's own retries gave up on: a transfer has more patience than a call.

    Raises:
        StoreError: What the last attempt, or one that no retry mends, raised.
    """
    for attempt in range(1, attempts + 1):
        try:
            return await call()
        except StoreError as error:
            if not may_pass(error) or attempt == attempts:
                raise
            level = logging.WARNING if attempt == 1 else logging.DEBUG
            event(log, level, "transfer.retried", doing=doing, reason=error.message, attempt=attempt)
            await asyncio.sleep(backoff_s(attempt, tools.random, error))
    raise AssertionError("unreachable")
