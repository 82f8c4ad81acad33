"""What a pack remembers of itself in its destination: the plan it carries out, and each shard that is finished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stager.errors import FormatError
from stager.formats.digests import Digest, check_sha256, decode_crc64nvme, encode_crc64nvme
from stager.formats.fields import canonical_json, load_object, take_count, take_list, take_text, take_version
from stager.formats.manifest import ShardEntry
from stager.formats.names import check_relative_path
from stager.pack.plan import shard_name

RECORD_VERSION = 1
SHARDS_MAX = 10_000_000


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The pack that is under way here.

    Attributes:
        plan: Fingerprint of the whole plan.
        name: What its shards are called.
        shards: How many they are.
        stale: Shards of what it replaces, to be removed at the end unless they were written anew.
    """

    plan: str
    name: str
    shards: int
    stale: tuple[str, ...] = ()

    def shard_names(self) -> Iterator[str]:
        """Of every shard that it may have written."""
        return (shard_name(self.name, number) for number in range(self.shards))


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard.

    Attributes:
        plan: Fingerprint of the shard's plan.
        entry: What the manifest will say of it.
        fields: Names of its fields, sorted.
        skipped: ``path: reason`` of samples that could not be read and were left out by the user's wish.
    """

    plan: str
    entry: ShardEntry
    fields: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def encode_plan(record: PlanRecord) -> bytes:
    return canonical_json(
        {
            "kind": "stager-pack",
            "version": RECORD_VERSION,
            "plan": record.plan,
            "name": record.name,
            "shards": record.shards,
            "stale": list(record.stale),
        }
    )


def decode_plan(raw: bytes, *, of: str) -> PlanRecord:
    value = load_object(raw, of=of)
    if value.get("kind") != "stager-pack":
        raise FormatError(f"`{of}` is not the plan of a pack", subject=of)
    take_version(value, at=of, known=RECORD_VERSION)
    stale = tuple(check_relative_path(name, of=f"{of}: stale") for name in take_list(value, "stale", at=of))
    return PlanRecord(
        take_text(value, "plan", at=of),
        check_relative_path(value.get("name"), of=f"{of}: name"),
        take_count(value, "shards", at=of, most=SHARDS_MAX),
        stale,
    )


def encode_record(record: ShardRecord) -> bytes:
    return canonical_json(
        {
            "kind": "stager-pack-shard",
            "version": RECORD_VERSION,
            "plan": record.plan,
            "name": record.entry.name,
            "bytes": record.entry.size,
            "samples": record.entry.samples,
            "sha256": record.entry.digest.sha256,
            "crc64nvme": encode_crc64nvme(record.entry.digest.crc64nvme),
            "fields": list(record.fields),
            "skipped": list(record.skipped),
        }
    )


def decode_record(raw: bytes, *, of: str) -> ShardRecord:
    value = load_object(raw, of=of)
    if value.get("kind") != "stager-pack-shard":
        raise FormatError(f"`{of}` is not the record of a shard", subject=of)
    take_version(value, at=of, known=RECORD_VERSION)
    digest = Digest(check_sha256(value.get("sha256")), decode_crc64nvme(take_text(value, "crc64nvme", at=of)))
    entry = ShardEntry(
        name=check_relative_path(value.get("name"), of=f"{of}: name"),
        size=take_count(value, "bytes", at=of),
        samples=take_count(value, "samples", at=of),
        digest=digest,
    )
    fields = tuple(str(name) for name in take_list(value, "fields", at=of, length_max=10_000))
    skipped = tuple(str(name) for name in take_list(value, "skipped", at=of))
    return ShardRecord(take_text(value, "plan", at=of), entry, fields, skipped)
