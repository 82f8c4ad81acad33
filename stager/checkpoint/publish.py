"""One seal into one tier: its files, then this node's part, then the commit if all nodes' parts are there.

A name that is committed with other bytes is not overwritten: a trainer that saves step 100 again, after it went back,
gets ``step-100.r2``. Dots before letters are in no trainer's name, so the two never meet.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from stager.checkpoint.commit import delete_all, publish_part, read_manifest, try_commit
from stager.checkpoint.copies import Copies, CopyOptions
from stager.checkpoint.ledger import CheckpointJournal, Ledger
from stager.checkpoint.retain import retired_key
from stager.checkpoint.seal import DamagedSeal, Seal, SealedFile, check_file, check_seal, file_path
from stager.clock import Clock
from stager.errors import FormatError, IntegrityError, NotFound, StagerError
from stager.formats.commits import CheckpointManifest, CheckpointPart, FileEntry
from stager.formats.digests import Digest
from stager.formats.names import join_key, node_part_key
from stager.logs import event
from stager.store.api import ObjectStore, ObjectVersion
from stager.transfer.download import digest_of_file
from stager.transfer.retry import retried
from stager.transfer.tools import Tools
from stager.transfer.upload import UploadOptions, forget_upload, upload_file

log = logging.getLogger("stager.publish")

T = TypeVar("T")

GENERATIONS_MAX = 10_000
NOTE_BYTES = 8 << 20
NOTE_FILES = 256
_GENERATION = re.compile(r".+\.r[1-9][0-9]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """How seals go into a tier.

    Attributes:
        node: This node's number.
        nodes: How many nodes make up a checkpoint.
        commits: Whether this node may write manifests; False for all but node 0 where create-only puts are not honoured.
        files_at_once: Files in flight.
        upload: Bounds of each file.
        copies: Which files are copied on the server, if they are unchanged.
    """

    node: int = 0
    nodes: int = 1
    commits: bool = True
    files_at_once: int = 4
    upload: UploadOptions = UploadOptions()
    copies: CopyOptions = CopyOptions()


@dataclass(slots=True)
class Publishing:
    """How far a seal has come in a tier; kept over failed tries. ``progress`` is told of bytes as they are sent."""

    seal: Seal
    target: str = ""
    entries: dict[str, FileEntry] = field(default_factory=dict)
    digests: dict[str, Digest] = field(default_factory=dict)
    sent_bytes: int = 0
    part_published: bool = False
    progress: Callable[[int], None] | None = None


class Publisher:
    """Puts seals into one run."""

    def __init__(
        self,
        store: ObjectStore,
        seals_root: str,
        tools: Tools,
        journal: CheckpointJournal,
        ledger: Ledger,
        clock: Clock,
        options: PublishOptions,
        copies: Copies,
    ) -> None:
        self._store = store
        self._root = seals_root
        self._tools = tools
        self._journal = journal
        self._ledger = ledger
        self._clock = clock
        self._options = options
        self._copies = copies

    async def publish(self, progress: Publishing) -> CheckpointManifest | None:
        """Go on with a seal until it is committed; None if parts of other nodes are missing.

        Raises:
            IntegrityError: The seal is broken, or the tier contradicts it.
            StoreError: The tier failed for good.
        """
        if not progress.part_published:
            standing = await self._find_target(progress)
            if standing is not None:
                return standing
            await self._send_files(progress)
            await self._check_seal(progress.seal)
            await publish_part(self._store, self._part(progress), self._tools)
            progress.part_published = True
        try:
            return await self._commit(progress)
        except IntegrityError:
            # Somebody committed other bytes under this name meanwhile: the next try finds another one.
            progress.part_published = False
            raise

    async def _commit(self, progress: Publishing) -> CheckpointManifest | None:
        if not self._options.commits:
            return await self._read_manifest(progress.target)
        return await try_commit(
            self._store,
            progress.target,
            layout=progress.seal.layout,
            nodes=self._options.nodes,
            tools=self._tools,
            clock=self._clock,
        )

    async def _find_target(self, progress: Publishing) -> CheckpointManifest | None:
        """Settle the name in the run. The manifest, if this very content is committed under it already."""
        if not progress.target:
            await self._recall(progress)
        resumed, entries = progress.target, progress.entries
        for generation in range(1, GENERATIONS_MAX):
            target = generation_name(progress.seal.name, generation)
            standing = await self._standing(target)
            if standing is None and target != resumed:
                # A part of an earlier save under this name must not vouch for files that are about to be replaced.
                await delete_all(self._store, [node_part_key(target, self._options.node)], self._tools)
                standing = await self._standing(target)
            if standing is None:
                progress.target = target
                progress.entries = entries if target == resumed else {}
                return None
            if isinstance(standing, CheckpointManifest) and await self._is_in(progress, standing):
                progress.target = target
                return standing
        raise IntegrityError(
            f"`{progress.seal.name}` is committed {GENERATIONS_MAX} times with different bytes",
            subject=progress.seal.name,
        )

    async def _recall(self, progress: Publishing) -> None:
        """Take files as sent that an earlier life has noted, and that the tier has as they were noted."""
        seal = progress.seal
        target, noted = await self._tools.offload.run("database", self._ledger.files, seal.seal_id)
        wanted = {file.path: file.size for file in seal.files}
        noted = {path: entry for path, entry in noted.items() if wanted.get(path) == entry.size}
        progress.digests = {path: entry.digest for path, entry in noted.items()}
        progress.target = target

        async def believe(entry: FileEntry) -> None:
            key = join_key(target, entry.path)
            try:
                info = await retried(lambda: self._store.head(key), self._tools, doing=f"look at {key}")
            except NotFound:
                return
            if (info.size, info.version.etag) == (entry.size, entry.etag):
                progress.entries[entry.path] = entry
                progress.sent_bytes += entry.size

        await self._side_by_side(deque(noted.values()), believe)

    async def _standing(self, target: str) -> CheckpointManifest | StagerError | None:
        """What occupies a name: a commit, a damaged one, one that is being deleted, or nothing."""
        try:
            standing = await self._read_manifest(target)
            if standing is None and await self._is_retiring(target):
                return StagerError(f"`{target}` is being deleted", subject=target)
            return standing
        except FormatError as error:
            # Damaged, and still somebody's commit: never overwritten.
            event(log, logging.WARNING, "manifest.damaged", checkpoint=target, reason=error.message)
            return error

    async def _is_retiring(self, target: str) -> bool:
        key = retired_key(target)
        try:
            await retried(lambda: self._store.head(key), self._tools, doing=f"look at {key}")
        except NotFound:
            return False
        return True

    async def _is_in(self, progress: Publishing, standing: CheckpointManifest) -> bool:
        """Whether a committed checkpoint holds exactly this seal's bytes (among other nodes')."""
        seal = progress.seal
        held = {entry.path: entry for entry in standing.files}
        if any(file.path not in held or held[file.path].size != file.size for file in seal.files):
            return False
        if self._options.nodes == 1 and len(held) != len(seal.files):
            return False
        for file in seal.files:
            if await self._digest(progress, file) != held[file.path].digest:
                return False
        await self._check_seal(seal)
        return True

    async def _digest(self, progress: Publishing, file: SealedFile) -> Digest:
        """Of a sealed file, read at most once."""
        known = progress.digests.get(file.path) or file.digest
        if known is None:
            path = file_path(self._root, progress.seal.seal_id, file.path)
            known = await self._tools.offload.run("hash", digest_of_file, self._tools.disk, path, file.size)
            progress.digests[file.path] = known
        return known

    async def _send_files(self, progress: Publishing) -> None:
        """Data first, side by side; then the markers, one after another."""
        seal = progress.seal
        left = [file for file in seal.files if file.path not in progress.entries]
        markers = [file for path in seal.markers for file in left if file.path == path]
        data = [file for file in left if file.path not in seal.markers]
        notes = _Notes(self._tools, self._ledger, progress)

        async def send(file: SealedFile) -> None:
            await self._send_file(progress, file)
            for noted in await notes.add(file):
                await self._forget_upload(progress, noted)

        await self._side_by_side(deque(sorted(data, key=lambda file: -file.size)), send)
        for marker in markers:
            await send(marker)
        for noted in await notes.flush():
            await self._forget_upload(progress, noted)

    async def _send_file(self, progress: Publishing, file: SealedFile) -> None:
        seal = progress.seal
        await self._tools.offload.run("disk", check_file, self._tools.disk, self._root, seal, file)
        copied = await self._copy(progress, file)
        if copied is not None:
            progress.entries[file.path] = copied
            return

        def count(size: int) -> None:
            progress.sent_bytes += size
            if progress.progress is not None:
                progress.progress(size)

        uploaded = await upload_file(
            self._store,
            join_key(progress.target, file.path),
            file_path(self._root, seal.seal_id, file.path),
            self._tools,
            self._journal,
            options=self._options.upload,
            progress=count,
            keep_note=True,
        )
        if file.digest not in (None, uploaded.digest):
            raise DamagedSeal(
                f"`{seal.name}/{file.path}` is not what the tier before committed",
                subject=f"{seal.name}/{file.path}",
                hint="the disk or file system of that tier altered it; `stager restore` takes an older checkpoint",
            )
        progress.digests[file.path] = uploaded.digest
        progress.entries[file.path] = FileEntry(
            file.path, uploaded.size, uploaded.digest, uploaded.version.etag
        )

    async def _copy(self, progress: Publishing, file: SealedFile) -> FileEntry | None:
        """The file copied from an earlier checkpoint in the store, if the same bytes are there."""
        found = self._copies.find(file.path, file.size)
        if found is None or await self._digest(progress, file) != found.entry.digest:
            return None
        target = join_key(progress.target, file.path)
        try:
            version = await self._store.copy(found.key, target, if_match=ObjectVersion(found.entry.etag))
        except StagerError as error:
            # Retired meanwhile, in a class that cannot be read, or a store that cannot copy: it is sent.
            event(log, logging.DEBUG, "copy.refused", key=target, reason=error.message)
            return None
        self._copies.copied_bytes += file.size
        return FileEntry(file.path, file.size, found.entry.digest, version.etag)

    async def _forget_upload(self, progress: Publishing, file: SealedFile) -> None:
        if file.size > self._options.upload.part_bytes:
            key = join_key(progress.target, file.path)
            await self._tools.offload.run("database", forget_upload, self._journal, self._store, key)

    async def _side_by_side(self, pending: deque[T], work: Callable[[T], Awaitable[None]]) -> None:
        """Every item through ``work``, some at once; the first failure ends it and comes out as it is."""
        failures: list[StagerError | FileNotFoundError] = []

        async def drain() -> None:
            while pending and not failures:
                try:
                    await work(pending.popleft())
                except (StagerError, FileNotFoundError) as error:
                    failures.append(error)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._options.files_at_once, len(pending))):
                group.create_task(drain())
        if failures:
            raise failures[0]

    def _part(self, progress: Publishing) -> CheckpointPart:
        return CheckpointPart(
            checkpoint=progress.target,
            node=self._options.node,
            nodes=self._options.nodes,
            files=tuple(progress.entries[file.path] for file in progress.seal.files),
            marker=progress.seal.commit,
        )

    async def _check_seal(self, seal: Seal) -> None:
        await self._tools.offload.run("disk", check_seal, self._tools.disk, self._root, seal)

    async def _read_manifest(self, target: str) -> CheckpointManifest | None:
        return await retried(
            lambda: read_manifest(self._store, target), self._tools, doing=f"read manifest of {target}"
        )


class _Notes:
    """Sent files on their way into the journal, in batches."""

    def __init__(self, tools: Tools, ledger: Ledger, progress: Publishing) -> None:
        self._tools = tools
        self._ledger = ledger
        self._progress = progress
        self._waiting: dict[str, FileEntry] = {}
        self._bytes = 0

    async def add(self, file: SealedFile) -> list[SealedFile]:
        """One more file is in the tier; the files that are noted by now and were not before."""
        self._waiting[file.path] = self._progress.entries[file.path]
        self._bytes += file.size
        if self._bytes >= NOTE_BYTES or len(self._waiting) >= NOTE_FILES:
            return await self.flush()
        return []

    async def flush(self) -> list[SealedFile]:
        """Note what waits; the files that this concerns."""
        if not self._waiting:
            return []
        batch, self._waiting, self._bytes = self._waiting, {}, 0
        seal_id, target = self._progress.seal.seal_id, self._progress.target
        await self._tools.offload.run("database", self._ledger.note_files, seal_id, target, batch)
        return [file for file in self._progress.seal.files if file.path in batch]


def generation_name(name: str, generation: int) -> str:
    """What a name's n-th different content is called in a run: ``step-100``, ``step-100.r2``, ..."""
    return name if generation == 1 else f"{name}.r{generation}"


def is_generation_name(name: str) -> bool:
    """Whether a name looks like one that `generation_name` made."""
    return _GENERATION.fullmatch(name) is not None
