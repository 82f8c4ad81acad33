"""Counting, as a decorator of a store: requests and failures by verb, bytes by direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from stager.errors import StagerError
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


@dataclass(slots=True)
class StoreMeter:
    """What went through a store so far.

    Attributes:
        requests: Calls begun, by verb.
        failures: Calls that failed, by verb and name of the error.
        bytes_up: Bytes of bodies handed to writes that succeeded.
        bytes_down: Bytes of bodies read.
        in_flight: Calls and bodies that are open now.
    """

    requests: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_up: int = 0
    bytes_down: int = 0
    in_flight: int = 0

    @contextmanager
    def counted(self, verb: str) -> Iterator[None]:
        """Count one call of ``verb``."""
        self.requests[verb] += 1
        self.in_flight += 1
        try:
            yield
        except StagerError as error:
            self.failures[verb, type(error).__name__] += 1
            raise
        finally:
            self.in_flight -= 1


class MeteredStore:
    """``inner``, counted in ``meter``. Below `RetryingStore` it counts what is really sent."""

    def __init__(self, inner: ObjectStore, meter: StoreMeter) -> None:
        self._inner = inner
        self._meter = meter

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
        with self._meter.counted("put"):
            version = await self._inner.put(key, body, mode=mode, metadata=metadata, crc64nvme=crc64nvme)
        self._meter.bytes_up += len(body)
        return version

    def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AbstractAsyncContextManager[ObjectReader]:
        return self._get(key, span, if_match)

    async def head(self, key: str) -> ObjectInfo:
        with self._meter.counted("head"):
            return await self._inner.head(key)

    async def list_objects(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        self._meter.requests["list"] += 1
        try:
            async for info in self._inner.list_objects(prefix, after=after):
                yield info
        except StagerError as error:
            self._meter.failures["list", type(error).__name__] += 1
            raise

    async def delete(self, keys: Sequence[str]) -> Mapping[str, StagerError]:
        with self._meter.counted("delete"):
            failures = await self._inner.delete(keys)
        for error in failures.values():
            self._meter.failures["delete", type(error).__name__] += 1
        return failures

    async def copy(self, source: str, target: str, *, if_match: ObjectVersion | None = None) -> ObjectVersion:
        with self._meter.counted("copy"):
            return await self._inner.copy(source, target, if_match=if_match)

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        with self._meter.counted("begin_upload"):
            return await self._inner.begin_upload(key, metadata=metadata)

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Buffer, *, crc64nvme: int | None = None
    ) -> PartTag:
        with self._meter.counted("put_part"):
            tag = await self._inner.put_part(key, upload_id, number, body, crc64nvme=crc64nvme)
        self._meter.bytes_up += len(body)
        return tag

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartTag]:
        with self._meter.counted("list_parts"):
            return await self._inner.list_parts(key, upload_id)

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[PartTag], *, mode: PutMode = OVERWRITE
    ) -> ObjectVersion:
        with self._meter.counted("complete_upload"):
            return await self._inner.complete_upload(key, upload_id, parts, mode=mode)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        with self._meter.counted("abort_upload"):
            await self._inner.abort_upload(key, upload_id)

    async def list_uploads(self, prefix: str = "") -> AsyncIterator[tuple[str, str]]:
        self._meter.requests["list_uploads"] += 1
        try:
            async for found in self._inner.list_uploads(prefix):
                yield found
        except StagerError as error:
            self._meter.failures["list_uploads", type(error).__name__] += 1
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()

    @asynccontextmanager
    async def _get(
        self, key: str, span: Span | None, if_match: ObjectVersion | None
    ) -> AsyncIterator[ObjectReader]:
        with self._meter.counted("get"):
            async with self._inner.get(key, span=span, if_match=if_match) as reader:
                yield _MeteredReader(reader, self._meter)


class _MeteredReader:
    def __init__(self, inner: ObjectReader, meter: StoreMeter) -> None:
        self._inner = inner
        self._meter = meter

    @property
    def info(self) -> ObjectInfo:
        return self._inner.info

    async def read(self, size: int) -> bytes:
        piece = await self._inner.read(size)
        self._meter.bytes_down += len(piece)
        return piece
