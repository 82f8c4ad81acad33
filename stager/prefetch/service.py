"""Staging: carries out what the planner says, for readers that announce their order and for those that stand waiting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stager.budget import Priority
from stager.cache.layout import ShardKey
from stager.cache.shards import CachedDataset, ShardCache
from stager.errors import (
    DeadlineExceeded,
    IntegrityError,
    NotFound,
    OutOfSpace,
    StagerError,
)
from stager.formats.manifest import (
    DATASET_MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    decode_dataset_manifest,
)
from stager.formats.wire import (
    AnnounceReply,
    AnnounceRequest,
    OpenReply,
    OpenRequest,
    WantReply,
    WantRequest,
)
from stager.logs import event
from stager.prefetch.planner import Fetch, Here, plan
from stager.prefetch.readers import Orders, Reader, checked_reader
from stager.store.api import ObjectStore, read_all
from stager.transfer.download import DownloadOptions
from stager.transfer.tools import backoff_s

log = logging.getLogger("stager.prefetch")

READER_IDLE_S = 3600.0
LOOK_AGAIN_S = 5.0
HAND_OVER_S = 5.0
OpenStore = Callable[[str], Awaitable[ObjectStore]]


@dataclass(frozen=True, slots=True)
class StagingOptions:
    """Bounds of staging: shards fetched at once, and those of each download."""

    concurrent_shards: int = 4
    download: DownloadOptions = DownloadOptions(concurrency=4)


@dataclass(slots=True)
class _Failure:
    """Why a shard could not be fetched, how often, and when it is tried again (the loop's clock)."""

    error: StagerError
    count: int
    retry_at_s: float


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
        self._open_store = open_store
        self._sources = tuple(sources)
        self._options = options
        self._orders = Orders()
        self._stores: dict[str, ObjectStore] = {}
        self._current: dict[str, CachedDataset] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._readers: dict[str, Reader] = {}
        self._waiting: dict[ShardKey, list[asyncio.Future[None]]] = {}
        self._failures: dict[ShardKey, _Failure] = {}
        self._handed_over: dict[ShardKey, float] = {}
        self._arrived: dict[ShardKey, int] = {}
        self._source_problems: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._published = 0
        self._fetched_bytes = 0
        self._evicted = 0

    async def run(self, ready: Callable[[], None]) -> None:
        """Adopt the cache, open the configured datasets, then stage until cancelled."""
        await self._cache.start()
        async with asyncio.TaskGroup() as group:
            unopened = [group.create_task(self._open_configured(source)) for source in self._sources]
            group.create_task(self._announce_ready(unopened, ready))
            while True:
                self._wake.clear()
                await self._step(group)
                try:
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def open(self, request: OpenRequest) -> OpenReply:
        """The dataset of a URL, with its manifest on this node.

        Raises:
            NotFound: There is no manifest.
            DeadlineExceeded: The store did not answer in time.
        """
        try:
            async with asyncio.timeout(request.deadline_s):
                dataset = await self._open(request.source)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the manifest of `{request.source}` did not come in {request.deadline_s:g} s",
                subject=request.source,
                hint="see `stager status` for what the store answers",
            ) from None
        layout = self._cache.layout
        return OpenReply(
            dataset.id,
            dataset.manifest.fingerprint,
            layout.manifest(dataset.id),
            layout.shards_directory(dataset.id),
        )

    def announce(self, request: AnnounceRequest) -> AnnounceReply:
        """Take note of a reader's order and place."""
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
        self._wake.set()
        if before is None or before.plan != reader.plan:
            needed = self._orders.bytes_needed(reader)
            self._warn_if_small(reader, needed)
            return AnnounceReply(needed, self._cache.capacity_bytes)
        return AnnounceReply(0, self._cache.capacity_bytes)

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
        cache = self._cache
        return {
            "cache": {
                "root": cache.layout.root,
                "bytes": cache.used_bytes,
                "capacity_bytes": cache.capacity_bytes,
                "shards": len(cache.shards),
                "quarantined": cache.quarantined_count,
            },
            "datasets": [self._dataset_status(dataset) for dataset in self._current.values()],
            "problems": dict(self._source_problems),
            "readers": [
                {
                    "name": reader.name,
                    "dataset": reader.dataset.id,
                    "epoch": reader.plan.epoch,
                    "position": reader.position,
                }
                for reader in self._readers.values()
            ],
            "coming": {
                str(key): {"bytes": size, "arrived": self._arrived.get(key, 0)}
                for key, size in cache.coming.items()
            },
            "failures": {str(key): failure.error.message for key, failure in self._failures.items()},
            "waiting": sorted(str(key) for key in self._waiting),
            "published": self._published,
            "fetched_bytes": self._fetched_bytes,
            "evicted": self._evicted,
        }

    def _dataset_status(self, dataset: CachedDataset) -> Mapping[str, Any]:
        here = [key for key in self._cache.shards if key.dataset == dataset.id]
        return {
            "id": dataset.id,
            "source": dataset.source,
            "fingerprint": dataset.manifest.fingerprint,
            "samples": dataset.manifest.samples,
            "shards": len(dataset.manifest.shards),
            "bytes": dataset.manifest.size,
            "shards_here": len(here),
            "bytes_here": sum(self._cache.shards[key].size for key in here),
        }

    def _warn_if_small(self, reader: Reader, needed: int) -> None:
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

    async def _announce_ready(self, opened: Sequence[asyncio.Task[None]], ready: Callable[[], None]) -> None:
        if opened:
            await asyncio.wait(opened)
        ready()

    async def _open_configured(self, source: str) -> None:
        """Open a dataset of the configuration; while the store fails, try again."""
        attempt = 0
        while True:
            attempt += 1
            try:
                await self._open(source)
                self._source_problems.pop(source, None)
                self._wake.set()
                return
            except StagerError as error:
                if source not in self._source_problems:
                    event(
                        log,
                        logging.WARNING,
                        "dataset.unreachable",
                        source=source,
                        reason=error.message,
                        hint=error.hint,
                    )
                self._source_problems[source] = error.message
                await asyncio.sleep(backoff_s(min(attempt, 6), self._cache.tools.random, error))

    async def _open(self, source: str) -> CachedDataset:
        async with self._opening.setdefault(source, asyncio.Lock()):
            store = self._stores.get(source)
            if store is None:
                store = self._stores[source] = await self._open_store(source)
            before = self._current.get(source) or self._adopted(source)
            try:
                raw, _ = await read_all(store, MANIFEST_NAME, bytes_max=DATASET_MANIFEST_BYTES_MAX)
            except NotFound as error:
                raise NotFound(
                    f"`{source}` has no {MANIFEST_NAME}: {error.message}",
                    subject=source,
                    hint="`stager pack` writes one; `stager index` makes one for shards of others",
                ) from None
            except StagerError as error:
                if before is None or not error.retryable:
                    raise
                # The node goes on from what it has: every shard is still held to that manifest.
                event(log, logging.WARNING, "manifest.unreachable", source=source, reason=error.message)
                self._current[source] = before
                return before
            manifest = decode_dataset_manifest(raw, of=f"{source}/{MANIFEST_NAME}")
            if before is not None and before.manifest.fingerprint == manifest.fingerprint:
                self._current[source] = before
                return before
            if before is not None:
                event(
                    log,
                    logging.WARNING,
                    "dataset.changed",
                    source=source,
                    was=before.manifest.fingerprint,
                    now=manifest.fingerprint,
                )
            self._current[source] = await self._cache.add_dataset(source, manifest)
            self._wake.set()
            return self._current[source]

    def _adopted(self, source: str) -> CachedDataset | None:
        """What an earlier daemon knew of the source; the one with most shards here, should there be several."""
        known = [dataset for dataset in self._cache.datasets.values() if dataset.source == source]
        return max(
            known,
            key=lambda dataset: sum(key.dataset == dataset.id for key in self._cache.shards),
            default=None,
        )

    async def _wait_for(self, key: ShardKey, *, damaged: bool) -> None:
        if damaged and key in self._cache.shards and await self._cache.is_sound(key):
            return
        while not (key in self._cache.shards and await self._cache.is_there(key)):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, []).append(waiter)
            failure = self._failures.get(key)
            if failure is not None:
                # Somebody stands waiting: the next try is now.
                failure.retry_at_s = 0.0
            self._wake.set()
            try:
                await waiter
            finally:
                waiters = self._waiting.get(key, [])
                if waiter in waiters:
                    waiters.remove(waiter)
                if not waiters:
                    self._waiting.pop(key, None)
        now = asyncio.get_running_loop().time()
        self._handed_over[key] = now
        if key in self._cache.shards:
            self._cache.shards[key].last_used_s = now

    async def _step(self, group: asyncio.TaskGroup) -> None:
        """Decide at one instant, then act: count what is decided at once, move files afterwards."""
        now = asyncio.get_running_loop().time()
        self._drop_idle_readers(now)
        cache = self._cache
        decided = plan(
            capacity_bytes=cache.capacity_bytes - sum(cache.leftovers.values()),
            here={key: Here(shard.size, shard.last_used_s) for key, shard in cache.shards.items()},
            coming=cache.coming,
            wanted=[(key, cache.entry(key).size) for key in self._wanted(now)],
            upcoming=((key, size) for key, size in self._upcoming() if self._may_try(key, now)),
            slots=self._options.concurrent_shards - len(cache.coming),
        )
        for eviction in decided.evict:
            event(log, logging.INFO, "shard.evicted", shard=eviction.key, reason=eviction.reason)
            self._evicted += 1
            await cache.evict(eviction.key)
        for fetch in decided.fetch:
            cache.reserve(fetch.key, fetch.size)
            group.create_task(self._fetch(fetch))
        if decided.blocked is not None and cache.leftovers:
            # Room that an abandoned fetch still holds is given up before a needed shard has to wait.
            await cache.drop_leftover(next(iter(cache.leftovers)))
            self._wake.set()

    def _wanted(self, now: float) -> list[ShardKey]:
        """What readers stand waiting for, behind what they were told is there and may not have opened yet."""
        self._handed_over = {
            key: at
            for key, at in self._handed_over.items()
            if now - at < HAND_OVER_S and key in self._cache.shards
        }
        return [*self._handed_over, *(key for key in self._waiting if self._may_try(key, now))]

    def _may_try(self, key: ShardKey, now: float) -> bool:
        failure = self._failures.get(key)
        return failure is None or failure.retry_at_s <= now

    def _upcoming(self) -> Iterator[tuple[ShardKey, int]]:
        """What readers need next, then, as far as there is room, the configured datasets nobody has announced."""
        yield from self._orders.merged(list(self._readers.values()))
        read = {reader.dataset.id for reader in self._readers.values()}
        for source in self._sources:
            dataset = self._current.get(source)
            if dataset is not None and dataset.id not in read:
                for shard in dataset.manifest.shards:
                    yield ShardKey(dataset.id, shard.name), shard.size

    def _drop_idle_readers(self, now: float) -> None:
        for name in [
            name for name, reader in self._readers.items() if now - reader.announced_s > READER_IDLE_S
        ]:
            event(log, logging.INFO, "reader.idle", reader=name)
            del self._readers[name]

    async def _fetch(self, fetch: Fetch[ShardKey]) -> None:
        key = fetch.key

        def note(size: int) -> None:
            self._arrived[key] = self._arrived.get(key, 0) + size

        try:
            got = await self._cache.fetch(
                self._stores[self._cache.datasets[key.dataset].source],
                key,
                priority=Priority.DEMAND if fetch.wanted else Priority.PREFETCH,
                options=self._options.download,
                progress=note,
            )
        except StagerError as error:
            self._failed(key, error)
        else:
            self._failures.pop(key, None)
            self._published += 1
            self._fetched_bytes += got.fetched_bytes
            event(log, logging.INFO, "shard.published", shard=key, bytes=got.size, fetched=got.fetched_bytes)
            self._answer(key, None)
        finally:
            self._arrived.pop(key, None)
            self._wake.set()

    def _failed(self, key: ShardKey, error: StagerError) -> None:
        """Remember a failure and when to try again; what no retry mends is told to those who wait at once."""
        count = self._failures[key].count + 1 if key in self._failures else 1
        wait_s = (
            60.0
            if isinstance(error, IntegrityError)
            else backoff_s(min(count, 6), self._cache.tools.random, error)
        )
        self._failures[key] = _Failure(error, count, asyncio.get_running_loop().time() + wait_s)
        level = logging.ERROR if not error.retryable else logging.WARNING if count == 1 else logging.DEBUG
        event(log, level, "shard.failed", shard=key, reason=error.message, hint=error.hint, tries=count)
        if not error.retryable:
            self._answer(key, error)

    def _answer(self, key: ShardKey, error: StagerError | None) -> None:
        for waiter in self._waiting.get(key, []):
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
