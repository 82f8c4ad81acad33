"""Who waits for which shard, and what stands in the way. Changes without awaits; times are the loop's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from stager.backoff import backoff_s
from stager.cache.layout import ShardKey
from stager.errors import IntegrityError, StagerError

HAND_OVER_S = 0.5
DAMAGED_FIRST_S = 60.0
DAMAGED_LONGEST_S = 3600.0


class Waiters:
    """Readers that stand waiting, and those that were just told that their shard is there."""

    def __init__(self) -> None:
        self._waiting: dict[ShardKey, list[asyncio.Future[None]]] = {}
        self._handed_over: dict[ShardKey, float] = {}

    def __contains__(self, key: ShardKey) -> bool:
        return key in self._waiting

    @property
    def keys(self) -> list[ShardKey]:
        """Shards that somebody waits for, the longest waiting first."""
        return list(self._waiting)

    @asynccontextmanager
    async def waiting(self, key: ShardKey) -> AsyncIterator[asyncio.Future[None]]:
        """A future that `answer` completes; during the block the shard counts as wanted."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(waiter)
        try:
            yield waiter
        finally:
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # looked at, also where the wait ended in the same instant for another reason
            left = self._waiting[key]
            left.remove(waiter)
            if not left:
                del self._waiting[key]

    def answer(self, key: ShardKey, error: StagerError | None = None) -> None:
        """Tell all who wait for a shard that it is there, or why not."""
        if error is None and key in self._waiting:
            self.hand_over(key)
        for waiter in self._waiting.get(key, []):
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def hand_over(self, key: ShardKey) -> None:
        """A reader is being told that the shard is there, and has yet to open it."""
        self._handed_over[key] = asyncio.get_running_loop().time()

    def handed_over(self) -> set[ShardKey]:
        """Shards that a reader is about to open: not to be given up under its hands."""
        now = asyncio.get_running_loop().time()
        self._handed_over = {key: at for key, at in self._handed_over.items() if now - at < HAND_OVER_S}
        return set(self._handed_over)


@dataclass(slots=True)
class Failure:
    """Why a shard could not be fetched, how often in a row, and when it is tried again.

    While it is not ``settled``, somebody finds out more about it: no other try begins.
    """

    error: StagerError
    tries: int
    retry_at_s: float
    settled: bool = True


class Failures:
    """What went wrong with shards, until it went right."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._failures: dict[ShardKey, Failure] = {}

    def get(self, key: ShardKey) -> Failure | None:
        return self._failures.get(key)

    def items(self) -> list[tuple[ShardKey, Failure]]:
        return list(self._failures.items())

    def note(self, key: ShardKey, error: StagerError, now: float) -> Failure:
        """Another failure, later tried again; an object that is damaged is not fetched over and over."""
        before = self._failures.get(key)
        tries = before.tries + 1 if before else 1
        if isinstance(error, IntegrityError):
            wait_s = min(DAMAGED_LONGEST_S, DAMAGED_FIRST_S * 2.0 ** min(tries - 1, 10))
        else:
            wait_s = backoff_s(min(tries, 6), self._chance, error)
        self._failures[key] = failure = Failure(error, tries, now + wait_s)
        return failure

    def forget(self, key: ShardKey) -> None:
        """It went right."""
        self._failures.pop(key, None)

    def retry_now(self, key: ShardKey) -> None:
        """Somebody stands waiting: the next try is now."""
        if key in self._failures:
            self._failures[key].retry_at_s = 0.0

    def may_try(self, key: ShardKey, now: float) -> bool:
        failure = self._failures.get(key)
        return failure is None or (failure.settled and failure.retry_at_s <= now)

    def next_retry_s(self, now: float) -> float | None:
        """When the next failed shard may be tried again, or None."""
        return min(
            (failure.retry_at_s for _, failure in self.items() if failure.retry_at_s > now), default=None
        )
