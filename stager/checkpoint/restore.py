"""Restore: a committed checkpoint into a directory that appears whole and verified, or not at all.

Files arrive in a directory beside the target, each under another name until it is verified; a killed restore goes on from
there. The last act is one rename.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stager.budget import Priority
from stager.checkpoint.commit import Damaged, list_manifests, newest, read_manifest
from stager.checkpoint.trackers import write_trackers
from stager.disk import Disk
from stager.errors import AlreadyExists, NotFound, OutOfSpace, StagerError, UsageError
from stager.formats.commits import CheckpointManifest, FileEntry
from stager.formats.layouts.detection import markers_of
from stager.formats.names import join_key
from stager.logs import event
from stager.store.api import ObjectStore
from stager.transfer.download import DownloadOptions, digest_of_file, download
from stager.transfer.tools import Tools

log = logging.getLogger("stager.restore")

ARRIVING_SUFFIX = ".stager-arriving"


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """Bounds of a restore: files at once, and those of each download."""

    concurrent_files: int = 4
    download: DownloadOptions = DownloadOptions(concurrency=4, verify_sha256=True)


async def choose(
    store: ObjectStore, *, step: int | None = None, name: str | None = None
) -> CheckpointManifest:
    """The checkpoint of a step or a name, or the newest.

    Raises:
        NotFound: There is none; the message says which there are.
        IntegrityError: The one that was asked for by name has a damaged manifest.
    """
    if name is not None:
        named = await read_manifest(store, name)
        if named is not None:
            return named
    manifests = await list_manifests(store)
    sound = [found for found in manifests if isinstance(found, CheckpointManifest)]
    for found in manifests:
        if isinstance(found, Damaged):
            event(
                log,
                logging.WARNING,
                "manifest.damaged",
                checkpoint=found.checkpoint,
                reason=found.error.message,
            )
    if name is None:
        chosen = (
            newest(manifests) if step is None else next((m for m in reversed(sound) if m.step == step), None)
        )
        if chosen is not None:
            return chosen
    wanted = f"named `{name}`" if name is not None else f"of step {step}" if step is not None else "at all"
    there = ", ".join(manifest.checkpoint for manifest in sound[-10:]) or "none"
    damaged = ", ".join(found.checkpoint for found in manifests if isinstance(found, Damaged))
    if damaged:
        there += f" (and with a damaged manifest: {damaged})"
    raise NotFound(
        f"{store.properties.name} has no committed checkpoint {wanted}",
        subject=store.properties.name,
        hint=f"committed are: {there}; an upload that is under way is not listed before its commit (--wait waits)",
    )


async def restore(
    store: ObjectStore,
    manifest: CheckpointManifest,
    target: str,
    tools: Tools,
    *,
    options: RestoreOptions = RestoreOptions(),
    progress: Callable[[int], None] | None = None,
) -> None:
    """Bring every file of ``manifest`` into the new directory ``target``.

    Args:
        store: The run.
        manifest: What to restore, as `choose` gave it.
        target: An absolute path at which nothing may exist.
        tools: Disk, threads and bounds.
        options: Bounds.
        progress: Called with the bytes that were just verified or written.

    Raises:
        AlreadyExists: Something is at ``target``.
        OutOfSpace: The file system cannot hold it; found before the first byte.
        IntegrityError: A file in the store is not what the manifest says; nothing is at ``target``.
    """
    run = _Restore(store, manifest, target, tools, options, progress)
    await run.run()


class _Restore:
    """The state of one restore."""

    def __init__(
        self,
        store: ObjectStore,
        manifest: CheckpointManifest,
        target: str,
        tools: Tools,
        options: RestoreOptions,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.store = store
        self.manifest = manifest
        self.target = os.path.normpath(target)
        self.tools = tools
        self.options = options
        self.progress = progress
        parent, base = os.path.split(self.target)
        self.parent = parent
        self.prefix = f".{base}.restore-"
        # Of this very commit: what an earlier restore of another one left behind is of no use.
        self.staging = f"{parent}/{self.prefix}{manifest.write_id[:12] or 'x'}"
        self.lock = f"{parent}/.{base}.restoring"
        self.failure: StagerError | None = None

    async def run(self) -> None:
        """As `restore`; several restores to one target, of a node's ranks for example, would write into the same files."""
        await self._offload(self._make_parent)
        lock = self.tools.disk.lock(self.lock, f"another restore to `{self.target}`")
        await self._offload(lock.__enter__)
        try:
            await self._run()
            await self._offload(self._remove_lock)
        except AlreadyExists:
            await self._offload(self._remove_lock)
            raise
        finally:
            await self.tools.offload.run("disk", lock.__exit__, None, None, None)

    def _remove_lock(self) -> None:
        # Only where the target stands: whoever has opened the old file finds the target, and does nothing.
        self.tools.disk.remove(self.lock)

    async def _run(self) -> None:
        await self._offload(self._prepare)
        # Markers come last and in order: watchers believe a marker only if it is not older than what it covers.
        by_path = {entry.path: entry for entry in self.manifest.files}
        markers = [by_path.pop(path) for path in markers_of(self.manifest.layout, tuple(by_path))]
        await self._bring_all(deque(sorted(by_path.values(), key=lambda entry: -entry.size)))
        for marker in markers:
            await self._bring_all(deque([marker]))
        await self._offload(self._publish)
        event(
            log, logging.INFO, "checkpoint.restored", checkpoint=self.manifest.checkpoint, target=self.target
        )

    async def _bring_all(self, pending: deque[FileEntry]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.options.concurrent_files, len(pending))):
                group.create_task(self._work(pending))
        if self.failure is not None:
            raise self.failure

    def _make_parent(self) -> None:
        _refuse_existing(self.tools.disk, self.target)
        try:
            self.tools.disk.make_directory(self.parent)
        except FileExistsError:
            raise _no_directory(self.parent) from None

    def _prepare(self) -> None:
        disk = self.tools.disk
        # Again, under the lock: whoever held it before may have finished.
        _refuse_existing(disk, self.target)
        for name in disk.list_names(self.parent):
            path = f"{self.parent}/{name}"
            if name.startswith(self.prefix) and path != self.staging:
                disk.remove_tree(path)
        disk.make_directory(self.staging)
        for folder in {os.path.dirname(f"{self.staging}/{entry.path}") for entry in self.manifest.files}:
            disk.make_directory(folder)
        here = sum(status.size for _, status in disk.walk(self.staging))
        lacking = self.manifest.size - here - disk.usage(self.parent).free_bytes
        if lacking > 0:
            raise OutOfSpace(
                f"`{self.manifest.checkpoint}` has {self.manifest.size} bytes; `{self.parent}` lacks {lacking} of them",
                subject=self.target,
                hint="free space there, or restore to another file system",
            )

    async def _work(self, pending: deque[FileEntry]) -> None:
        while pending and self.failure is None:
            try:
                await self._bring(pending.popleft())
            except StagerError as error:
                if self.failure is None:
                    self.failure = error

    async def _bring(self, entry: FileEntry) -> None:
        final = f"{self.staging}/{entry.path}"
        if await self.tools.offload.run("hash", _is_whole, self.tools.disk, final, entry):
            if self.progress is not None:
                self.progress(entry.size)
            return
        arriving = final + ARRIVING_SUFFIX
        try:
            await self._download(entry, arriving)
        except NotFound as error:
            raise NotFound(
                f"{error.message}, which its manifest names",
                subject=error.subject,
                hint="retention may have retired it meanwhile: `stager ls` lists what is committed",
            ) from error
        await self.tools.offload.run("disk", self.tools.disk.publish, arriving, final, durable=False)

    async def _download(self, entry: FileEntry, arriving: str) -> None:
        await download(
            self.store,
            join_key(self.manifest.checkpoint, entry.path),
            arriving,
            self.tools,
            size=entry.size,
            digest=entry.digest,
            priority=Priority.RESTORE,
            options=self.options.download,
            progress=self.progress,
        )

    def _publish(self) -> None:
        disk = self.tools.disk
        wanted = {entry.path for entry in self.manifest.files}
        for path, _ in disk.walk(self.staging):
            # The directory is ours alone: part maps, and temporary files of lives that ended, are no part of it.
            if path not in wanted:
                disk.remove(f"{self.staging}/{path}")
        write_trackers(disk, self.manifest, self.staging, self.target)
        try:
            disk.publish_tree(self.staging, self.target)
        except FileExistsError:
            _refuse_existing(disk, self.target)
            raise

    async def _offload(self, call: Callable[[], None]) -> None:
        await self.tools.offload.run("disk", call)


def _refuse_existing(disk: Disk, target: str) -> None:
    try:
        disk.stat(target)
    except FileNotFoundError:
        return
    except StagerError as error:
        if isinstance(error.__cause__, NotADirectoryError):
            raise _no_directory(os.path.dirname(target)) from None
        raise
    raise AlreadyExists(
        f"`{target}` exists already; nothing was changed",
        subject=target,
        hint="restore into a new directory, or move the old one away first",
    )


def _no_directory(path: str) -> UsageError:
    return UsageError(
        f"`{path}` is no directory", subject=path, hint="restore to a path whose parents are directories"
    )


def _is_whole(disk: Disk, path: str, entry: FileEntry) -> bool:
    try:
        return disk.stat(path).size == entry.size and digest_of_file(disk, path, entry.size) == entry.digest
    except FileNotFoundError:
        return False
