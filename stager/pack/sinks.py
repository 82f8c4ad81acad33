"""What takes the bytes of one shard: a file that is published whole, or an object uploaded in parts."""

from __future__ import annotations

import os
from typing import Protocol

from stager.checksum import crc64nvme
from stager.disk import Disk
from stager.errors import IntegrityError, NotFound, Unavailable
from stager.formats.digests import Digest
from stager.offload import Offload
from stager.store.api import ObjectStore, PartTag, StoreProperties

FILE_CHUNK_BYTES = 4 << 20
PART_BYTES = 8 << 20
PARTS_IN_FLIGHT = 4
PLAN_METADATA = "stager-plan"


class Sink(Protocol):
    """Takes a shard in chunks, which may come at the same time, and makes it visible at the end or not at all.

    Attributes:
        chunk_bytes: Bytes of every chunk but the last.
        chunks_in_flight: How many `put` calls it can make use of at a time.
    """

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def chunks_in_flight(self) -> int: ...

    async def begin(self, size: int) -> None:
        """Make room for ``size`` bytes; OutOfSpace if there is none."""
        ...

    async def put(self, number: int, data: memoryview) -> None:
        """Take chunk ``number``, from 0. The memory is the caller's again afterwards."""
        ...

    async def commit(self, size: int, digest: Digest) -> None:
        """Make the shard durable and visible under its name."""
        ...

    async def abandon(self) -> None:
        """Remove what was written; also after a failed `begin`."""
        ...


class FileSink:
    """A file of this machine: space reserved, written beside, synced, renamed."""

    chunk_bytes = FILE_CHUNK_BYTES
    # One is being written while the next is being read and hashed.
    chunks_in_flight = 1

    def __init__(self, staged: str, final: str, *, disk: Disk, offload: Offload) -> None:
        self._staged = staged
        self._final = final
        self._disk = disk
        self._offload = offload

    async def begin(self, size: int) -> None:
        await self._offload.run("disk", self._disk.make_directory, os.path.dirname(self._staged))
        await self._offload.run("disk", self._disk.create, self._staged, size)

    async def put(self, number: int, data: memoryview) -> None:
        await self._offload.run("disk", self._disk.write_at, self._staged, number * self.chunk_bytes, data)

    async def commit(self, size: int, digest: Digest) -> None:
        await self._offload.run("disk", self._disk.publish, self._staged, self._final)

    async def abandon(self) -> None:
        await self._offload.run("disk", self._disk.remove, self._staged)


class ObjectSink:
    """An object of a store, straight from memory: whole if it is small, else by multipart upload."""

    chunks_in_flight = PARTS_IN_FLIGHT

    def __init__(self, key: str, size: int, plan: str, *, store: ObjectStore, offload: Offload) -> None:
        self.chunk_bytes = part_bytes(size, store.properties)
        self._key = key
        self._metadata = {PLAN_METADATA: plan}
        self._store = store
        self._offload = offload
        self._upload_id: str | None = None
        self._tags: dict[int, PartTag] = {}
        self._small: bytes | None = None

    async def begin(self, size: int) -> None:
        if size > self.chunk_bytes:
            self._upload_id = await self._store.begin_upload(self._key, metadata=self._metadata)

    async def put(self, number: int, data: memoryview) -> None:
        if self._upload_id is None:
            self._small = bytes(data)
            return
        crc = await self._offload.run("hash", crc64nvme, data)
        tag = await self._store.put_part(self._key, self._upload_id, number + 1, data, crc64nvme=crc)
        self._tags[tag.number] = tag

    async def commit(self, size: int, digest: Digest) -> None:
        if self._upload_id is None:
            body = self._small or b""
            await self._store.put(self._key, body, metadata=self._metadata, crc64nvme=digest.crc64nvme)
        else:
            parts = [self._tags[number] for number in sorted(self._tags)]
            try:
                await self._store.complete_upload(self._key, self._upload_id, parts)
            except (NotFound, Unavailable):
                # The answer may have been lost after the object was made: what is there decides.
                if not await self._is_ours(size):
                    raise
        await self._check(size, digest)

    async def abandon(self) -> None:
        if self._upload_id is not None:
            await self._store.abort_upload(self._key, self._upload_id)

    async def _is_ours(self, size: int) -> bool:
        try:
            info = await self._store.head(self._key)
        except NotFound:
            return False
        return info.size == size and info.metadata.get(PLAN_METADATA) == self._metadata[PLAN_METADATA]

    async def _check(self, size: int, digest: Digest) -> None:
        info = await self._store.head(self._key)
        if info.size != size or info.crc64nvme not in (None, digest.crc64nvme):
            raise IntegrityError(
                f"`{self._key}` in {self._store.properties.name} is not what was uploaded:"
                f" {info.size} bytes for {size}, or another checksum",
                subject=self._key,
                hint="something else writes to the same place; run the same command again",
            )


def part_bytes(size: int, properties: StoreProperties) -> int:
    """Bytes of a part for a shard of ``size``: whole MiB, few enough parts, and what the store allows."""
    least = max(PART_BYTES, properties.part_bytes_min, -(-size // properties.parts_max))
    return min(-(-least // (1 << 20)) << 20, properties.part_bytes_max)
