"""What the staging tests share: datasets of random bytes, and a store that follows a script and counts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stager.checksum import digest_of
from stager.errors import StagerError
from stager.formats.manifest import DatasetManifest, ShardEntry, encode_dataset_manifest
from stager.formats.names import MANIFEST_NAME
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


def random_bytes(seed: int, size: int) -> bytes:
    """The same ``size`` bytes for the same seed."""
    return random.Random(seed).randbytes(size)


@dataclass(frozen=True, slots=True)
class Dataset:
    """A manifest and the shards that it names."""

    manifest: DatasetManifest
    bodies: Mapping[str, bytes]

    @property
    def names(self) -> list[str]:
        return [shard.name for shard in self.manifest.shards]

    async def put_into(self, store: ObjectStore) -> None:
        """Shards first, manifest last."""
        for name, body in self.bodies.items():
            await store.put(name, body)
        await store.put(MANIFEST_NAME, encode_dataset_manifest(self.manifest))


def make_dataset(seed: int, sizes: Sequence[int], *, samples: int = 10) -> Dataset:
    """A dataset of shards of these sizes, each said to hold ``samples`` samples."""
    bodies = {
        f"shard-{number:06d}.tar": random_bytes(seed * 1000 + number, size)
        for number, size in enumerate(sizes)
    }
    shards = tuple(ShardEntry(name, len(body), samples, digest_of(body)) for name, body in bodies.items())
    return Dataset(DatasetManifest(shards), bodies)


@dataclass(frozen=True, slots=True)
class Act:
    """What a script makes of one GET.

    Attributes:
        refuse: Raised instead of an answer.
        break_after: Bytes after which the body fails.
        stall_after: Bytes after which nothing comes any more.
        drip_s: Seconds before each byte, one byte a read.
        flip: Offset in the body of a byte that arrives altered.
    """

    refuse: Callable[[], StagerError] | None = None
    break_after: int | None = None
    break_with: Callable[[], StagerError] | None = None
    stall_after: int | None = None
    drip_s: float = 0.0
    flip: int | None = None


@dataclass
class Asked:
    """One GET as it came in."""

    key: str
    span: Span | None
    pinned: bool
    sent_bytes: int = 0


Script = Callable[[int, Asked], Act | None]


@dataclass
class ScriptedStore:
    """Passes calls on, counts them, and lets ``script(number of the GET from 1, what is asked)`` spoil GETs."""

    inner: ObjectStore
    script: Script | None = None
    gets: list[Asked] = field(default_factory=list)
    other_calls: list[str] = field(default_factory=list)
    open_bodies: int = 0
    open_bodies_peak: int = 0

    @property
    def properties(self) -> StoreProperties:
        return self.inner.properties

    @property
    def sent_bytes(self) -> int:
        return sum(asked.sent_bytes for asked in self.gets)

    def gets_of(self, key: str) -> list[Asked]:
        return [asked for asked in self.gets if asked.key == key]

    @asynccontextmanager
    async def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AsyncIterator[ObjectReader]:
        asked = Asked(key, span, if_match is not None)
        self.gets.append(asked)
        act = (self.script(len(self.gets), asked) if self.script else None) or Act()
        await asyncio.sleep(0)
        if act.refuse is not None:
            raise act.refuse()
        async with self.inner.get(key, span=span, if_match=if_match) as reader:
            self.open_bodies += 1
            self.open_bodies_peak = max(self.open_bodies_peak, self.open_bodies)
            try:
                yield _ScriptedReader(reader, act, asked)
            finally:
                self.open_bodies -= 1

    async def put(
        self,
        key: str,
        body: Buffer,
        *,
        mode: PutMode = OVERWRITE,
        metadata: Mapping[str, str] | None = None,
        crc64nvme: int | None = None,
    ) -> ObjectVersion:
        self.other_calls.append("put")
        return await self.inner.put(key, body, mode=mode, metadata=metadata, crc64nvme=crc64nvme)

    async def head(self, key: str) -> ObjectInfo:
        self.other_calls.append("head")
        return await self.inner.head(key)

    def list_objects(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        self.other_calls.append("list")
        return self.inner.list_objects(prefix, after=after)

    async def delete(self, keys: Sequence[str]) -> Mapping[str, StagerError]:
        self.other_calls.append("delete")
        return await self.inner.delete(keys)

    async def copy(self, source: str, target: str, *, if_match: ObjectVersion | None = None) -> ObjectVersion:
        self.other_calls.append("copy")
        return await self.inner.copy(source, target, if_match=if_match)

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        self.other_calls.append("begin_upload")
        return await self.inner.begin_upload(key, metadata=metadata)

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Buffer, *, crc64nvme: int | None = None
    ) -> PartTag:
        self.other_calls.append("put_part")
        return await self.inner.put_part(key, upload_id, number, body, crc64nvme=crc64nvme)

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartTag]:
        self.other_calls.append("list_parts")
        return await self.inner.list_parts(key, upload_id)

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[PartTag], *, mode: PutMode = OVERWRITE
    ) -> ObjectVersion:
        self.other_calls.append("complete_upload")
        return await self.inner.complete_upload(key, upload_id, parts, mode=mode)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        self.other_calls.append("abort_upload")
        await self.inner.abort_upload(key, upload_id)

    def list_uploads(self, prefix: str = "") -> AsyncIterator[tuple[str, str]]:
        self.other_calls.append("list_uploads")
        return self.inner.list_uploads(prefix)

    async def aclose(self) -> None:
        await self.inner.aclose()


class _ScriptedReader:
    def __init__(self, inner: ObjectReader, act: Act, asked: Asked) -> None:
        self._inner = inner
        self._act = act
        self._asked = asked

    @property
    def info(self) -> ObjectInfo:
        return self._inner.info

    async def read(self, size: int) -> bytes:
        act, sent = self._act, self._asked.sent_bytes
        for bound in (act.break_after, act.stall_after):
            if bound is not None:
                size = min(size, bound - sent)
        if size == 0 and act.stall_after is not None:
            await asyncio.sleep(1e9)
        if size == 0 and act.break_with is not None:
            raise act.break_with()
        if act.drip_s:
            await asyncio.sleep(act.drip_s)
            size = 1
        piece = await self._inner.read(size) if size else b""
        if act.flip is not None and sent <= act.flip < sent + len(piece):
            altered = bytearray(piece)
            altered[act.flip - sent] ^= 1
            piece = bytes(altered)
        self._asked.sent_bytes += len(piece)
        return piece
