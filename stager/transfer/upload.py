"""Uploads: one local file to one object, in parts, resumed after a kill, and sure of its outcome.

The file is read once, in order: each part's CRC goes to the store with it, the file's SHA-256 grows along. What a journal
says of an earlier try is a hint; which parts are there is asked of the store, and a part is believed only if its checksum
is that of the file's bytes. A lost answer to the completion is settled by the write-id that the upload began with.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from stager.budget import Priority
from stager.checksum import Hasher, crc64nvme
from stager.disk import Disk, FileStat
from stager.errors import IntegrityError, NotFound, StagerError, StoreError
from stager.formats.digests import Digest
from stager.logs import event
from stager.store.api import ObjectStore, ObjectVersion, PartTag
from stager.transfer.ranges import UPLOAD_PART_BYTES, Part, cut, upload_part_bytes
from stager.transfer.retry import retried
from stager.transfer.tools import Tools

log = logging.getLogger("stager.upload")

P = ParamSpec("P")
R = TypeVar("R")

TOPIC = "upload"
WRITE_ID = "stager-write-id"


class UploadJournal(Protocol):
    """Where upload ids are noted. `stager.journal.Journal` is one; losing it costs requests."""

    def get(self, topic: str, key: str) -> dict[str, Any] | None: ...
    def put(self, topic: str, key: str, value: dict[str, Any]) -> None: ...
    def forget(self, topic: str, key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """Bounds of one upload.

    Attributes:
        part_bytes: As wanted; more where the store allows too few parts.
        concurrency: Parts in flight.
        attempts: Tries of one request.
    """

    part_bytes: int = UPLOAD_PART_BYTES
    concurrency: int = 4
    attempts: int = 8


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A finished upload: what the object is, and how many bytes were sent for it this time."""

    size: int
    digest: Digest
    version: ObjectVersion
    sent_bytes: int


async def upload_file(
    store: ObjectStore,
    key: str,
    path: str,
    tools: Tools,
    journal: UploadJournal,
    *,
    priority: Priority = Priority.CHECKPOINT,
    options: UploadOptions = UploadOptions(),
    progress: Callable[[int], None] | None = None,
    keep_note: bool = False,
) -> Uploaded:
    """Make the object ``key`` of the file ``path``.

    With ``keep_note`` the journal's note outlives the upload, for a caller that notes the outcome itself and then calls
    `forget_upload`: a death in between finds the finished object instead of sending it again.

    Raises:
        FileNotFoundError: There is no such file.
        IntegrityError: The file changed while it was read; nothing became visible for it.
        StoreError: The store failed for good.
    """
    run = _Upload(store, key, path, tools, journal, priority, options, progress)
    uploaded = await run.run()
    if not keep_note:
        await tools.offload.run("database", forget_upload, journal, store, key)
    return uploaded


def forget_upload(journal: UploadJournal, store: ObjectStore, key: str) -> None:
    """Drop what is noted of an upload. Blocking."""
    journal.forget(TOPIC, _note_key(store, key))


class _Upload:
    """The state of one file's upload."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        path: str,
        tools: Tools,
        journal: UploadJournal,
        priority: Priority,
        options: UploadOptions,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.store = store
        self.key = key
        self.path = path
        self.tools = tools
        self.journal = journal
        self.priority = priority
        self.options = options
        self.progress = progress
        self.hasher = Hasher()
        self.sent_bytes = 0
        self.failure: StagerError | None = None

    async def run(self) -> Uploaded:
        before = await self._stat()
        if before.size <= min(self.options.part_bytes, self.store.properties.put_bytes_max):
            version = await self._put_whole(before)
        else:
            version = await self._put_parts(before)
        return Uploaded(before.size, self.hasher.digest(), version, self.sent_bytes)

    async def _put_whole(self, before: FileStat) -> ObjectVersion:
        async with self._memory(before.size):
            data = await self._read(0, before.size)
            await self._check_unchanged(before)
            await self.tools.upload_rate.take(len(data))
            crc = self.hasher.digest().crc64nvme
            version = await self._retried(lambda: self.store.put(self.key, data, crc64nvme=crc))
            self._sent(len(data))
            return version

    async def _put_parts(self, before: FileStat) -> ObjectVersion:
        parts = cut(
            before.size, upload_part_bytes(before.size, self.store.properties, wanted=self.options.part_bytes)
        )
        note, held = await self._resume_or_begin(before, parts)
        upload_id = str(note["upload_id"])
        if held is None:
            # The store no longer knows the upload: it was completed, and only the answer was lost.
            for part in parts:
                async with self._memory(part.size):
                    await self._read(part.span.start, part.size)
            await self._check_unchanged(before)
            version = await self._completed_before(str(note["write_id"]), before.size)
            if version is None:
                raise IntegrityError(
                    f"`{self.key}` was replaced while its upload was resumed", subject=self.key
                )
        else:
            tags = await self._send(upload_id, parts, held)
            # The bytes were read once, in order; if the file is still the same one, they are the file's.
            await self._check_unchanged(before)
            version = await self._complete(upload_id, str(note["write_id"]), tags, before.size)
        return version

    async def _resume_or_begin(
        self, before: FileStat, parts: Sequence[Part]
    ) -> tuple[Mapping[str, Any], dict[int, PartTag] | None]:
        """The upload to go on with, and its parts by number; None for parts means that it is complete already."""
        identity = {"bytes": before.size, "mtime_ns": before.mtime_ns, "part_bytes": parts[0].size}
        note = await self._note(self.journal.get, TOPIC, _note_key(self.store, self.key))
        if note is not None and all(note.get(name) == value for name, value in identity.items()):
            try:
                held = await self._retried(lambda: self.store.list_parts(self.key, str(note["upload_id"])))
                event(log, logging.INFO, "upload.resumed", key=self.key, parts=len(held), of=len(parts))
                return note, {tag.number: tag for tag in held}
            except NotFound:
                if await self._completed_before(str(note["write_id"]), before.size) is not None:
                    return note, None
        elif note is not None:
            await self._retried(lambda: self.store.abort_upload(self.key, str(note["upload_id"])))
        write_id = f"{self.tools.random.getrandbits(128):032x}"
        metadata = {WRITE_ID: write_id}
        upload_id = await self._retried(lambda: self.store.begin_upload(self.key, metadata=metadata))
        fresh = {**identity, "upload_id": upload_id, "write_id": write_id}
        await self._note(self.journal.put, TOPIC, _note_key(self.store, self.key), fresh)
        return fresh, {}

    async def _send(
        self, upload_id: str, parts: Sequence[Part], held: Mapping[int, PartTag]
    ) -> list[PartTag]:
        """All parts' tags: read in order, sent side by side, the held ones only compared."""
        tags: dict[int, PartTag] = {}
        pending = deque(parts)
        reading = asyncio.Lock()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.options.concurrency, len(parts))):
                group.create_task(self._work(upload_id, pending, reading, held, tags))
        if self.failure is not None:
            raise self.failure
        return [tags[part.number + 1] for part in parts]

    async def _work(
        self,
        upload_id: str,
        pending: deque[Part],
        reading: asyncio.Lock,
        held: Mapping[int, PartTag],
        tags: dict[int, PartTag],
    ) -> None:
        """Part after part, until there is none or something failed; the failure is kept for the group's parent."""
        try:
            while pending and self.failure is None:
                async with AsyncExitStack() as stack:
                    # Under the lock, so that the file's own digest sees its bytes in order.
                    async with reading:
                        if not pending:
                            return
                        part = pending.popleft()
                        await stack.enter_async_context(self._memory(part.size))
                        data = await self._read(part.span.start, part.size)
                    tags[part.number + 1] = await self._send_part(
                        upload_id, part, data, held.get(part.number + 1)
                    )
        except StagerError as error:
            if self.failure is None:
                self.failure = error

    async def _send_part(self, upload_id: str, part: Part, data: bytes, held: PartTag | None) -> PartTag:
        if held is not None and await self.tools.offload.run("hash", _is_same, held, data):
            return held
        crc = await self.tools.offload.run("hash", crc64nvme, data)
        await self.tools.upload_rate.take(len(data))
        number = part.number + 1
        tag = await self._retried(
            lambda: self.store.put_part(self.key, upload_id, number, data, crc64nvme=crc)
        )
        self._sent(len(data))
        return tag

    async def _complete(self, upload_id: str, write_id: str, tags: list[PartTag], size: int) -> ObjectVersion:
        async def complete() -> ObjectVersion:
            try:
                return await self.store.complete_upload(self.key, upload_id, tags)
            except StoreError as error:
                if not (error.retryable or isinstance(error, NotFound)):
                    raise
                version = await self._completed_before(write_id, size)
                if version is None:
                    raise
                event(log, logging.INFO, "upload.answer_recovered", key=self.key)
                return version

        return await self._retried(complete)

    async def _completed_before(self, write_id: str, size: int) -> ObjectVersion | None:
        """The object's version, if it is the one that this very upload made."""
        try:
            info = await self._retried(lambda: self.store.head(self.key))
        except NotFound:
            return None
        return info.version if info.metadata.get(WRITE_ID) == write_id and info.size == size else None

    async def _read(self, offset: int, size: int) -> bytes:
        data = await self.tools.offload.run(
            "disk", _read_hashed, self.tools.disk, self.path, offset, size, self.hasher
        )
        if len(data) != size:
            raise self._changed()
        return data

    async def _check_unchanged(self, before: FileStat) -> None:
        now = await self._stat()
        if (now.size, now.mtime_ns, now.inode) != (before.size, before.mtime_ns, before.inode):
            raise self._changed()

    async def _stat(self) -> FileStat:
        return await self.tools.offload.run("disk", self.tools.disk.stat, self.path)

    def _changed(self) -> IntegrityError:
        return IntegrityError(
            f"`{self.path}` changed while it was uploaded",
            subject=self.path,
            hint="something wrote into the file after it was taken as complete; it is taken up again when it is quiet",
        )

    def _memory(self, size: int) -> AbstractAsyncContextManager[None]:
        return self.tools.memory.reserve(size, self.priority, purpose=f"upload memory for `{self.key}`")

    async def _retried(self, call: Callable[[], Awaitable[R]]) -> R:
        return await retried(call, self.tools, doing=f"upload {self.key}", attempts=self.options.attempts)

    async def _note(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.tools.offload.run("database", call, *args, **kwargs)

    def _sent(self, size: int) -> None:
        self.sent_bytes += size
        if self.progress is not None:
            self.progress(size)


async def abort_stale_uploads(store: ObjectStore, prefix: str, keep: frozenset[str]) -> int:
    """Abort uploads below ``prefix`` whose key is not in ``keep``; returns how many there were."""
    stale = [(key, upload_id) async for key, upload_id in store.list_uploads(prefix) if key not in keep]
    for key, upload_id in stale:
        await store.abort_upload(key, upload_id)
    return len(stale)


def _note_key(store: ObjectStore, key: str) -> str:
    # Two runs may hold checkpoints of one name.
    return f"{store.properties.name}/{key}"


def _read_hashed(disk: Disk, path: str, offset: int, size: int, hasher: Hasher) -> bytes:
    data = disk.read_at(path, offset, size)
    hasher.update(data)
    return data


def _is_same(tag: PartTag, data: bytes) -> bool:
    """Whether a part in the store holds these bytes: by its CRC, or by an etag that is their MD5."""
    if tag.size != len(data):
        return False
    if tag.crc64nvme is not None:
        return tag.crc64nvme == crc64nvme(data)
    return tag.etag.strip('"').lower() == hashlib.md5(data, usedforsecurity=False).hexdigest()
