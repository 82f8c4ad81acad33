"""The dataset manifest: what shards a dataset has. It is written last and names only durable objects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stager.errors import FormatError
from stager.formats.digests import Digest, check_sha256, decode_crc64nvme, encode_crc64nvme
from stager.formats.fields import (
    as_object,
    canonical_json,
    load_object,
    take_count,
    take_list,
    take_text,
    take_version,
)
from stager.formats.names import MANIFEST_NAME, check_relative_path

DATASET_MANIFEST_VERSION = 1
DATASET_MANIFEST_BYTES_MAX = 1 << 30
DATASET_KIND = "stager-dataset"

__all__ = [
    "DATASET_MANIFEST_BYTES_MAX",
    "MANIFEST_NAME",
    "DatasetManifest",
    "ShardEntry",
    "decode_dataset_manifest",
    "encode_dataset_manifest",
]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard: its name relative to the dataset, bytes, samples and digest."""

    name: str
    size: int
    samples: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """A dataset: its shards in order, the fields its samples have, and where it came from.

    Attributes:
        shards: In the order that positions count through.
        fields: Names of fields over all samples, sorted (``json``, ``jpg``, ...).
        provenance: What packed it, free form, without influence on the order.
    """

    shards: tuple[ShardEntry, ...]
    fields: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that change with any shard's content, count or place, and with nothing else."""
        whole = hashlib.sha256(b"stager-dataset-1\n")
        for shard in self.shards:
            whole.update(f"{shard.digest.sha256} {shard.size} {shard.samples}\n".encode())
        return whole.hexdigest()[:32]


def encode_dataset_manifest(manifest: DatasetManifest) -> bytes:
    """Canonical JSON; the same manifest always gives the same bytes."""
    return canonical_json(
        {
            "kind": DATASET_KIND,
            "version": DATASET_MANIFEST_VERSION,
            "fingerprint": manifest.fingerprint,
            "samples": manifest.samples,
            "bytes": manifest.size,
            "fields": list(manifest.fields),
            "provenance": dict(manifest.provenance),
            "shards": [
                {
                    "name": shard.name,
                    "bytes": shard.size,
                    "samples": shard.samples,
                    "sha256": shard.digest.sha256,
                    "crc64nvme": encode_crc64nvme(shard.digest.crc64nvme),
                }
                for shard in manifest.shards
            ],
        }
    )


def decode_dataset_manifest(raw: bytes, *, of: str = MANIFEST_NAME) -> DatasetManifest:
    """The manifest in ``raw``.

    Args:
        raw: The object's bytes.
        of: Its key or path, for messages.

    Raises:
        FormatError: Anything is missing, of another type, out of bounds, doubled, or does not add up.
    """
    value = load_object(raw, of=of)
    if value.get("kind") != DATASET_KIND:
        raise FormatError(f"`{of}` is not a dataset manifest", subject=of, hint="its `kind` is another")
    take_version(value, at=of, known=DATASET_MANIFEST_VERSION)
    shards = tuple(
        _shard(as_object(entry, at=f"{of}: shards[{number}]"), at=f"{of}: shards[{number}]")
        for number, entry in enumerate(take_list(value, "shards", at=of))
    )
    if len({shard.name for shard in shards}) != len(shards):
        raise FormatError(f"`{of}` names a shard twice", subject=of)
    fields = tuple(str(name) for name in take_list(value, "fields", at=of, length_max=10_000))
    manifest = DatasetManifest(shards, fields, as_object(value.get("provenance", {}), at=f"{of}: provenance"))
    stated = (
        take_text(value, "fingerprint", at=of),
        take_count(value, "samples", at=of),
        take_count(value, "bytes", at=of),
    )
    if stated != (manifest.fingerprint, manifest.samples, manifest.size):
        raise FormatError(
            f"`{of}`: fingerprint, samples or bytes do not add up over its shards",
            subject=of,
            hint="the file was altered by hand or damaged; pack again, or restore it",
        )
    return manifest


def _shard(entry: Mapping[str, Any], *, at: str) -> ShardEntry:
    return ShardEntry(
        name=check_relative_path(entry.get("name"), of=f"{at}: name"),
        size=take_count(entry, "bytes", at=at),
        samples=take_count(entry, "samples", at=at),
        digest=Digest(
            check_sha256(entry.get("sha256")), decode_crc64nvme(take_text(entry, "crc64nvme", at=at))
        ),
    )
