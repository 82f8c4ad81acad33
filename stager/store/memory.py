"""A bucket in memory: the reference of the protocol's meaning, and what simulations run on.

The bucket outlives the stores that look at it, as a real one outlives a killed process.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from stager.checksum import crc64nvme as compute_crc64nvme
from stager.errors import AlreadyExists, IntegrityError, NotFound, StagerError, UsageError
from stager.formats.names import check_key
from stager.store.api import (
    OVERWRITE,
    Buffer,
    Create,
    ObjectInfo,
    ObjectVersion,
    PartTag,
    PutMode,
    Replace,
    Span,
    StoreProperties,
)
from stager.store.checks import (
    check_crc64nvme,
    check_metadata,
    check_part_number,
    other_version,
    span_beyond_end,
)


@dataclass(frozen=True, slots=True)
class _Object:
    body: bytes
    info: ObjectInfo


@dataclass(slots=True)
class _Upload:
    key: str
    metadata: Mapping[str, str]
    parts: dict[int, tuple[PartTag, bytes]] = field(default_factory=dict)


@dataclass(slots=True)
class MemoryBucket:
    """What a memory store's objects and uploads lie in."""

    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[str, _Upload] = field(default_factory=dict)
    counter: int = 0

    def next_number(self) -> int:
        self.counter += 1
        return self.counter


class MemoryStore:
    """An object store over a `MemoryBucket`."""

    def __init__(
        self, bucket: MemoryBucket | None = None, *, properties: StoreProperties | None = None
    ) -> None:
        self.bucket = bucket or MemoryBucket()
        self._properties = properties or StoreProperties("memory", part_bytes_min=1, put_bytes_max=1 << 40)

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
        check_crc64nvme(key, body, crc64nvme)
        return self._store(check_key(key), bytes(body), mode, check_metadata(key, metadata))

    @asynccontextmanager
    async def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AsyncIterator[_MemoryReader]:
        found = self._find(key)
        if if_match is not None and if_match.etag != found.info.version.etag:
            raise other_version(key)
        if span is not None and span.stop > len(found.body):
            raise span_beyond_end(key, len(found.body), span.start, span.stop)
        body = found.body if span is None else found.body[span.start : span.stop]
        yield _MemoryReader(found.info, body)

    async def head(self, key: str) -> ObjectInfo:
        return self._find(key).info

    async def list_objects(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        for key in sorted(self.bucket.objects, key=lambda name: name.encode()):
            found = self.bucket.objects.get(key)
            if found is not None and key.startswith(prefix) and key.encode() > after.encode():
                yield replace(found.info, metadata={})

    async def delete(self, keys: Sequence[str]) -> Mapping[str, StagerError]:
        for key in keys:
            self.bucket.objects.pop(check_key(key), None)
        return {}

    async def copy(self, source: str, target: str, *, if_match: ObjectVersion | None = None) -> ObjectVersion:
        found = self._find(source)
        if if_match is not None and if_match.etag != found.info.version.etag:
            raise other_version(source)
        return self._store(check_key(target), found.body, OVERWRITE, found.info.metadata)

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        upload_id = f"upload-{self.bucket.next_number()}"
        self.bucket.uploads[upload_id] = _Upload(check_key(key), check_metadata(key, metadata))
        return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Buffer, *, crc64nvme: int | None = None
    ) -> PartTag:
        upload = self._upload(key, upload_id)
        check_part_number(key, number)
        crc = check_crc64nvme(key, body, crc64nvme)
        tag = PartTag(number, hashlib.md5(body).hexdigest(), len(body), crc)
        upload.parts[number] = (tag, bytes(body))
        return tag

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartTag]:
        return [tag for _, (tag, _) in sorted(self._upload(key, upload_id).parts.items())]

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[PartTag], *, mode: PutMode = OVERWRITE
    ) -> ObjectVersion:
        upload = self._upload(key, upload_id)
        if not parts:
            raise UsageError(f"`{key}`: an upload without parts cannot be completed", subject=key)
        bodies = []
        for place, tag in enumerate(parts):
            held, body = upload.parts.get(tag.number, (None, b""))
            if held is None or held.etag != tag.etag:
                raise IntegrityError(f"`{key}`: part {tag.number} is not what was uploaded", subject=key)
            if place + 1 < len(parts) and len(body) < self._properties.part_bytes_min:
                raise IntegrityError(f"`{key}`: part {tag.number} is smaller than a part may be", subject=key)
            bodies.append(body)
        version = self._store(key, b"".join(bodies), mode, upload.metadata)
        del self.bucket.uploads[upload_id]
        return version

    async def abort_upload(self, key: str, upload_id: str) -> None:
        self.bucket.uploads.pop(upload_id, None)

    async def list_uploads(self, prefix: str = "") -> AsyncIterator[tuple[str, str]]:
        for upload_id, upload in sorted(self.bucket.uploads.items(), key=lambda item: (item[1].key, item[0])):
            if upload.key.startswith(prefix):
                yield upload.key, upload_id

    async def aclose(self) -> None:
        pass

    def _find(self, key: str) -> _Object:
        found = self.bucket.objects.get(check_key(key))
        if found is None:
            raise NotFound(f"no object `{key}` in {self._properties.name}", subject=key)
        return found

    def _upload(self, key: str, upload_id: str) -> _Upload:
        upload = self.bucket.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise NotFound(f"no upload `{upload_id}` of `{key}`", subject=key)
        return upload

    def _store(self, key: str, body: bytes, mode: PutMode, metadata: Mapping[str, str]) -> ObjectVersion:
        present = self.bucket.objects.get(key)
        if isinstance(mode, Create) and present is not None:
            raise AlreadyExists(f"`{key}` exists already in {self._properties.name}", subject=key)
        if isinstance(mode, Replace) and (present is None or present.info.version.etag != mode.version.etag):
            raise other_version(key)
        version = ObjectVersion(hashlib.md5(body).hexdigest(), f"v{self.bucket.next_number()}")
        self.bucket.objects[key] = _Object(
            body, ObjectInfo(key, len(body), version, metadata, compute_crc64nvme(body))
        )
        return version


class _MemoryReader:
    def __init__(self, info: ObjectInfo, body: bytes) -> None:
        self.info = info
        self._body = memoryview(body)

    async def read(self, size: int) -> bytes:
        piece, self._body = self._body[:size], self._body[size:]
        return bytes(piece)
