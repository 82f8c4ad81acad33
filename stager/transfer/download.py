"""Downloads: parallel ranges of one version of an object into a staging file, verified, resumed after a kill.

The first answer names the version, and every other range is held to it. Each part's CRC is taken as its bytes pass by, and
the CRCs of all parts combine into the whole's, which is compared with the manifest's before the caller may publish
the file. What is already there after a kill is told by the part map (`stager.transfer.part_map`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from stager.backoff import backoff_s, may_pass
from stager.budget import Priority
from stager.checksum import Hasher, combine_all, crc64nvme
from stager.disk import Disk
from stager.errors import IntegrityError, OutOfSpace, PreconditionFailed, StagerError, StoreError, Unavailable
from stager.formats.digests import Digest
from stager.logs import event
from stager.store.api import ObjectReader, ObjectStore, ObjectVersion, Span
from stager.transfer.part_map import (
    PART_MAP_SUFFIX,
    PartMap,
    crc_of_part,
    drop_staged,
    encode_part_map,
    read_claim,
    write_claim,
)
from stager.transfer.progress import PROGRESS_BYTES, BodyWatch, PartProgress
from stager.transfer.ranges import DOWNLOAD_PART_BYTES, Part, cut, download_part_bytes
from stager.transfer.tools import Tools

log = logging.getLogger("stager.download")

READ_BYTES = 2 << 20
WRITE_BYTES = 2 << 20
PIECES_MAX = 16
_HASH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DownloadOptions:
    """Bounds of one download.

    Attributes:
        part_bytes: Of a range, about.
        concurrency: Ranges in flight.
        answer_timeout_s: How long the store may take until a body begins.
        read_timeout_s: How long a body may take for `PROGRESS_BYTES`; one that drips is cut like one that stands still.
        attempts: Tries of one part in a row that bring no `PROGRESS_BYTES` before the download fails.
        verify_sha256: Read the finished file once more for its SHA-256; the CRC is always compared.
    """

    part_bytes: int = DOWNLOAD_PART_BYTES
    concurrency: int = 8
    answer_timeout_s: float = 120.0
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
    priority: Priority | Callable[[], Priority] = Priority.PREFETCH,
    options: DownloadOptions = DownloadOptions(),
    progress: Callable[[int], None] | None = None,
) -> Downloaded:
    """Fetch ``key`` into the file ``staged`` and verify it; the directory must exist.

    The file is neither synced nor renamed: that is the caller's to do. After a failure of the store it stays, with its part
    map, for the next try. After a cancellation a write may still be under way in a thread: the same ``staged`` is for
    another process then.

    Args:
        store: Where it is.
        key: Its key.
        staged: The staging file; what an earlier, killed download left in it is used again.
        tools: Disk, threads and bounds.
        size: Bytes that it must have, by the manifest.
        digest: What it must be, by the manifest; None where none is known, then lengths and version are all.
        priority: In the memory budget; a function is asked anew for every part.
        options: Bounds.
        progress: Called with the number of bytes that were just written.

    Raises:
        IntegrityError: The object has another size or digest, or changed twice while it was read; nothing is left.
        OutOfSpace: The disk cannot hold it; nothing is left.
        StoreError: The store failed for good.
    """
    wanted = priority if callable(priority) else lambda: priority
    request = _Request(store, key, staged, tools, size, digest, wanted, options, progress)
    fetched_bytes = 0
    chances = 2
    while True:
        run = _Pass(request)
        try:
            whole = await run.fetch_all()
            problem = await run.find_problem(whole)
        except PreconditionFailed:
            problem = f"`{key}` was written again while it was read"
        except (IntegrityError, OutOfSpace):
            await run.forget()
            raise
        fetched_bytes += run.fetched_bytes
        if problem is None:
            await tools.offload.run("disk", tools.disk.remove, staged + PART_MAP_SUFFIX)
            return Downloaded(size, whole, fetched_bytes)
        await run.forget()
        # What an earlier life left may be of an older version: that is no change midway, and costs no chance.
        chances -= not run.resumed
        if chances == 0:
            raise IntegrityError(
                f"{problem}, twice in a row",
                subject=key,
                hint="it was altered, damaged or replaced after its manifest was written: upload it again from the source",
            )
        event(log, logging.WARNING, "download.started_over", key=key, reason=problem)


@dataclass(frozen=True, slots=True)
class _Request:
    """What `download` was asked for."""

    store: ObjectStore
    key: str
    staged: str
    tools: Tools
    size: int
    digest: Digest | None
    priority: Callable[[], Priority]
    options: DownloadOptions
    progress: Callable[[int], None] | None


class _Pass:
    """One pass over one version of the object."""

    def __init__(self, request: _Request) -> None:
        self.request = request
        self.parts = cut(request.size, download_part_bytes(request.size, wanted=request.options.part_bytes))
        self.done: dict[int, int] = {}
        self.version: ObjectVersion | None = None
        self.resumed = False
        self.fetched_bytes = 0
        self._failure: StagerError | None = None
        self._failed = asyncio.Event()
        self._first_answer = asyncio.Lock()
        self._map_lock = asyncio.Lock()
        self._map_written_for = 0

    async def fetch_all(self) -> int:
        """Bring every part that is not there; the CRC of the whole."""
        await self._resume_or_create()
        pending = deque(part for part in self.parts if part.number not in self.done)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.request.options.concurrency, len(pending))):
                group.create_task(self._work(pending))
        if self._failure is not None:
            raise self._failure
        return combine_all((self.done[part.number], part.size) for part in self.parts)

    async def find_problem(self, whole: int) -> str | None:
        """What speaks against the finished file, if anything does."""
        request = self.request
        if request.digest is None:
            return None
        if whole != request.digest.crc64nvme:
            return f"`{request.key}` is not what its manifest says: its CRC-64/NVME differs"
        if request.options.verify_sha256:
            tools = request.tools
            found = await tools.offload.run("hash", digest_of_file, tools.disk, request.staged, request.size)
            if found != request.digest:
                return f"`{request.key}` is not what its manifest says: its SHA-256 differs"
        return None

    async def forget(self) -> None:
        """Drop what was staged: it is of no version that can still be had."""
        tools = self.request.tools
        await tools.offload.run("disk", drop_staged, tools.disk, self.request.staged)

    async def _resume_or_create(self) -> None:
        key, staged, size, tools = (
            self.request.key,
            self.request.staged,
            self.request.size,
            self.request.tools,
        )
        claim = await tools.offload.run(
            "disk", read_claim, tools.disk, staged, key=key, size=size, parts=self.parts
        )
        if claim is None:
            await tools.offload.run("disk", _create_anew, tools.disk, staged, size)
            return
        self.resumed = True
        self.version = claim.version
        for part in self.parts:
            if part.number in claim.parts:
                crc = await tools.offload.run("hash", crc_of_part, tools.disk, staged, part)
                if crc == claim.parts[part.number]:
                    self.done[part.number] = crc
        self._map_written_for = len(self.done)
        event(log, logging.INFO, "download.resumed", key=key, parts=len(self.done), of=len(self.parts))

    async def _work(self, pending: deque[Part]) -> None:
        """Parts, one after the other, until there are none or one has failed."""
        while pending and self._failure is None:
            part = pending.popleft()
            try:
                self.done[part.number] = await self._fetch(part)
                await self._write_map()
            except FileNotFoundError as error:
                self._fail(
                    StagerError(
                        f"the staging file of `{self.request.key}` vanished: {error.filename}",
                        subject=self.request.staged,
                        hint="leave the cache directory to stager; check that its file system is still mounted",
                    )
                )
            except StagerError as error:
                self._fail(error)

    def _fail(self, error: StagerError) -> None:
        # The others end by themselves, soon: cancelled, they could leave a thread that writes into the next pass's file.
        if self._failure is None:
            self._failure = error
        self._failed.set()

    async def _fetch(self, part: Part) -> int:
        """One part, with its retries; its CRC."""
        request = self.request
        progress = PartProgress(part)
        vain = 0
        while True:
            before = progress.written
            try:
                await self._receive(part, progress)
                return progress.crc
            except StoreError as error:
                vain = vain + 1 if progress.written - before < PROGRESS_BYTES else 1
                if not may_pass(error) or vain >= request.options.attempts or self._failure is not None:
                    raise
                level = logging.WARNING if vain == 1 else logging.DEBUG
                event(
                    log,
                    level,
                    "download.part_retried",
                    key=request.key,
                    part=part.number,
                    reason=error.message,
                )
                await self._pause(backoff_s(vain, request.tools.random, error))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._failed.wait()
        except TimeoutError:
            pass

    async def _receive(self, part: Part, progress: PartProgress) -> None:
        """Go on with a part from where its last body ended."""
        request = self.request
        batch_bytes = min(WRITE_BYTES, part.size - progress.written)
        async with (
            request.tools.memory.reserve(
                batch_bytes + READ_BYTES, request.priority(), purpose=f"memory to download `{request.key}`"
            ),
            AsyncExitStack() as stack,
        ):
            reader = await self._open(stack, progress.left())
            watch = BodyWatch(request.options.read_timeout_s)
            while progress.written < part.size:
                pieces: list[bytes] = []
                gathered, broken = 0, self._failure
                goal = min(batch_bytes, part.size - progress.written)
                while gathered < goal and broken is None:
                    try:
                        piece = await self._read(reader, min(READ_BYTES, goal - gathered), watch)
                    except StoreError as error:
                        broken = error
                    else:
                        pieces.append(piece)
                        gathered += len(piece)
                if pieces:
                    # Also what came before the body broke: it need not come again.
                    await self._write(part, progress, pieces)
                if broken is not None:
                    raise broken

    async def _open(self, stack: AsyncExitStack, span: Span) -> ObjectReader:
        if self.version is None:
            async with self._first_answer:
                if self.version is None:
                    return await self._ask(stack, span)
        return await self._ask(stack, span)

    async def _ask(self, stack: AsyncExitStack, span: Span) -> ObjectReader:
        """Open a body; it ends with ``stack``."""
        request = self.request
        try:
            async with asyncio.timeout(request.options.answer_timeout_s):
                reader = await stack.enter_async_context(
                    request.store.get(request.key, span=span, if_match=self.version)
                )
        except TimeoutError:
            raise Unavailable(
                f"`{request.key}`: no answer came in {request.options.answer_timeout_s:g} s",
                subject=request.key,
            ) from None
        if reader.info.size != request.size:
            raise IntegrityError(
                f"`{request.key}` has {reader.info.size} bytes in the store; its manifest says {request.size}",
                subject=request.key,
                hint="it was truncated or replaced after the manifest was written: upload it again from the source",
            )
        if self.version is None:
            self.version = reader.info.version
        return reader

    async def _read(self, reader: ObjectReader, size: int, watch: BodyWatch) -> bytes:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(watch.left_s):
                piece = await reader.read(size)
        except TimeoutError:
            raise Unavailable(
                f"`{self.request.key}`: fewer than {PROGRESS_BYTES} bytes came in {watch.limit_s:g} s",
                subject=self.request.key,
            ) from None
        watch.note(len(piece), loop.time() - began)
        if not 0 < len(piece) <= size:
            raise Unavailable(
                f"`{self.request.key}`: the body ended early or ran over", subject=self.request.key
            )
        await self.request.tools.download_rate.take(len(piece))
        return piece

    async def _write(self, part: Part, progress: PartProgress, pieces: Sequence[bytes]) -> None:
        request = self.request
        offset = part.span.start + progress.written
        progress.crc = await request.tools.offload.run(
            "disk", _write_pieces, request.tools.disk, request.staged, offset, pieces, progress.crc
        )
        written = sum(map(len, pieces))
        progress.written += written
        self.fetched_bytes += written
        if request.progress is not None:
            request.progress(written)

    async def _write_map(self) -> None:
        request = self.request
        async with self._map_lock:
            # Whoever waited for the lock may find that the one before has written for both.
            count = len(self.done)
            if self.version is None or count in (self._map_written_for, len(self.parts)):
                return
            self._map_written_for = count
            claim = PartMap(request.key, self.version, dict(self.done))
            raw = encode_part_map(claim, size=request.size, parts=self.parts)
            await request.tools.offload.run("disk", write_claim, request.tools.disk, request.staged, raw)


def digest_of_file(disk: Disk, path: str, size: int) -> Digest:
    """Both checksums of a local file's first ``size`` bytes."""
    hasher = Hasher()
    while hasher.size < size:
        piece = disk.read_at(path, hasher.size, min(_HASH_BYTES, size - hasher.size))
        if not piece:
            break
        hasher.update(piece)
    return hasher.digest()


def _create_anew(disk: Disk, staged: str, size: int) -> None:
    drop_staged(disk, staged)
    try:
        disk.create(staged, size)
    except BaseException:
        # A file that could not get its bytes must not look like one that has them.
        disk.remove(staged)
        raise


def _write_pieces(disk: Disk, path: str, offset: int, pieces: Sequence[bytes], crc: int) -> int:
    # One hop for both: the CRC runs at memory speed on bytes that the write has just had in the CPU's caches. Large pieces
    # are not joined: that would move every byte once more, and hold the interpreter while it does.
    for data in pieces if len(pieces) <= PIECES_MAX else [b"".join(pieces)]:
        disk.write_at(path, offset, data)
        crc = crc64nvme(data, crc)
        offset += len(data)
    return crc
