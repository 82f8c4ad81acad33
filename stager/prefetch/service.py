"""Staging: carries out what the planner says, for readers that announce their order and for those that stand waiting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stager.backoff import backoff_s
from stager.cache.datasets import CachedDataset
from stager.cache.layout import ShardKey
from stager.cache.shards import ShardCache
from stager.errors import DeadlineExceeded, NotFound, OutOfSpace, StagerError
from stager.formats.order import OrderPlan
from stager.formats.wire import (
    AnnounceReply,
    AnnounceRequest,
    OpenReply,
    OpenRequest,
    WantReply,
    WantRequest,
)
from stager.logs import event
from stager.prefetch.fetching import Fetcher
from stager.prefetch.planner import EVENTUALLY, Plan, Snapshot, plan
from stager.prefetch.readers import Reader, Schedules, checked_reader
from stager.prefetch.sources import OpenStore, Sources
from stager.prefetch.status import describe
from stager.prefetch.waiting import HAND_OVER_S, Failures, Waiters
from stager.transfer.download import DownloadOptions

log = logging.getLogger("stager.prefetch")

READER_IDLE_S = 3600.0
LOOK_AGAIN_S = 5.0
MOVES_GATHERED_S = 1.0


Use = tuple[float, ShardKey, int]


@dataclass(frozen=True, slots=True)
class StagingOptions:
    """Bounds of staging: shards fetched at once ahead of need (as many again on demand), and those of each download."""

    concurrent_shards: int = 4
    download: DownloadOptions = DownloadOptions(concurrency=4)


class StagingService:
    """Keeps the node's cache ahead of its readers."""

    name = "staging"

    def __init__(
        self,
        cache: ShardCache,
        open_store: OpenStore,
        *,
        sources: Sequence[str] = (),
        options: StagingOptions = StagingOptions(),
    ) -> None:
        self._cache = cache
        self._sources = Sources(cache, open_store)
        self._configured = tuple(sources)
        self._options = options
        self._schedules = Schedules()
        self._readers: dict[str, Reader] = {}
        self._needed: dict[tuple[str, OrderPlan, range], int] = {}
        self._waiters = Waiters()
        self._failures = Failures(cache.tools.random)
        self._problems: dict[str, str] = {}
        self._evicted = 0
        self._wake = asyncio.Event()
        self._fetcher = Fetcher(
            cache, self._sources, self._waiters, self._failures, options.download, self._wake.set
        )
        self._moved = False

    async def run(self, ready: Callable[[], None]) -> None:
        """Adopt the cache, open the configured datasets, then stage until cancelled."""
        await self._cache.start()
        async with asyncio.TaskGroup() as group:
            opened = [group.create_task(self._open_configured(source)) for source in self._configured]
            group.create_task(_when_done(opened, ready))
            failed = 0
            while True:
                self._wake.clear()
                try:
                    await self._step(group)
                    failed = 0
                    self._problems.pop("cache", None)
                except StagerError as error:
                    # The disk, not the store: readers go on with what is here, and this is looked at again.
                    failed += 1
                    level = logging.ERROR if failed == 1 else logging.DEBUG
                    event(log, level, "cache.failed", reason=error.message, hint=error.hint)
                    self._problems["cache"] = error.message
                    await asyncio.sleep(backoff_s(min(failed, 6), self._cache.tools.random, error))
                    continue
                try:
                    async with asyncio.timeout(self._idle_s()):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def open(self, request: OpenRequest) -> OpenReply:
        """The dataset of a URL, with its manifest on this node; while the store fails it is asked again.

        Raises:
            NotFound: There is no manifest.
            DeadlineExceeded: The store did not answer in time; names the last failure.
        """
        failures: list[StagerError] = []
        try:
            async with asyncio.timeout(request.deadline_s):
                dataset = await self._sources.open_patiently(request.source, failures.append)
        except TimeoutError:
            because = f"; the last try failed: {failures[-1].message}" if failures else ""
            raise DeadlineExceeded(
                f"the manifest of `{request.source}` did not come in {request.deadline_s:g} s{because}",
                subject=request.source,
                hint="see `stager status` for what the store answers",
            ) from None
        layout = self._cache.layout
        return OpenReply(
            dataset.id,
            dataset.fingerprint,
            layout.manifest(dataset.id),
            layout.shards_directory(dataset.id),
        )

    def announce(self, request: AnnounceRequest) -> AnnounceReply:
        """Take note of a reader's order and place.

        Raises:
            NotFound: The dataset was not opened here.
            UsageError: The order is of other content than the dataset has.
        """
        dataset = self._cache.datasets.get(request.dataset)
        if dataset is None:
            raise NotFound(
                f"this node knows no dataset `{request.dataset}`",
                subject=request.dataset,
                hint="the daemon's cache was emptied: open the dataset again",
            )
        reader = checked_reader(request, dataset, now_s=asyncio.get_running_loop().time())
        before = self._readers.get(reader.name)
        self._readers[reader.name] = reader
        if before is not None and before.shares == reader.shares:
            # A step forward frees and needs little: several are gathered before anything is planned anew.
            self._moved = self._moved or (before.position, before.plan) != (reader.position, reader.plan)
        else:
            self._note_need(reader)
            self._wake.set()
        return AnnounceReply(self._cache_bytes_needed(dataset), self._cache.capacity_bytes)

    async def want(self, request: WantRequest) -> WantReply:
        """Answer when the shard is there.

        Raises:
            IntegrityError: The shard in the bucket is not what the manifest says.
            OutOfSpace: The cache cannot hold it.
            DeadlineExceeded: It did not come in time; names the last failure.
        """
        key = ShardKey(request.dataset, request.shard)
        entry = self._cache.entry(key)
        if entry.size > self._cache.capacity_bytes:
            raise OutOfSpace(
                f"shard `{key.name}` has {entry.size} bytes; the cache may hold {self._cache.capacity_bytes}",
                subject=key.name,
                hint="raise cache_bytes, or pack smaller shards",
            )
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._wait_for(key, damaged=request.damaged)
        except TimeoutError:
            failure = self._failures.get(key)
            because = f"; the last try failed: {failure.error.message}" if failure else ""
            raise DeadlineExceeded(
                f"shard `{key.name}` did not come in {request.deadline_s:g} s{because}",
                subject=key.name,
                hint="see `stager status`; a longer wait_timeout_s waits longer",
            ) from None
        return WantReply(self._cache.layout.shard(key))

    def status(self) -> Mapping[str, Any]:
        """What `stager status` shows of staging."""
        return {
            **describe(self._cache, self._sources, list(self._readers.values()), self._cache_bytes_needed),
            "problems": dict(self._problems),
            "coming": {
                str(key): {
                    "bytes": size,
                    "arrived": self._fetcher.arrived.get(key, 0),
                    "wanted": key in self._waiters,
                }
                for key, size in self._cache.coming.items()
            },
            "failures": {str(key): failure.error.message for key, failure in self._failures.items()},
            "waiting": sorted(str(key) for key in self._waiters.keys),
            "published": self._fetcher.published,
            "fetched_bytes": self._fetcher.fetched_bytes,
            "evicted": self._evicted,
            "degraded": bool(self._problems or self._failures.items()),
        }

    def _note_need(self, reader: Reader) -> None:
        """Compute what a new reader needs, and forget what readers needed that are gone."""
        shares = {other.shares for other in self._readers.values()}
        self._needed = {known: needed for known, needed in self._needed.items() if known in shares}
        if reader.shares not in self._needed:
            self._needed[reader.shares] = self._schedules.bytes_needed(reader)
        needed = sum(self._needed.values())
        if needed > self._cache.capacity_bytes:
            event(
                log,
                logging.WARNING,
                "cache.too_small",
                dataset=reader.dataset.source,
                needed_bytes=needed,
                cache_bytes=self._cache.capacity_bytes,
                hint="shards will be fetched more than once in an epoch: raise cache_bytes or lower the window",
            )

    def _cache_bytes_needed(self, dataset: CachedDataset) -> int:
        return sum(needed for shares, needed in self._needed.items() if shares[0] == dataset.id)

    async def _open_configured(self, source: str) -> None:
        """Open a dataset of the configuration, however long it takes; what fails is shown."""
        while True:
            try:
                await self._sources.open_patiently(source, lambda error: self._unreachable(source, error))
                break
            except StagerError as error:
                # A retry mends nothing now, but somebody may: a missing manifest is written, a permission is given.
                self._unreachable(source, error)
                await asyncio.sleep(backoff_s(6, self._cache.tools.random, error))
        self._problems.pop(source, None)
        self._wake.set()

    def _unreachable(self, source: str, error: StagerError) -> None:
        if source not in self._problems:
            event(
                log,
                logging.WARNING,
                "dataset.unreachable",
                source=source,
                reason=error.message,
                hint=error.hint,
            )
        self._problems[source] = error.message

    async def _wait_for(self, key: ShardKey, *, damaged: bool) -> None:
        cache = self._cache
        if damaged and key in cache.shards:
            await cache.is_sound(key)
        while True:
            if key in cache.shards:
                # Before the file is looked at: from here on it is not given up until the reader has had time to open it.
                self._waiters.hand_over(key)
                cache.shards[key].last_used_s = asyncio.get_running_loop().time()
                if await cache.is_there(key):
                    return
            async with self._waiters.waiting(key) as answered:
                self._failures.retry_now(key)
                self._wake.set()
                await answered

    async def _step(self, group: asyncio.TaskGroup) -> None:
        """Decide at one instant, then act: count what is decided at once, move files afterwards."""
        await self._schedules.prepare(list(self._readers.values()), self._cache.tools.offload)
        now = asyncio.get_running_loop().time()
        self._moved = False
        self._drop_idle_readers(now)
        for key in self._waiters.keys:
            if key in self._cache.shards:
                self._waiters.answer(key)
        decided = self._decide(now)
        cache = self._cache
        if cache.quarantined and (decided.evict or decided.blocked is not None):
            # Damaged files are kept only while nobody needs their room.
            await cache.empty_quarantine()
            self._wake.set()
            return
        for eviction in decided.evict:
            if eviction.key in self._waiters.handed_over():
                # While other files were removed, a reader was told that this one is there: the plan is void.
                self._wake.set()
                return
            event(log, logging.INFO, "shard.evicted", shard=eviction.key, reason=eviction.reason)
            self._evicted += eviction.key in cache.shards
            await cache.give_up(eviction.key)
        for fetch in decided.fetch:
            cache.reserve(fetch.key, fetch.size)
            group.create_task(self._fetcher.fetch(fetch.key))
        if decided.blocked is not None and not cache.coming and not self._waiters.handed_over():
            self._refuse(decided.blocked)

    def _decide(self, now: float) -> Plan[ShardKey]:
        cache, failures = self._cache, self._failures
        readers = list(self._readers.values())
        unread = self._unread(readers)
        distance, unread_ids = self._schedules.next_use(readers), {dataset.id for dataset in unread}

        def next_use(key: ShardKey) -> float:
            return EVENTUALLY if key.dataset in unread_ids else distance(key)

        wanted_coming = sum(key in self._waiters for key in cache.coming)
        return plan(
            Snapshot(
                capacity_bytes=cache.bound_bytes() - sum(cache.quarantined.values()),
                here=cache.shards,
                coming=cache.coming,
                partial=cache.partial,
                kept=self._waiters.handed_over(),
                wanted=[
                    (key, cache.entry(key).size) for key in self._waiters.keys if failures.may_try(key, now)
                ],
                upcoming=(use for use in self._upcoming(readers, unread) if failures.may_try(use[1], now)),
                next_use=next_use,
                # What is fetched on demand takes no place of what is fetched ahead, nor the other way round.
                slots=self._options.concurrent_shards - (len(cache.coming) - wanted_coming),
                wanted_slots=self._options.concurrent_shards - wanted_coming,
            )
        )

    def _upcoming(self, readers: Sequence[Reader], unread: Sequence[CachedDataset]) -> Iterator[Use]:
        """What readers need next, then, as far as there is room, what is configured and nobody has announced."""
        yield from self._schedules.upcoming(readers)
        for dataset in unread:
            for key, shard in zip(dataset.keys, dataset.manifest.shards, strict=True):
                yield EVENTUALLY, key, shard.size

    def _unread(self, readers: Sequence[Reader]) -> list[CachedDataset]:
        read = {reader.dataset.id for reader in readers}
        opened = [self._sources.current.get(source) for source in self._configured]
        return [dataset for dataset in opened if dataset is not None and dataset.id not in read]

    def _refuse(self, key: ShardKey) -> None:
        """Tell those who wait for a shard that there is no room, and that none will come by itself."""
        failure = self._failures.get(key)
        if failure is not None and isinstance(failure.error, OutOfSpace):
            self._waiters.answer(key, failure.error)
        else:
            self._waiters.answer(
                key,
                OutOfSpace(
                    f"no room for shard `{key.name}` in {self._cache.layout.root}",
                    subject=key.name,
                    hint="free space on that file system, or raise cache_bytes",
                ),
            )

    def _idle_s(self) -> float:
        """How long to wait at most before looking again."""
        now = asyncio.get_running_loop().time()
        waits = [MOVES_GATHERED_S if self._moved else LOOK_AGAIN_S]
        retry_at_s = self._failures.next_retry_s(now)
        if retry_at_s is not None:
            waits.append(retry_at_s - now)
        if self._waiters.keys and self._waiters.handed_over():
            waits.append(HAND_OVER_S)
        return max(0.01, min(waits))

    def _drop_idle_readers(self, now: float) -> None:
        for name, reader in list(self._readers.items()):
            if now - reader.announced_s > READER_IDLE_S:
                event(log, logging.INFO, "reader.idle", reader=name)
                del self._readers[name]


async def _when_done(tasks: Sequence[asyncio.Task[None]], tell: Callable[[], None]) -> None:
    if tasks:
        await asyncio.wait(tasks)
    tell()
