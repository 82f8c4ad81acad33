"""The node's shards: which are here and which are coming, in how many bytes. A visible one is complete and verified."""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections.abc import Callable
from dataclasses import dataclass

from stager.budget import Priority
from stager.cache.layout import CacheLayout, ShardKey, dataset_id
from stager.disk import Disk
from stager.errors import FormatError, IntegrityError, NotFound
from stager.formats.manifest import (
    DATASET_MANIFEST_BYTES_MAX,
    DatasetManifest,
    ShardEntry,
    decode_dataset_manifest,
    encode_dataset_manifest,
)
from stager.logs import event
from stager.store.api import ObjectStore
from stager.transfer.download import Downloaded, DownloadOptions, digest_of_file, download
from stager.transfer.part_map import PART_MAP_SUFFIX
from stager.transfer.tools import Tools

log = logging.getLogger("stager.cache")


@dataclass(frozen=True, slots=True)
class CachedDataset:
    """A dataset that this node knows, with its shards by name."""

    id: str
    source: str
    manifest: DatasetManifest
    by_name: dict[str, ShardEntry]


@dataclass(slots=True)
class CachedShard:
    """A visible shard: its bytes, and when it was last asked for, on the loop's clock."""

    size: int
    last_used_s: float


class ShardCache:
    """Shards under one root, bounded in bytes. Bookkeeping changes without awaits; files follow."""

    def __init__(self, root: str, capacity_bytes: int, tools: Tools) -> None:
        self.layout = CacheLayout(root)
        self.capacity_bytes = capacity_bytes
        self.tools = tools
        self.datasets: dict[str, CachedDataset] = {}
        self.shards: dict[ShardKey, CachedShard] = {}
        self.coming: dict[ShardKey, int] = {}
        self.leftovers: dict[ShardKey, int] = {}
        self.quarantined_count = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that are visible, coming, or left in staging by an earlier life."""
        visible = sum(shard.size for shard in self.shards.values())
        return visible + sum(self.coming.values()) + sum(self.leftovers.values())

    async def start(self) -> None:
        """Adopt what an earlier daemon left; quarantine what does not fit its manifest. The caller holds the lock."""
        found = await self.tools.offload.run("disk", _survey, self.tools.disk, self.layout)
        now = asyncio.get_running_loop().time()
        self.datasets = {dataset.id: dataset for dataset in found.datasets}
        self.shards = {key: CachedShard(size, now) for key, size in found.shards.items()}
        self.leftovers = dict(found.leftovers)
        self.quarantined_count += len(found.misfits)
        for key in found.misfits:
            event(
                log, logging.WARNING, "shard.quarantined", shard=key, reason="its size is not the manifest's"
            )
        event(
            log,
            logging.INFO,
            "cache.adopted",
            root=self.layout.root,
            datasets=len(self.datasets),
            shards=len(self.shards),
            bytes=self.used_bytes,
        )

    async def add_dataset(self, source: str, manifest: DatasetManifest) -> CachedDataset:
        """Make a dataset known on this node, durably, so that a restart does not need the bucket for it."""
        dataset = _cached_dataset(source, manifest)
        await self.tools.offload.run("disk", _write_dataset, self.tools.disk, self.layout, dataset)
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
        self.leftovers.pop(key, None)
        self.coming[key] = size

    async def fetch(
        self,
        store: ObjectStore,
        key: ShardKey,
        *,
        priority: Priority,
        options: DownloadOptions,
        progress: Callable[[int], None] | None = None,
    ) -> Downloaded:
        """Bring a reserved shard and make it visible. On failure it is no longer counted as coming."""
        entry = self.entry(key)
        staged, final = self.layout.staged(key), self.layout.shard(key)
        try:
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
            await self.tools.offload.run("disk", _publish, self.tools.disk, staged, final)
        except IntegrityError:
            del self.coming[key]
            raise
        except BaseException:
            # What has arrived stays for the next try, and stays counted.
            self.leftovers[key] = self.coming.pop(key)
            raise
        del self.coming[key]
        self.shards[key] = CachedShard(entry.size, asyncio.get_running_loop().time())
        return got

    async def evict(self, key: ShardKey) -> None:
        """Unlink a visible shard; readers that have it open go on reading."""
        if self.shards.pop(key, None) is not None:
            await self.tools.offload.run("disk", self.tools.disk.remove, self.layout.shard(key))

    async def drop_leftover(self, key: ShardKey) -> None:
        """Forget what an abandoned fetch left in staging."""
        if self.leftovers.pop(key, None) is not None:
            await self.tools.offload.run("disk", _drop_staged, self.tools.disk, self.layout.staged(key))

    async def is_sound(self, key: ShardKey) -> bool:
        """Whether a visible shard still has the bytes of its manifest; a damaged one is quarantined."""
        entry = self.entry(key)
        path = self.layout.shard(key)
        try:
            found = await self.tools.offload.run(
                "hash", digest_of_file, self.tools.disk, path, entry.size + 1
            )
        except FileNotFoundError:
            self.shards.pop(key, None)
            return False
        if found == entry.digest:
            return True
        self.shards.pop(key, None)
        self.quarantined_count += 1
        event(log, logging.ERROR, "shard.quarantined", shard=key, reason="its bytes are not the manifest's")
        target = self.layout.quarantined(key)
        await self.tools.offload.run("disk", _set_aside, self.tools.disk, path, target)
        return False

    async def is_there(self, key: ShardKey) -> bool:
        """Whether a shard that should be visible is; somebody may have cleaned the directory by hand."""
        try:
            await self.tools.offload.run("disk", self.tools.disk.stat, self.layout.shard(key))
        except FileNotFoundError:
            self.shards.pop(key, None)
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Survey:
    datasets: list[CachedDataset]
    shards: dict[ShardKey, int]
    leftovers: dict[ShardKey, int]
    misfits: list[ShardKey]


def _survey(disk: Disk, layout: CacheLayout) -> _Survey:
    """Look at what lies under the root, and tidy: an unknown dataset's shards and unknown staging files go."""
    disk.remove_tree(layout.quarantine)
    for folder in (layout.datasets, layout.staging, layout.quarantine, f"{layout.root}/shards"):
        disk.make_directory(folder)
    datasets = [
        found for name in disk.list_names(layout.datasets) if (found := _read_dataset(disk, layout, name))
    ]
    known = {dataset.id for dataset in datasets}
    for name in disk.list_names(f"{layout.root}/shards"):
        if name not in known:
            disk.remove_tree(layout.shards_directory(name))
    shards: dict[ShardKey, int] = {}
    misfits: list[ShardKey] = []
    for dataset in datasets:
        directory = layout.shards_directory(dataset.id)
        disk.make_directory(directory)
        for name, status in disk.walk(directory):
            key = ShardKey(dataset.id, name)
            entry = dataset.by_name.get(name)
            if entry is not None and entry.size == status.size:
                shards[key] = status.size
            else:
                misfits.append(key)
                disk.publish(layout.shard(key), layout.quarantined(key), durable=False)
    return _Survey(datasets, shards, _survey_staging(disk, layout, datasets), misfits)


def _survey_staging(disk: Disk, layout: CacheLayout, datasets: list[CachedDataset]) -> dict[ShardKey, int]:
    expected = {
        posixpath.basename(layout.staged(key)): key
        for dataset in datasets
        for key in (ShardKey(dataset.id, name) for name in dataset.by_name)
    }
    names = set(disk.list_names(layout.staging))
    leftovers = {}
    for name in names:
        key = expected.get(name)
        if key is not None and name + PART_MAP_SUFFIX in names:
            leftovers[key] = disk.stat(f"{layout.staging}/{name}").size
        elif not (
            name.endswith(PART_MAP_SUFFIX) and name.removesuffix(PART_MAP_SUFFIX) in names & expected.keys()
        ):
            disk.remove(f"{layout.staging}/{name}")
    return leftovers


def _read_dataset(disk: Disk, layout: CacheLayout, name: str) -> CachedDataset | None:
    """The dataset under ``name``, or None, and nothing there, if it is damaged or misnamed."""
    try:
        raw = disk.read_at(layout.manifest(name), 0, DATASET_MANIFEST_BYTES_MAX)
        source = disk.read_at(layout.source(name), 0, 1 << 16).decode("utf-8")
        dataset = _cached_dataset(source, decode_dataset_manifest(raw, of=layout.manifest(name)))
    except (FileNotFoundError, NotADirectoryError, FormatError, UnicodeDecodeError):
        dataset = None
    if dataset is None or dataset.id != name:
        disk.remove_tree(layout.dataset_directory(name))
        return None
    return dataset


def _cached_dataset(source: str, manifest: DatasetManifest) -> CachedDataset:
    by_name = {shard.name: shard for shard in manifest.shards}
    return CachedDataset(dataset_id(source, manifest.fingerprint), source, manifest, by_name)


def _write_dataset(disk: Disk, layout: CacheLayout, dataset: CachedDataset) -> None:
    disk.make_directory(layout.dataset_directory(dataset.id))
    disk.make_directory(layout.shards_directory(dataset.id))
    disk.write_file(layout.source(dataset.id), dataset.source.encode())
    # Last: a directory with a manifest is a dataset.
    disk.write_file(layout.manifest(dataset.id), encode_dataset_manifest(dataset.manifest))


def _publish(disk: Disk, staged: str, final: str) -> None:
    disk.make_directory(posixpath.dirname(final))
    # Synced, although a cache can be fetched again: a name that a power cut leaves with zeros behind it would be
    # believed at the next start, and a full check of terabytes then would cost more than these syncs.
    disk.publish(staged, final, durable=True)


def _set_aside(disk: Disk, path: str, target: str) -> None:
    disk.publish(path, target, durable=False)


def _drop_staged(disk: Disk, staged: str) -> None:
    disk.remove(staged + PART_MAP_SUFFIX)
    disk.remove(staged)
