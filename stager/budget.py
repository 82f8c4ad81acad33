"""Bounds that everything on a node shares: bytes in flight by priority, and bytes a second by direction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum

from stager.errors import DeadlineExceeded

AGING_S = 10.0
RATE_BURST_S = 0.25


class Priority(IntEnum):
    """Who goes first, lowest number first."""

    RESTORE = 0
    DEMAND = 1
    CHECKPOINT = 2
    PREFETCH = 3
    SCRUB = 4


class ByteBudget:
    """Bytes that may be held at once. Waiters are served by priority, and gain one step for every `AGING_S` they wait."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.held_bytes = 0
        self._waiting: list[_Waiter] = []

    @asynccontextmanager
    async def reserve(
        self, size: int, priority: Priority, *, deadline_s: float = 600.0, purpose: str = "memory"
    ) -> AsyncIterator[None]:
        """Hold ``size`` bytes for the time of the block; more than the whole budget counts as the whole.

        Raises:
            DeadlineExceeded: The bytes were not to be had in ``deadline_s``; names ``purpose``.
        """
        size = min(size, self.total_bytes)
        await self._acquire(size, priority, deadline_s, purpose)
        try:
            yield
        finally:
            self.held_bytes -= size
            self._serve()

    async def _acquire(self, size: int, priority: Priority, deadline_s: float, purpose: str) -> None:
        if not self._waiting and self.held_bytes + size <= self.total_bytes:
            self.held_bytes += size
            return
        loop = asyncio.get_running_loop()
        waiter = _Waiter(size, priority, loop.time(), loop.create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            async with asyncio.timeout(deadline_s):
                await waiter.granted
        except BaseException as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.granted.done() and not waiter.granted.cancelled():
                # Granted in the same turn of the loop in which the wait was given up: hand it back.
                self.held_bytes -= size
            self._serve()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"waited {deadline_s:g} s for {size} bytes of {purpose}; {self.held_bytes} of"
                    f" {self.total_bytes} are held",
                    subject=purpose,
                    hint="raise the budget, or look in `stager status` for transfers that do not move",
                ) from None
            raise

    def _serve(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._waiting:
            first = min(self._waiting, key=lambda waiter: waiter.rank(now))
            # Strict order: a large request is not overtaken for ever by small ones that happen to fit.
            if self.held_bytes + first.size > self.total_bytes:
                return
            self._waiting.remove(first)
            if not first.granted.done():
                self.held_bytes += first.size
                first.granted.set_result(None)


class _Waiter:
    __slots__ = ("granted", "priority", "since", "size")

    def __init__(self, size: int, priority: Priority, since: float, granted: asyncio.Future[None]) -> None:
        self.size = size
        self.priority = priority
        self.since = since
        self.granted = granted

    def rank(self, now: float) -> tuple[int, float]:
        return max(0, int(self.priority) - int((now - self.since) / AGING_S)), self.since


class RateLimit:
    """A cap on bytes a second, changed while it runs; None is no cap. Time is the loop's."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Wait until ``size`` more bytes may pass."""
        if self.bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        # Whoever asks queues behind what was promised already; a short burst is free.
        start = max(self._free_at, now - RATE_BURST_S)
        self._free_at = start + size / self.bytes_per_s
        if start > now:
            await asyncio.sleep(start - now)
