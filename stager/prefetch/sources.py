"""The datasets that URLs stand for: their stores, and their manifests, read once and again only when they have changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from stager.backoff import backoff_s, may_pass
from stager.cache.datasets import CachedDataset, decode_dataset
from stager.cache.shards import ShardCache
from stager.errors import NotFound, StagerError
from stager.formats.manifest import DATASET_MANIFEST_BYTES_MAX, MANIFEST_NAME
from stager.logs import event
from stager.store.api import ObjectStore, read_all

log = logging.getLogger("stager.prefetch")

CHANGED_TIMEOUT_S = 10.0
OpenStore = Callable[[str], Awaitable[ObjectStore]]


class Sources:
    """Stores and current contents of datasets, by URL.

    Attributes:
        current: What each URL stood for when it was last looked at.
        changes: How often a URL was seen to stand for other content than before.
    """

    def __init__(self, cache: ShardCache, open_store: OpenStore) -> None:
        self._cache = cache
        self._open_store = open_store
        self._stores: dict[str, ObjectStore] = {}
        self._etags: dict[str, str] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self.current: dict[str, CachedDataset] = {}
        self.changes: dict[str, int] = {}

    async def store(self, source: str) -> ObjectStore:
        """The store of a URL, opened on first use; whoever gave ``open_store`` closes it."""
        found = self._stores.get(source)
        if found is None:
            found = self._stores[source] = await self._open_store(source)
        return found

    async def open(self, source: str) -> CachedDataset:
        """The dataset that ``source`` stands for now; while the store is away, what this node last knew of it.

        Raises:
            NotFound: There is no manifest.
            FormatError: The manifest is none.
            StoreError: The store failed, and this node knows nothing of the source.
        """
        async with self._turns.setdefault(source, asyncio.Lock()):
            before = self.current.get(source) or self._adopted(source)
            try:
                dataset = await self._look(source, before)
            except NotFound as error:
                raise NotFound(
                    f"`{source}` has no {MANIFEST_NAME}: {error.message}",
                    subject=source,
                    hint="`stager pack` writes one; `stager index` makes one for shards of others",
                ) from None
            except StagerError as error:
                if before is None or not may_pass(error):
                    raise
                # The node goes on from what it has: every shard is still held to that manifest.
                event(log, logging.WARNING, "manifest.unreachable", source=source, reason=error.message)
                dataset = before
            self.current[source] = dataset
            return dataset

    async def open_patiently(self, source: str, failed: Callable[[StagerError], None]) -> CachedDataset:
        """As `open`, again and again while the store fails with what a retry may mend; ``failed`` is told each time."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self.open(source)
            except StagerError as error:
                if not may_pass(error):
                    raise
                failed(error)
                await asyncio.sleep(backoff_s(min(attempt, 6), self._cache.tools.random, error))

    async def has_changed(self, dataset: CachedDataset) -> bool:
        """Whether the URL of ``dataset`` stands for other content by now; False where that cannot be told soon."""
        try:
            async with asyncio.timeout(CHANGED_TIMEOUT_S):
                return (await self.open(dataset.source)).id != dataset.id
        except (StagerError, TimeoutError):
            return False

    async def _look(self, source: str, before: CachedDataset | None) -> CachedDataset:
        store = await self.store(source)
        known = self._etags.get(source)
        if (
            known is not None
            and before is not None
            and (await store.head(MANIFEST_NAME)).version.etag == known
        ):
            return before
        raw, info = await read_all(store, MANIFEST_NAME, bytes_max=DATASET_MANIFEST_BYTES_MAX)
        dataset = await self._cache.tools.offload.run(
            "hash", decode_dataset, source, raw, of=f"{source}/{MANIFEST_NAME}"
        )
        if before is not None and before.id != dataset.id:
            self.changes[source] = self.changes.get(source, 0) + 1
            event(
                log,
                logging.WARNING,
                "dataset.changed",
                source=source,
                was=before.fingerprint,
                now=dataset.fingerprint,
            )
        if before is None or before.id != dataset.id:
            dataset = await self._cache.add(dataset)
        else:
            dataset = before
        self._etags[source] = info.version.etag
        return dataset

    def _adopted(self, source: str) -> CachedDataset | None:
        """What an earlier daemon knew of the source; the one with most shards here, should there be several."""
        known = [dataset for dataset in self._cache.datasets.values() if dataset.source == source]
        return max(
            known,
            key=lambda dataset: sum(key.dataset == dataset.id for key in self._cache.shards),
            default=None,
        )
