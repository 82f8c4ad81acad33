"""A prefix of a store, as a store: keys are relative to the prefix."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from stager.errors import StagerError
from stager.formats.names import check_key, check_relative_path
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


class PrefixedStore:
    """Objects of ``inner`` below ``prefix/``. Errors name the full key, so that it can be found."""

    def __init__(self, inner: ObjectStore, prefix: str) -> None:
        self._inner = inner
        self._prefix = check_relative_path(prefix.strip("/"), of="prefix") + "/"
        self._properties = replace(inner.properties, name=f"{inner.properties.name}/{self._prefix[:-1]}")

    @property
    def properties(self) -> StoreProperties:
        return self._properties

    async def put(
        self,
        key: str,
        body: Buffer,
        *,
        mode: PutMode = OVERWRITE,
        metadata: Mapping[str, str] | None = None,
        crc64nvme: int | None = None,
    ) -> ObjectVersion:
        return await self._inner.put(self._full(key), body, mode=mode, metadata=metadata, crc64nvme=crc64nvme)

    def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AbstractAsyncContextManager[ObjectReader]:
        return self._get(key, span, if_match)

    async def head(self, key: str) -> ObjectInfo:
        return self._relative(await self._inner.head(self._full(key)))

    async def list_objects(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        start = self._prefix + after if after else ""
        async for info in self._inner.list_objects(self._prefix + prefix, after=start):
            yield self._relative(info)

    async def delete(self, keys: Sequence[str]) -> Mapping[str, StagerError]:
        failures = await self._inner.delete([self._full(key) for key in keys])
        return {key.removeprefix(self._prefix): failure for key, failure in failures.items()}

    async def copy(self, source: str, target: str, *, if_match: ObjectVersion | None = None) -> ObjectVersion:
        return await self._inner.copy(self._full(source), self._full(target), if_match=if_match)

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        return await self._inner.begin_upload(self._full(key), metadata=metadata)

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Buffer, *, crc64nvme: int | None = None
    ) -> PartTag:
        return await self._inner.put_part(self._full(key), upload_id, number, body, crc64nvme=crc64nvme)

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartTag]:
        return await self._inner.list_parts(self._full(key), upload_id)

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[PartTag], *, mode: PutMode = OVERWRITE
    ) -> ObjectVersion:
        return await self._inner.complete_upload(self._full(key), upload_id, parts, mode=mode)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._inner.abort_upload(self._full(key), upload_id)

    async def list_uploads(self, prefix: str = "") -> AsyncIterator[tuple[str, str]]:
        async for key, upload_id in self._inner.list_uploads(self._prefix + prefix):
            yield key.removeprefix(self._prefix), upload_id

    async def aclose(self) -> None:
        await self._inner.aclose()

    @asynccontextmanager
    async def _get(
        self, key: str, span: Span | None, if_match: ObjectVersion | None
    ) -> AsyncIterator[ObjectReader]:
        async with self._inner.get(self._full(key), span=span, if_match=if_match) as reader:
            yield _RelativeReader(reader, self._relative(reader.info))

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _relative(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self._prefix))


class _RelativeReader:
    def __init__(self, inner: ObjectReader, info: ObjectInfo) -> None:
        self._inner = inner
        self._info = info

    @property
    def info(self) -> ObjectInfo:
        return self._info

    async def read(self, size: int) -> bytes:
        return await self._inner.read(size)
