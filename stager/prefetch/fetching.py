"""One shard's fetch: from its store into the cache, with everything that may go wrong told to whom it concerns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from stager.backoff import may_pass
from stager.budget import Priority
from stager.cache.layout import ShardKey
from stager.cache.shards import ShardCache
from stager.errors import IntegrityError, NotFound, OutOfSpace, StagerError
from stager.logs import event
from stager.prefetch.sources import Sources
from stager.prefetch.waiting import Failures, Waiters
from stager.store.api import ObjectStore
from stager.transfer.download import DownloadOptions

log = logging.getLogger("stager.prefetch")


class Fetcher:
    """Fetches shards for the service.

    Attributes:
        arrived: Bytes of shards that are coming, as far as they are written.
        published: Shards made visible since the start.
        fetched_bytes: What came over the wire for them.
    """

    def __init__(
        self,
        cache: ShardCache,
        sources: Sources,
        waiters: Waiters,
        failures: Failures,
        options: DownloadOptions,
        wake: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._sources = sources
        self._waiters = waiters
        self._failures = failures
        self._options = options
        self._wake = wake
        self.arrived: dict[ShardKey, int] = {}
        self.published = 0
        self.fetched_bytes = 0

    async def fetch(self, key: ShardKey) -> None:
        """Bring a reserved shard, tell those who wait for it, and keep what went wrong."""

        def note(size: int) -> None:
            self.arrived[key] = self.arrived.get(key, 0) + size

        def priority() -> Priority:
            return Priority.DEMAND if key in self._waiters else Priority.PREFETCH

        try:
            store = await self._store_of(key)
            got = await self._cache.fetch(store, key, priority=priority, options=self._options, progress=note)
        except StagerError as error:
            await self._failed(key, error)
        except OSError as error:
            await self._failed(key, StagerError(f"shard `{key.name}`: {error}", subject=key.name))
        else:
            self._failures.forget(key)
            self.published += 1
            self.fetched_bytes += got.fetched_bytes
            event(log, logging.INFO, "shard.published", shard=key, bytes=got.size, fetched=got.fetched_bytes)
            self._waiters.answer(key)
        finally:
            self.arrived.pop(key, None)
            self._wake()

    async def _store_of(self, key: ShardKey) -> ObjectStore:
        try:
            return await self._sources.store(self._cache.datasets[key.dataset].source)
        except BaseException:
            self._cache.release(key)
            raise

    async def _failed(self, key: ShardKey, error: StagerError) -> None:
        """Remember a failure and when to try again; what no retry mends is told to those who wait at once."""
        failure = self._failures.note(key, error, asyncio.get_running_loop().time())
        if isinstance(error, IntegrityError | NotFound):
            failure.settled = False
            try:
                error = failure.error = await self._explained(key, error)
            finally:
                failure.settled = True
        level = logging.WARNING if may_pass(error) else logging.ERROR
        level = level if failure.tries == 1 else logging.DEBUG
        event(
            log, level, "shard.failed", shard=key, reason=error.message, hint=error.hint, tries=failure.tries
        )
        if isinstance(error, OutOfSpace):
            # Room is made first; those who wait learn of it only if none can be made.
            if key in self._waiters:
                self._failures.retry_now(key)
        elif not may_pass(error):
            self._waiters.answer(key, error)

    async def _explained(self, key: ShardKey, error: StagerError) -> StagerError:
        """The error, told with its reason where the dataset was packed anew."""
        dataset = self._cache.datasets[key.dataset]
        if not await self._sources.has_changed(dataset):
            return error
        return type(error)(
            f"{error.message}; `{dataset.source}` has been packed anew since it was opened",
            subject=error.subject,
            hint="open the dataset again: it has other content, and states of the old one do not fit it",
        )
