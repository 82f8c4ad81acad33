"""A staging process of its own, to be killed: ``python -m tests.stage.child BUCKET CACHE LOG``.

It stages the dataset in the directory BUCKET into CACHE, slowly enough to be met in the middle, and appends the bytes of
every body that it reads to LOG as ``key start stop``, so that what is sent again after a kill can be counted.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from stager.budget import RateLimit
from stager.cache.shards import ShardCache
from stager.disk import LocalDisk
from stager.offload import ThreadOffload
from stager.prefetch.service import StagingOptions, StagingService
from stager.store.api import ObjectReader, ObjectStore, ObjectVersion, Span
from stager.store.directory import DirectoryStore
from stager.transfer.download import DownloadOptions
from stager.transfer.tools import Tools

PART_BYTES = 64 << 10
SHARDS_AT_ONCE = 2
PARTS_AT_ONCE = 2


class LoggedStore:
    """Notes what is read; all else is the inner store's."""

    def __init__(self, inner: ObjectStore, log: str) -> None:
        self._inner = inner
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @asynccontextmanager
    async def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AsyncIterator[ObjectReader]:
        async with self._inner.get(key, span=span, if_match=if_match) as reader:
            yield _LoggedReader(reader, self._log, span.start if span else 0)


class _LoggedReader:
    def __init__(self, inner: ObjectReader, log: int, start: int) -> None:
        self._inner = inner
        self._log = log
        self._at = start
        self.info = inner.info

    async def read(self, size: int) -> bytes:
        piece = await self._inner.read(min(size, 16 << 10))
        # One write: a line is in the log whole or not at all.
        os.write(self._log, f"{self.info.key} {self._at} {self._at + len(piece)}\n".encode())
        self._at += len(piece)
        return piece


async def stage(bucket: str, cache_root: str, log: str, bytes_per_s: float) -> None:
    """Stage until killed."""
    disk, offload, chance = LocalDisk(), ThreadOffload(disk_threads=4), random.Random()
    tools = Tools(disk, offload, download_rate=RateLimit(bytes_per_s), random=chance)
    store = LoggedStore(DirectoryStore(bucket, disk=disk, offload=offload, chance=chance), log)

    async def open_store(_: str) -> ObjectStore:
        return store  # type: ignore[return-value]  # the rest is passed on by name

    options = StagingOptions(SHARDS_AT_ONCE, DownloadOptions(PART_BYTES, PARTS_AT_ONCE))
    disk.make_directory(cache_root)
    with disk.lock(f"{cache_root}/lock", f"process {os.getpid()}"):
        service = StagingService(
            ShardCache(cache_root, 1 << 30, tools), open_store, sources=[bucket], options=options
        )
        await service.run(lambda: None)


if __name__ == "__main__":
    asyncio.run(stage(*sys.argv[1:4], float(sys.argv[4])))
