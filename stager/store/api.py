"""The object store protocol: a small one for implementers, free functions for callers.

Behaviour (retries, limits, metering, prefixes) comes by decorators, never by inheritance. Keys are what
`stager.formats.names.check_key` accepts. Every call may raise the store errors of `stager.errors`; `Unavailable`
means that the outcome of a write is unknown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from stager.errors import FormatError, IntegrityError, StagerError

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes from ``start`` up to, not including, ``stop``; both known, ``start < stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"span {self.start}..{self.stop} holds no bytes")

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """One state of an object. ``etag`` is opaque and unquoted; equal etags of one key mean equal bytes."""

    etag: str
    version_id: str | None = None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object.

    Attributes:
        key: The full key, as given to the store.
        size: Bytes of the whole object.
        version: Its state; listings may leave ``version_id`` out.
        metadata: The user's metadata, keys in lower case; empty in listings.
        crc64nvme: Of the whole object, where the store keeps it.
    """

    key: str
    size: int
    version: ObjectVersion
    metadata: Mapping[str, str] = field(default_factory=dict)
    crc64nvme: int | None = None


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Write whatever is there."""


@dataclass(frozen=True, slots=True)
class Create:
    """Write only if nothing is there; AlreadyExists otherwise."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Write only over this version; PreconditionFailed otherwise."""

    version: ObjectVersion


PutMode = Overwrite | Create | Replace
OVERWRITE = Overwrite()
CREATE = Create()


@dataclass(frozen=True, slots=True)
class PartTag:
    """One uploaded part: its number (from 1), opaque etag, bytes, and CRC where the store keeps it."""

    number: int
    etag: str
    size: int
    crc64nvme: int | None = None


@dataclass(frozen=True, slots=True)
class StoreProperties:
    """Limits of a store, by its profile. What it honours is found by `stager.store.probe`, not believed.

    Attributes:
        name: For messages, e.g. ``s3://bucket``.
        part_bytes_min: Smallest part but the last.
        part_bytes_max: Largest part.
        parts_max: Parts in one upload.
        put_bytes_max: Largest object in one `put`.
        local: Whether the bytes lie in a file system of this machine (no round trips to hide).
    """

    name: str
    part_bytes_min: int = 5 << 20
    part_bytes_max: int = 5 << 30
    parts_max: int = 10_000
    put_bytes_max: int = 5 << 30
    local: bool = False


class ObjectReader(Protocol):
    """An open body."""

    @property
    def info(self) -> ObjectInfo:
        """Of the whole object, also when a span was asked for."""
        ...

    async def read(self, size: int) -> bytes:
        """Up to ``size`` bytes, at least one before the end, empty at the end.

        Raises:
            Unavailable: The body broke off, stalled or ended early.
            IntegrityError: The body is longer than announced.
        """
        ...


class ObjectStore(Protocol):
    """A bucket, or a prefix of one."""

    @property
    def properties(self) -> StoreProperties: ...

    async def put(
        self,
        key: str,
        body: Buffer,
        *,
        mode: PutMode = OVERWRITE,
        metadata: Mapping[str, str] | None = None,
        crc64nvme: int | None = None,
    ) -> ObjectVersion:
        """Write a whole object. With ``crc64nvme`` a store that can check it refuses other bytes (IntegrityError)."""
        ...

    def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AbstractAsyncContextManager[ObjectReader]:
        """Open an object. A span beyond the end is an IntegrityError; another version is PreconditionFailed."""
        ...

    async def head(self, key: str) -> ObjectInfo:
        """What is there, or NotFound."""
        ...

    def list_objects(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects whose key starts with ``prefix`` and is greater than ``after``, in order of their UTF-8 keys."""
        ...

    async def delete(self, keys: Sequence[str]) -> Mapping[str, StagerError]:
        """Delete each key; a missing one counts as deleted. Returns the keys that could not be, with the reason."""
        ...

    async def copy(self, source: str, target: str, *, if_match: ObjectVersion | None = None) -> ObjectVersion:
        """Copy within the store, metadata included, without moving the bytes through here."""
        ...

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """Start an upload in parts; returns its id, which outlives this process."""
        ...

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Buffer, *, crc64nvme: int | None = None
    ) -> PartTag:
        """Write part ``number`` (from 1); writing it again replaces it. NotFound if the upload is gone."""
        ...

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartTag]:
        """The parts that the store holds, by number. NotFound if the upload is gone."""
        ...

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[PartTag], *, mode: PutMode = OVERWRITE
    ) -> ObjectVersion:
        """Make the object of these parts visible. NotFound if the upload is gone: perhaps since it was completed."""
        ...

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Forget an upload and its parts; an unknown one is fine."""
        ...

    def list_uploads(self, prefix: str = "") -> AsyncIterator[tuple[str, str]]:
        """Uploads begun and neither completed nor aborted, as (key, upload id)."""
        ...

    async def aclose(self) -> None:
        """Release connections; the store is not used again."""
        ...


async def read_all(store: ObjectStore, key: str, *, bytes_max: int) -> tuple[bytes, ObjectInfo]:
    """A small object whole, e.g. a manifest.

    Raises:
        FormatError: It is larger than ``bytes_max``.
    """
    async with store.get(key) as reader:
        if reader.info.size > bytes_max:
            raise FormatError(
                f"`{key}` has {reader.info.size} bytes; at most {bytes_max} are read", subject=key
            )
        pieces = []
        while piece := await reader.read(1 << 20):
            pieces.append(piece)
        body = b"".join(pieces)
        if len(body) != reader.info.size:
            raise IntegrityError(
                f"`{key}` gave {len(body)} bytes where {reader.info.size} were announced", subject=key
            )
        return body, reader.info
