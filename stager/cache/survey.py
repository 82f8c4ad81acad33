"""What an earlier daemon left in a cache: looked at once, at the start, and tidied. Blocks; runs in the disk lane."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field

from stager.cache.datasets import CachedDataset, read_dataset
from stager.cache.layout import CacheLayout, ShardKey
from stager.cache.records import RECORDS_BYTES_MAX, Record, decode_records
from stager.disk import Disk
from stager.transfer.part_map import PART_MAP_SUFFIX


@dataclass(slots=True)
class Survey:
    """What was found.

    Attributes:
        datasets: With a readable manifest.
        proven: Shards whose file is as it was when it was verified.
        unproven: Shards of the right size that must be read before they are believed.
        misfits: What was moved to quarantine, because no manifest names it with its size; bytes of each.
        partial: Staging files that a download can go on from; bytes of each.
    """

    datasets: list[CachedDataset] = field(default_factory=list)
    proven: dict[ShardKey, Record] = field(default_factory=dict)
    unproven: dict[ShardKey, Record] = field(default_factory=dict)
    misfits: dict[ShardKey, int] = field(default_factory=dict)
    partial: dict[ShardKey, int] = field(default_factory=dict)


def survey(disk: Disk, layout: CacheLayout) -> Survey:
    """Look at everything under the root; what belongs to nothing goes."""
    disk.remove_tree(layout.quarantine)
    for folder in (layout.datasets, layout.staging, layout.quarantine, layout.shards):
        disk.make_directory(folder)
    found = Survey()
    for name in _folders(disk, layout.datasets):
        dataset = read_dataset(disk, layout, name)
        if dataset is not None:
            found.datasets.append(dataset)
    known = {dataset.id for dataset in found.datasets}
    for name in _folders(disk, layout.shards):
        if name not in known:
            disk.remove_tree(layout.shards_directory(name))
    for dataset in found.datasets:
        _look_at_shards(disk, layout, dataset, found)
    _drop_superseded(disk, layout, found)
    _look_at_staging(disk, layout, found)
    return found


def read_records(disk: Disk, layout: CacheLayout, dataset: str) -> Mapping[str, Record]:
    """A dataset's records; none if there is no file."""
    try:
        return decode_records(disk.read_at(layout.verified(dataset), 0, RECORDS_BYTES_MAX))
    except FileNotFoundError:
        return {}


def _folders(disk: Disk, path: str) -> list[str]:
    """Names of folders; a file that somebody put beside them is none of ours."""
    return [name for name in disk.list_names(path) if disk.stat(f"{path}/{name}").is_directory]


def _look_at_shards(disk: Disk, layout: CacheLayout, dataset: CachedDataset, found: Survey) -> None:
    directory = layout.shards_directory(dataset.id)
    disk.make_directory(directory)
    for name in disk.list_names(layout.dataset_directory(dataset.id)):
        if name.startswith(".") and name.endswith(".tmp"):  # a kill in the middle of `Disk.write_file`
            disk.remove(f"{layout.dataset_directory(dataset.id)}/{name}")
    records = read_records(disk, layout, dataset.id)
    for name, status in disk.walk(directory):
        key, record = ShardKey(dataset.id, name), Record(status.size, status.mtime_ns)
        entry = dataset.by_name.get(name)
        if entry is None or entry.size != status.size:
            found.misfits[key] = status.size
            disk.publish(layout.shard(key), layout.quarantined(key), durable=False)
        elif records.get(name) == record:
            found.proven[key] = record
        else:
            found.unproven[key] = record


def _drop_superseded(disk: Disk, layout: CacheLayout, found: Survey) -> None:
    """Forget older contents of a source of which no shard is here: nothing can be served from them."""
    used = {key.dataset for key in (*found.proven, *found.unproven)}
    newest: dict[str, tuple[int, str]] = {}
    for dataset in found.datasets:
        written_ns = disk.stat(layout.manifest(dataset.id)).mtime_ns
        newest[dataset.source] = max(newest.get(dataset.source, (0, "")), (written_ns, dataset.id))
    kept = used | {identity for _, identity in newest.values()}
    for dataset in [dataset for dataset in found.datasets if dataset.id not in kept]:
        found.datasets.remove(dataset)
        disk.remove_tree(layout.shards_directory(dataset.id))
        disk.remove_tree(layout.dataset_directory(dataset.id))


def _look_at_staging(disk: Disk, layout: CacheLayout, found: Survey) -> None:
    expected = {
        posixpath.basename(layout.staged(key)): key for dataset in found.datasets for key in dataset.keys
    }
    names = set(disk.list_names(layout.staging))
    for name in names:
        # Without its map a file claims nothing, and a map without its file neither. A shard that is visible may have its
        # old name back after a power cut, since only the new one was synced.
        whole = name.removesuffix(PART_MAP_SUFFIX)
        key = expected.get(whole)
        visible = key in found.proven or key in found.unproven
        if key is None or visible or not {whole, whole + PART_MAP_SUFFIX} <= names:
            disk.remove(f"{layout.staging}/{name}")
        elif name == whole:
            found.partial[key] = disk.stat(f"{layout.staging}/{name}").size
