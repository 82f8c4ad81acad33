"""The node's shards: which are here, which are coming, how many bytes they hold.

A visible shard is complete and verified.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections.abc import Callable
from dataclasses import dataclass

from stager.budget import Priority
from stager.cache.datasets import CachedDataset, make_dataset, write_dataset
from stager.cache.layout import CacheLayout, ShardKey
from stager.cache.records import RECORDS_BYTES_COMPACT, Record, encode_record, encode_records
from stager.cache.survey import survey
from stager.disk import Disk, FileStat
from stager.errors import IntegrityError, NotFound, OutOfSpace, StagerError
from stager.formats.manifest import DatasetManifest, ShardEntry
from stager.logs import event
from stager.store.api import ObjectStore
from stager.transfer.download import Downloaded, DownloadOptions, digest_of_file, download
from stager.transfer.part_map import drop_staged
from stager.transfer.tools import Tools

log = logging.getLogger("stager.cache")

__all__ = ["CachedDataset", "CachedShard", "ShardCache"]

FULL_S = 60.0


@dataclass(slots=True)
class CachedShard:
    """A visible shard: its file as it was verified, and when it was last asked for, on the loop's clock; -1 for never."""

    record: Record
    last_used_s: float = -1.0

    @property
    def size(self) -> int:
        return self.record.size


class ShardCache:
    """Shards under one root, bounded in bytes. Bookkeeping changes without awaits; files follow.

    Attributes:
        shards: Visible.
        coming: In flight; bytes of the whole shard, because they are reserved on disk before the first arrives.
        partial: Left in staging by fetches that failed or were killed; they are gone on from.
        quarantined: Damaged files, kept for whoever wants to look until room is needed or the daemon starts again.
    """

    def __init__(self, root: str, capacity_bytes: int, tools: Tools) -> None:
        self.layout = CacheLayout(root)
        self.capacity_bytes = capacity_bytes
        self.tools = tools
        self.datasets: dict[str, CachedDataset] = {}
        self.shards: dict[ShardKey, CachedShard] = {}
        self.coming: dict[ShardKey, int] = {}
        self.partial: dict[ShardKey, int] = {}
        self.quarantined: dict[ShardKey, int] = {}
        self.quarantined_count = 0
        self._full_at: tuple[int, float] | None = None
        self._record_ends: dict[str, int] = {}
        self._checking = asyncio.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of everything under the root but manifests."""
        visible = sum(shard.size for shard in self.shards.values())
        others = (self.coming, self.partial, self.quarantined)
        return visible + sum(sum(sizes.values()) for sizes in others)

    def bound_bytes(self) -> int:
        """What may be held now: the configured bound, or less after the disk was found full, for `FULL_S`."""
        if self._full_at is not None and asyncio.get_running_loop().time() - self._full_at[1] > FULL_S:
            self._full_at = None
        return self.capacity_bytes if self._full_at is None else min(self.capacity_bytes, self._full_at[0])

    async def start(self) -> None:
        """Take up what an earlier daemon left; what fits no manifest is quarantined. The caller holds the lock."""
        self.coming.clear()
        found = await self.tools.offload.run("disk", survey, self.tools.disk, self.layout)
        self.datasets = {dataset.id: dataset for dataset in found.datasets}
        self.shards = {key: CachedShard(record) for key, record in found.proven.items()}
        self.partial = dict(found.partial)
        self.quarantined = dict(found.misfits)
        self.quarantined_count += len(found.misfits)
        for key in found.misfits:
            event(log, logging.WARNING, "shard.quarantined", shard=key, reason="it is not in the manifest")
        if found.unproven:
            event(log, logging.INFO, "cache.verifying", shards=len(found.unproven))
        for key, record in found.unproven.items():
            self.shards[key] = CachedShard(record)
            await self.is_sound(key)
        await self._keep_bound()
        for dataset in self.datasets:
            try:
                await self._write_records(dataset)
            except StagerError as error:
                # A full disk must not keep the daemon from starting: it is who can make room there.
                event(log, logging.WARNING, "cache.unrecorded", dataset=dataset, reason=error.message)
        event(
            log,
            logging.INFO,
            "cache.adopted",
            root=self.layout.root,
            datasets=len(self.datasets),
            shards=len(self.shards),
            verified_again=len(found.unproven),
            bytes=self.used_bytes,
        )

    async def add_dataset(self, source: str, manifest: DatasetManifest) -> CachedDataset:
        """Make a dataset known on this node, durably, so that a restart does not need the bucket for it."""
        return await self.add(make_dataset(source, manifest))

    async def add(self, dataset: CachedDataset) -> CachedDataset:
        """As `add_dataset`."""
        await self.tools.offload.run("disk", write_dataset, self.tools.disk, self.layout, dataset)
        self.datasets[dataset.id] = dataset
        return dataset

    def entry(self, key: ShardKey) -> ShardEntry:
        """The manifest's entry of a shard, or NotFound."""
        dataset = self.datasets.get(key.dataset)
        entry = dataset.by_name.get(key.name) if dataset else None
        if entry is None:
            raise NotFound(
                f"this node knows no shard `{key.name}` of dataset `{key.dataset}`",
                subject=str(key),
                hint="open the dataset again: its manifest may have changed",
            )
        return entry

    def reserve(self, key: ShardKey, size: int) -> None:
        """Count a shard as coming, before its first byte is asked for."""
        self.partial.pop(key, None)
        self.coming[key] = size

    def release(self, key: ShardKey) -> None:
        """Count a shard as coming no more; what staging may have of it stays counted, for the next try."""
        self.partial[key] = self.coming.pop(key)

    async def fetch(
        self,
        store: ObjectStore,
        key: ShardKey,
        *,
        priority: Priority | Callable[[], Priority],
        options: DownloadOptions,
        progress: Callable[[int], None] | None = None,
    ) -> Downloaded:
        """Bring a reserved shard and make it visible. On failure it is no longer counted as coming.

        Raises:
            IntegrityError, OutOfSpace, StoreError: As `download`.
        """
        entry = self.entry(key)
        disk, offload = self.tools.disk, self.tools.offload
        staged, final = self.layout.staged(key), self.layout.shard(key)
        try:
            await offload.run("disk", disk.make_directory, self.layout.staging)
            got = await download(
                store,
                key.name,
                staged,
                self.tools,
                size=entry.size,
                digest=entry.digest,
                priority=priority,
                options=options,
                progress=progress,
            )
            status = await offload.run("disk", _publish, disk, staged, final)
        except IntegrityError:
            del self.coming[key]
            raise
        except OutOfSpace:
            # What the disk holds now is what it can hold, whoever else fills it; room must be made before the next try.
            del self.coming[key]
            self._full_at = (self.used_bytes, asyncio.get_running_loop().time())
            raise
        except BaseException:
            self.release(key)
            raise
        del self.coming[key]
        record = Record(status.size, status.mtime_ns)
        self.shards[key] = CachedShard(record)
        try:
            await self._append_record(key, record)
        except StagerError as error:
            # The shard is there; without its record it is read once more at the next start.
            event(log, logging.WARNING, "shard.unrecorded", shard=key, reason=error.message)
        return got

    async def give_up(self, key: ShardKey) -> None:
        """Unlink a visible shard, or what staging has of it; readers that have it open go on reading."""
        disk, offload = self.tools.disk, self.tools.offload
        shard = self.shards.pop(key, None)
        try:
            if shard is not None:
                await offload.run("disk", disk.remove, self.layout.shard(key))
            elif key in self.partial:
                await offload.run("disk", drop_staged, disk, self.layout.staged(key))
                self.partial.pop(key, None)
        except BaseException:
            # It still takes its room.
            if shard is not None:
                self.shards[key] = shard
            raise

    async def empty_quarantine(self) -> None:
        """Remove what was set aside."""
        for key in list(self.quarantined):
            await self.tools.offload.run("disk", self.tools.disk.remove, self.layout.quarantined(key))
            self.quarantined.pop(key, None)

    async def is_sound(self, key: ShardKey) -> bool:
        """Whether a visible shard still has the bytes of its manifest; a damaged one is quarantined."""
        # One at a time: all ranks of a node may report the same shard at once.
        async with self._checking:
            if key not in self.shards:
                return False
            entry, path = self.entry(key), self.layout.shard(key)
            disk, offload = self.tools.disk, self.tools.offload
            reason = "its bytes are not the manifest's"
            try:
                found = await offload.run("hash", digest_of_file, disk, path, entry.size + 1)
            except FileNotFoundError:
                self.shards.pop(key, None)
                return False
            except StagerError as error:
                reason = error.message
            else:
                if found == entry.digest:
                    return True
            event(log, logging.ERROR, "shard.quarantined", shard=key, reason=reason)
            self.shards.pop(key, None)
            await offload.run("disk", _set_aside, disk, path, self.layout.quarantined(key))
            self.quarantined[key] = entry.size
            self.quarantined_count += 1
            return False

    async def is_there(self, key: ShardKey) -> bool:
        """Whether a shard that should be visible is; somebody may have cleaned the directory by hand."""
        try:
            await self.tools.offload.run("disk", self.tools.disk.stat, self.layout.shard(key))
        except FileNotFoundError:
            self.shards.pop(key, None)
            return False
        return True

    async def _keep_bound(self) -> None:
        """Be within the bound from the start: a power cut brings back unlinked files, and the bound may be a lower one."""
        oldest_first = sorted(self.shards, key=lambda key: self.shards[key].record.mtime_ns)
        for key in (*self.partial, *oldest_first):
            if self.used_bytes <= self.capacity_bytes:
                return
            await self.give_up(key)

    async def _append_record(self, key: ShardKey, record: Record) -> None:
        line = encode_record(key.name, record)
        end = self._record_ends.get(key.dataset)
        if end is None or end + len(line) > RECORDS_BYTES_COMPACT:
            await self._write_records(key.dataset)
            return
        self._record_ends[key.dataset] = end + len(line)
        try:
            await self.tools.offload.run(
                "disk", self.tools.disk.write_at, self.layout.verified(key.dataset), end, line
            )
        except FileNotFoundError:
            await self._write_records(key.dataset)

    async def _write_records(self, dataset: str) -> None:
        """Write the records of what is visible now, in place of all before."""
        raw = encode_records(
            (key.name, shard.record) for key, shard in self.shards.items() if key.dataset == dataset
        )
        self._record_ends[dataset] = len(raw)
        await self.tools.offload.run(
            "disk", _write_unsynced, self.tools.disk, self.layout.verified(dataset), raw
        )


def _publish(disk: Disk, staged: str, final: str) -> FileStat:
    disk.make_directory(posixpath.dirname(final))
    # Synced, although a cache can be fetched again: a name that a power cut leaves with zeros behind it would be
    # believed by readers at once, and checking everything at every start would cost far more than these syncs.
    disk.publish(staged, final, durable=True)
    return disk.stat(final)


def _set_aside(disk: Disk, path: str, target: str) -> None:
    disk.make_directory(posixpath.dirname(target))
    disk.publish(path, target, durable=False)


def _write_unsynced(disk: Disk, path: str, raw: bytes) -> None:
    disk.make_directory(posixpath.dirname(path))
    disk.write_file(path, raw, durable=False)
