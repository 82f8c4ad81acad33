"""Downloads: parallel ranges of one version of an object into a staging file, verified, resumed after a kill.

Beside the staging file lies a part map: which parts are there, with the CRC that each had on the wire. The map is a
claim, not a proof: a resumed download reads every claimed part back and fetches again what does not match, so neither
the file nor the map has to be synced while bytes arrive. The whole is published by the caller, after `download` has
compared the combined CRC of all parts with the manifest's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stager.budget import Priority
from stager.checksum import Buffer, Hasher, combine_all, crc64nvme
from stager.disk import Disk
from stager.errors import (
    FormatError,
    IntegrityError,
    PreconditionFailed,
    StagerError,
    StoreError,
    Unavailable,
)
from stager.formats.digests import Digest, decode_crc64nvme, encode_crc64nvme
from stager.formats.fields import as_object, load_object, take_count, take_text
from stager.logs import event
from stager.store.api import ObjectReader, ObjectStore, ObjectVersion, Span
from stager.transfer.ranges import DOWNLOAD_PART_BYTES, Part, cut
from stager.transfer.tools import Tools, backoff_s

log = logging.getLogger("stager.download")

READ_BYTES = 1 << 20
WRITE_BYTES = 4 << 20
PART_MAP_SUFFIX = ".parts"
PART_MAP_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class DownloadOptions:
    """Bounds of one download.

    Attributes:
        part_bytes: Of a range.
        concurrency: Ranges in flight.
        read_timeout_s: How long a body may stand still.
        attempts: Tries of one part before the download fails.
        verify_sha256: Read the finished file once more for its SHA-256; the CRC is always compared.
    """

    part_bytes: int = DOWNLOAD_PART_BYTES
    concurrency: int = 8
    read_timeout_s: float = 30.0
    attempts: int = 6
    verify_sha256: bool = False


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A finished download: bytes of the object, its CRC, and how many bytes came over the wire for it."""

    size: int
    crc64nvme: int
    fetched_bytes: int


async def download(
    store: ObjectStore,
    key: str,
    staged: str,
    tools: Tools,
    *,
    size: int,
    digest: Digest | None,
    priority: Priority = Priority.PREFETCH,
    options: DownloadOptions = DownloadOptions(),
    progress: Callable[[int], None] | None = None,
) -> Downloaded:
    """Fetch ``key`` into the file ``staged`` and verify it; the directory must exist.

    Args:
        store: Where it is.
        key: Its key.
        staged: The staging file; what an earlier, killed download left in it is used again.
        tools: Disk, threads and bounds.
        size: Bytes that it must have, by the manifest.
        digest: What it must be, by the manifest; None where none is known, then lengths and version are all.
        priority: In the memory budget.
        options: Bounds.
        progress: Called with the number of bytes that were just written.

    Raises:
        IntegrityError: The object has another size or digest, or changed twice while it was read.
        StoreError: The store failed for good.
    """
    for attempt in (1, 2):
        run = _Download(store, key, staged, tools, size, digest, priority, options, progress)
        try:
            return await run.run()
        except PreconditionFailed:
            await run.forget()
            if attempt == 2:
                raise IntegrityError(
                    f"`{key}` was written again twice while it was read",
                    subject=key,
                    hint="objects of a dataset or checkpoint are never rewritten in place: find out who does it",
                ) from None
            event(log, logging.WARNING, "download.object_changed", key=key)
        except IntegrityError:
            await run.forget()
            raise
    raise AssertionError("unreachable")


class _Download:
    """The state of one pass over one version of the object."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        staged: str,
        tools: Tools,
        size: int,
        digest: Digest | None,
        priority: Priority,
        options: DownloadOptions,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.store = store
        self.key = key
        self.staged = staged
        self.tools = tools
        self.size = size
        self.digest = digest
        self.priority = priority
        self.options = options
        self.progress = progress
        self.parts = cut(size, options.part_bytes)
        self.done: dict[int, int] = {}
        self.version: ObjectVersion | None = None
        self.fetched_bytes = 0
        self.failure: StagerError | None = None
        self._map_written_for = 0
        self._map_lock = asyncio.Lock()

    async def run(self) -> Downloaded:
        await self._resume_or_create()
        pending = deque(part for part in self.parts if part.number not in self.done)
        if pending and self.version is None:
            # The first answer names the version; only then can the others be held to it.
            await self._fetch(pending.popleft())
            self._raise_failure()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.options.concurrency, len(pending))):
                group.create_task(self._work(pending))
        self._raise_failure()
        whole = combine_all((self.done[part.number], part.size) for part in self.parts)
        await self._verify(whole)
        await self.tools.offload.run("disk", self.tools.disk.remove, self.staged + PART_MAP_SUFFIX)
        return Downloaded(self.size, whole, self.fetched_bytes)

    async def forget(self) -> None:
        """Drop what was staged: it is of no version that can still be had."""
        disk = self.tools.disk
        await self.tools.offload.run("disk", disk.remove, self.staged + PART_MAP_SUFFIX)
        await self.tools.offload.run("disk", disk.remove, self.staged)

    async def _resume_or_create(self) -> None:
        claim = await self.tools.offload.run(
            "disk", _read_claim, self.tools.disk, self.staged, self.size, self.parts
        )
        if claim is None:
            disk = self.tools.disk
            await self.tools.offload.run("disk", disk.remove, self.staged + PART_MAP_SUFFIX)
            await self.tools.offload.run("disk", disk.create, self.staged, self.size)
            return
        self.version = ObjectVersion(claim.etag)
        for part in self.parts:
            if part.number in claim.parts:
                crc = await self.tools.offload.run("hash", _crc_of_part, self.tools.disk, self.staged, part)
                if crc == claim.parts[part.number]:
                    self.done[part.number] = crc
        event(log, logging.INFO, "download.resumed", key=self.key, parts=len(self.done), of=len(self.parts))

    async def _work(self, pending: deque[Part]) -> None:
        while pending and self.failure is None:
            await self._fetch(pending.popleft())

    async def _fetch(self, part: Part) -> None:
        """One part, with its retries; a failure is kept for the group's parent and ends the other workers."""
        try:
            self.done[part.number] = await self._fetch_part(part)
            await self._write_map()
        except StagerError as error:
            if self.failure is None:
                self.failure = error

    async def _fetch_part(self, part: Part) -> int:
        progress = _PartProgress(part)
        for attempt in range(1, self.options.attempts + 1):
            try:
                await self._receive(part, progress)
                return progress.crc
            except StoreError as error:
                if not error.retryable or attempt == self.options.attempts:
                    raise
                level = logging.WARNING if attempt == 1 else logging.DEBUG
                event(
                    log, level, "download.part_retried", key=self.key, part=part.number, reason=error.message
                )
                await asyncio.sleep(backoff_s(attempt, self.tools.random, error))
        raise AssertionError("unreachable")

    async def _receive(self, part: Part, progress: _PartProgress) -> None:
        """Go on with a part from where its last body ended."""
        held = min(WRITE_BYTES, part.size) + READ_BYTES
        async with (
            self.tools.memory.reserve(held, self.priority, purpose=f"download memory for `{self.key}`"),
            self.store.get(self.key, span=progress.left(), if_match=self.version) as reader,
        ):
            self._check_answer(reader)
            pieces: list[bytes] = []
            gathered = 0
            while progress.written + gathered < part.size:
                left = part.size - progress.written - gathered
                piece = await self._read(reader, min(READ_BYTES, left))
                pieces.append(piece)
                gathered += len(piece)
                if gathered >= WRITE_BYTES or gathered == part.size - progress.written:
                    await self._write(part, progress, b"".join(pieces))
                    pieces, gathered = [], 0

    async def _read(self, reader: ObjectReader, size: int) -> bytes:
        try:
            async with asyncio.timeout(self.options.read_timeout_s):
                piece = await reader.read(size)
        except TimeoutError:
            raise Unavailable(
                f"`{self.key}`: no byte came for {self.options.read_timeout_s:g} s", subject=self.key
            ) from None
        if not piece:
            raise Unavailable(f"`{self.key}`: the body ended early", subject=self.key)
        await self.tools.download_rate.take(len(piece))
        return piece

    async def _write(self, part: Part, progress: _PartProgress, data: bytes) -> None:
        offset = part.span.start + progress.written
        progress.crc = await self.tools.offload.run(
            "disk", _write_piece, self.tools.disk, self.staged, offset, data, progress.crc
        )
        progress.written += len(data)
        self.fetched_bytes += len(data)
        if self.progress is not None:
            self.progress(len(data))

    def _check_answer(self, reader: ObjectReader) -> None:
        info = reader.info
        if info.size != self.size:
            raise IntegrityError(
                f"`{self.key}` has {info.size} bytes in the store; its manifest says {self.size}",
                subject=self.key,
                hint="it was truncated or replaced after the manifest was written: upload it again from the source",
            )
        if self.version is None:
            self.version = info.version

    async def _write_map(self) -> None:
        async with self._map_lock:
            # Whoever waited for the lock may find that the one before has written for both.
            count = len(self.done)
            if count == self._map_written_for or count == len(self.parts):
                return
            self._map_written_for = count
            raw = encode_part_map(self.key, self.version, self.size, self.parts, self.done)
            path = self.staged + PART_MAP_SUFFIX
            await self.tools.offload.run("disk", _write_claim, self.tools.disk, path, raw)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def _verify(self, whole: int) -> None:
        if self.digest is None:
            return
        if whole != self.digest.crc64nvme:
            raise _other_bytes(self.key, "CRC-64/NVME")
        if self.options.verify_sha256:
            found = await self.tools.offload.run(
                "hash", digest_of_file, self.tools.disk, self.staged, self.size
            )
            if found != self.digest:
                raise _other_bytes(self.key, "SHA-256")


class _PartProgress:
    """How far a part has come over all its tries."""

    __slots__ = ("crc", "part", "written")

    def __init__(self, part: Part) -> None:
        self.part = part
        self.written = 0
        self.crc = 0

    def left(self) -> Span:
        return Span(self.part.span.start + self.written, self.part.span.stop)


@dataclass(frozen=True, slots=True)
class PartMap:
    """What a part map claims: the version's etag, and the CRC of each part that was written."""

    etag: str
    parts: dict[int, int]


def encode_part_map(
    key: str, version: ObjectVersion | None, size: int, parts: list[Part], done: dict[int, int]
) -> bytes:
    """The part map's JSON."""
    return json.dumps(
        {
            "key": key,
            "etag": version.etag if version else "",
            "bytes": size,
            "part_bytes": parts[0].size if parts else 0,
            "parts": {str(number): encode_crc64nvme(crc) for number, crc in sorted(done.items())},
        }
    ).encode()


def decode_part_map(raw: bytes, *, size: int, parts: list[Part], of: str) -> PartMap:
    """A part map that fits this object and these cuts.

    Raises:
        FormatError: It is damaged, or of other cuts.
    """
    value = load_object(raw, of=of)
    fits = (size, parts[0].size if parts else 0)
    if (take_count(value, "bytes", at=of), take_count(value, "part_bytes", at=of)) != fits:
        raise FormatError(f"`{of}` is of another object or other parts", subject=of)
    claimed = {}
    for number, crc in as_object(value.get("parts"), at=of).items():
        if not (number.isascii() and number.isdigit() and int(number) < len(parts) and isinstance(crc, str)):
            raise FormatError(f"`{of}` claims a part `{number}`", subject=of)
        claimed[int(number)] = decode_crc64nvme(crc)
    return PartMap(take_text(value, "etag", at=of), claimed)


def digest_of_file(disk: Disk, path: str, size: int) -> Digest:
    """Both checksums of a local file's first ``size`` bytes."""
    hasher = Hasher()
    while hasher.size < size:
        piece = disk.read_at(path, hasher.size, min(WRITE_BYTES, size - hasher.size))
        if not piece:
            break
        hasher.update(piece)
    return hasher.digest()


def _read_claim(disk: Disk, staged: str, size: int, parts: list[Part]) -> PartMap | None:
    path = staged + PART_MAP_SUFFIX
    try:
        if disk.stat(staged).size != size:
            return None
        return decode_part_map(disk.read_at(path, 0, PART_MAP_BYTES_MAX), size=size, parts=parts, of=path)
    except (FileNotFoundError, FormatError):
        return None


def _write_claim(disk: Disk, path: str, raw: bytes) -> None:
    disk.write_file(path, raw, durable=False)


def _write_piece(disk: Disk, path: str, offset: int, data: Buffer, crc: int) -> int:
    disk.write_at(path, offset, data)
    return crc64nvme(data, crc)


def _crc_of_part(disk: Disk, path: str, part: Part) -> int:
    crc, offset = 0, part.span.start
    while offset < part.span.stop:
        piece = disk.read_at(path, offset, min(WRITE_BYTES, part.span.stop - offset))
        if not piece:
            break
        crc = crc64nvme(piece, crc)
        offset += len(piece)
    return crc


def _other_bytes(key: str, what: str) -> IntegrityError:
    return IntegrityError(
        f"`{key}` is not what its manifest says: its {what} differs",
        subject=key,
        hint="the object was altered or damaged: upload it again from the source; nothing of it was made visible",
    )
