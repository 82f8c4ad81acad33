"""Bounds, as a decorator of a store: calls in flight, and bytes a second in each direction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from stager.budget import RateLimit
from stager.errors import DeadlineExceeded, StagerError
from stager.store.api import (
    OVERWRITE,
    Buffer,
    ObjectInfo,
    ObjectReader,
    ObjectStore,
    ObjectVersion,
    PartTag,
    PutMode,
    Span,
    StoreProperties,
)

TURN_TIMEOUT_S = 600.0
_RATED_BYTES = 256 << 10


class LimitedStore:
    """``inner``, with at most ``calls_max`` calls and open bodies at once, and bytes at most at the given rates.

    A body counts for as long as it is open, so whoever opens several at once needs a bound of at least as many.
    Listings do not count: they wait for their readers.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        calls_max: int = 64,
        upload: RateLimit | None = None,
        download: RateLimit | None = None,
    ) -> None:
        self._inner = inner
        self._calls_max = calls_max
        self._turns = asyncio.Semaphore(calls_max)
        self._upload = upload or RateLimit()
        self._download = download or RateLimit()

    @property
    def properties(self) -> StoreProperties:
        return self._inner.properties

    async def put(
        self,
        key: str,
        body: Buffer,
        *,
        mode: PutMode = OVERWRITE,
        metadata: Mapping[str, str] | None = None,
        crc64nvme: int | None = None,
    ) -> ObjectVersion:
        async with self._turn(key):
            await self._upload.take(len(body))
            return await self._inner.put(key, body, mode=mode, metadata=metadata, crc64nvme=crc64nvme)

    def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AbstractAsyncContextManager[ObjectReader]:
        return self._get(key, span, if_match)

    async def head(self, key: str) -> ObjectInfo:
        async with self._turn(key):
            return await self._inner.head(key)

    def list_objects(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        return self._inner.list_objects(prefix, after=after)

    async def delete(self, keys: Sequence[str]) -> Mapping[str, StagerError]:
        async with self._turn(keys[0] if keys else ""):
            return await self._inner.delete(keys)

    async def copy(self, source: str, target: str, *, if_match: ObjectVersion | None = None) -> ObjectVersion:
        async with self._turn(target):
            return await self._inner.copy(source, target, if_match=if_match)

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        async with self._turn(key):
            return await self._inner.begin_upload(key, metadata=metadata)

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Buffer, *, crc64nvme: int | None = None
    ) -> PartTag:
        async with self._turn(key):
            await self._upload.take(len(body))
            return await self._inner.put_part(key, upload_id, number, body, crc64nvme=crc64nvme)

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartTag]:
        async with self._turn(key):
            return await self._inner.list_parts(key, upload_id)

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[PartTag], *, mode: PutMode = OVERWRITE
    ) -> ObjectVersion:
        async with self._turn(key):
            return await self._inner.complete_upload(key, upload_id, parts, mode=mode)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        async with self._turn(key):
            await self._inner.abort_upload(key, upload_id)

    def list_uploads(self, prefix: str = "") -> AsyncIterator[tuple[str, str]]:
        return self._inner.list_uploads(prefix)

    async def aclose(self) -> None:
        await self._inner.aclose()

    @asynccontextmanager
    async def _get(
        self, key: str, span: Span | None, if_match: ObjectVersion | None
    ) -> AsyncIterator[ObjectReader]:
        async with self._turn(key), self._inner.get(key, span=span, if_match=if_match) as reader:
            yield _LimitedReader(reader, self._download)

    @asynccontextmanager
    async def _turn(self, subject: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await self._turns.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"`{subject}` waited {TURN_TIMEOUT_S:.0f} s for one of {self._calls_max} calls to end",
                subject=subject,
                hint="calls to the store hang; look at it, or raise the bound",
            ) from None
        try:
            yield
        finally:
            self._turns.release()


class _LimitedReader:
    def __init__(self, inner: ObjectReader, download: RateLimit) -> None:
        self._inner = inner
        self._download = download

    @property
    def info(self) -> ObjectInfo:
        return self._inner.info

    async def read(self, size: int) -> bytes:
        # Small pieces under a limit, so that the pauses between them are short.
        wanted = size if self._download.bytes_per_s is None else min(size, _RATED_BYTES)
        piece = await self._inner.read(wanted)
        await self._download.take(len(piece))
        return piece
