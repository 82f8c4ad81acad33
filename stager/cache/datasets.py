"""Datasets that a node knows: their manifests, and how they lie on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stager.cache.layout import CacheLayout, ShardKey, dataset_id
from stager.disk import Disk
from stager.errors import FormatError
from stager.formats.manifest import (
    DATASET_MANIFEST_BYTES_MAX,
    DatasetManifest,
    ShardEntry,
    decode_dataset_manifest,
    encode_dataset_manifest,
)

_SOURCE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class CachedDataset:
    """A dataset that this node knows.

    Attributes:
        id: Names its folders in the cache.
        source: Its URL.
        manifest: As the bucket had it.
        fingerprint: The manifest's; computed once, because it hashes every entry.
        by_name: Shards by name.
        places: Index of each shard in the manifest, by key.
        keys: Of the shards, in the manifest's order.
    """

    id: str
    source: str
    manifest: DatasetManifest
    fingerprint: str
    by_name: Mapping[str, ShardEntry]
    places: Mapping[ShardKey, int]
    keys: tuple[ShardKey, ...]


def make_dataset(source: str, manifest: DatasetManifest) -> CachedDataset:
    """A dataset with what is derived from its manifest; takes a while for a large one."""
    fingerprint = manifest.fingerprint
    identity = dataset_id(source, fingerprint)
    keys = tuple(ShardKey(identity, shard.name) for shard in manifest.shards)
    return CachedDataset(
        identity,
        source,
        manifest,
        fingerprint,
        {shard.name: shard for shard in manifest.shards},
        {key: place for place, key in enumerate(keys)},
        keys,
    )


def decode_dataset(source: str, raw: bytes, *, of: str) -> CachedDataset:
    """The dataset of a manifest's bytes; FormatError as `decode_dataset_manifest`."""
    return make_dataset(source, decode_dataset_manifest(raw, of=of))


def write_dataset(disk: Disk, layout: CacheLayout, dataset: CachedDataset) -> None:
    """Make a dataset known on this node, durably."""
    disk.make_directory(layout.dataset_directory(dataset.id))
    disk.make_directory(layout.shards_directory(dataset.id))
    disk.write_file(layout.source(dataset.id), dataset.source.encode())
    # Last: a directory with a manifest is a dataset.
    disk.write_file(layout.manifest(dataset.id), encode_dataset_manifest(dataset.manifest))


def read_dataset(disk: Disk, layout: CacheLayout, name: str) -> CachedDataset | None:
    """The dataset under ``name``; None, and nothing left there, if it is damaged or misnamed."""
    try:
        raw = disk.read_at(layout.manifest(name), 0, DATASET_MANIFEST_BYTES_MAX)
        source = disk.read_at(layout.source(name), 0, _SOURCE_BYTES_MAX).decode("utf-8")
        dataset = decode_dataset(source, raw, of=layout.manifest(name))
    except (FileNotFoundError, NotADirectoryError, FormatError, UnicodeDecodeError):
        dataset = None
    if dataset is None or dataset.id != name:
        disk.remove_tree(layout.dataset_directory(name))
        return None
    return dataset
