"""What a checkpoint's presence in a tier is written as: one part a node, then the manifest, which is the commit.

The trainer's own commit marker (`CommitMarker`) stands here too: `stager.commit()` leaves it in the checkpoint's
directory, and its facts travel into the manifest.
"""

from __future__ import annotations

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
from stager.formats.names import check_relative_path

COMMIT_MARKER_NAME = ".stager-commit.json"
COMMIT_VERSION = 1
COMMIT_BYTES_MAX = 256 << 20
NODES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint: path relative to it, bytes, digest, and the object's etag where the tier has one."""

    path: str
    size: int
    digest: Digest
    etag: str = ""


@dataclass(frozen=True, slots=True)
class CommitMarker:
    """What the trainer says of a checkpoint that it has finished.

    Attributes:
        step: Training step, or None if it did not say.
        metrics: Numbers by name, for retention by the best.
        cursor: The dataset's state, as its `state_dict` gives it; opaque here.
    """

    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    cursor: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One node's files of a checkpoint, durable in the tier before this is written."""

    checkpoint: str
    node: int
    nodes: int
    files: tuple[FileEntry, ...]
    marker: CommitMarker = CommitMarker()


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The commit of a checkpoint in a tier.

    Attributes:
        checkpoint: Its name below the run (``checkpoint-100``).
        step: Training step, or None where neither layout nor trainer tells.
        layout: The adapter that recognised it.
        files: Of all nodes, sorted by path.
        nodes: How many nodes' parts it is made of.
        write_id: Who wrote it; settles a lost answer.
        created_ns: Wall time of the commit, nanoseconds since the epoch.
        metrics: As the trainer gave them.
        cursor: The dataset's state at the checkpoint, as the trainer gave it, or None.
    """

    checkpoint: str
    step: int | None
    layout: str
    files: tuple[FileEntry, ...]
    nodes: int
    write_id: str
    created_ns: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    cursor: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


def encode_marker(marker: CommitMarker) -> bytes:
    return canonical_json({"kind": "stager-commit", "version": COMMIT_VERSION, **_marker_json(marker)})


def decode_marker(raw: bytes, *, of: str = COMMIT_MARKER_NAME) -> CommitMarker:
    value = _load(raw, of=of, kind="stager-commit")
    return _marker(value, at=of)


def encode_part(part: CheckpointPart) -> bytes:
    return canonical_json(
        {
            "kind": "stager-checkpoint-part",
            "version": COMMIT_VERSION,
            "checkpoint": part.checkpoint,
            "node": part.node,
            "nodes": part.nodes,
            "files": [_file_json(entry) for entry in part.files],
            **_marker_json(part.marker),
        }
    )


def decode_part(raw: bytes, *, of: str) -> CheckpointPart:
    value = _load(raw, of=of, kind="stager-checkpoint-part")
    part = CheckpointPart(
        checkpoint=check_relative_path(value.get("checkpoint"), of=f"{of}: checkpoint"),
        node=take_count(value, "node", at=of, most=NODES_MAX),
        nodes=take_count(value, "nodes", at=of, most=NODES_MAX),
        files=_files(value, at=of),
        marker=_marker(value, at=of),
    )
    if part.node >= part.nodes:
        raise FormatError(f"`{of}`: node {part.node} of {part.nodes}", subject=of)
    return part


def encode_checkpoint_manifest(manifest: CheckpointManifest) -> bytes:
    return canonical_json(
        {
            "kind": "stager-checkpoint",
            "version": COMMIT_VERSION,
            "checkpoint": manifest.checkpoint,
            "layout": manifest.layout,
            "nodes": manifest.nodes,
            "write_id": manifest.write_id,
            "created_ns": manifest.created_ns,
            "bytes": manifest.size,
            "files": [_file_json(entry) for entry in manifest.files],
            **_marker_json(CommitMarker(manifest.step, manifest.metrics, manifest.cursor)),
        }
    )


def decode_checkpoint_manifest(raw: bytes, *, of: str) -> CheckpointManifest:
    value = _load(raw, of=of, kind="stager-checkpoint")
    marker = _marker(value, at=of)
    manifest = CheckpointManifest(
        checkpoint=check_relative_path(value.get("checkpoint"), of=f"{of}: checkpoint"),
        step=marker.step,
        layout=take_text(value, "layout", at=of, length_max=100),
        files=_files(value, at=of),
        nodes=take_count(value, "nodes", at=of, most=NODES_MAX),
        write_id=take_text(value, "write_id", at=of, length_max=200),
        created_ns=take_count(value, "created_ns", at=of),
        metrics=marker.metrics,
        cursor=marker.cursor,
    )
    if take_count(value, "bytes", at=of) != manifest.size:
        raise FormatError(f"`{of}`: `bytes` does not add up over its files", subject=of)
    return manifest


def _load(raw: bytes, *, of: str, kind: str) -> Mapping[str, Any]:
    if len(raw) > COMMIT_BYTES_MAX:
        raise FormatError(f"`{of}` has {len(raw)} bytes; at most {COMMIT_BYTES_MAX} are read", subject=of)
    value = load_object(raw, of=of)
    if value.get("kind") != kind:
        raise FormatError(f"`{of}` is not of kind `{kind}`", subject=of)
    take_version(value, at=of, known=COMMIT_VERSION)
    return value


def _marker_json(marker: CommitMarker) -> dict[str, Any]:
    cursor = None if marker.cursor is None else dict(marker.cursor)
    return {"step": marker.step, "metrics": dict(marker.metrics), "cursor": cursor}


def _marker(value: Mapping[str, Any], *, at: str) -> CommitMarker:
    step = None if value.get("step") is None else take_count(value, "step", at=at)
    metrics = as_object(value.get("metrics", {}), at=f"{at}: metrics")
    for name, number in metrics.items():
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise FormatError(f"`{at}`: metric `{name}` is not a number", subject=at)
    cursor = None if value.get("cursor") is None else as_object(value["cursor"], at=f"{at}: cursor")
    return CommitMarker(step, metrics, cursor)


def _file_json(entry: FileEntry) -> dict[str, Any]:
    return {
        "path": entry.path,
        "bytes": entry.size,
        "sha256": entry.digest.sha256,
        "crc64nvme": encode_crc64nvme(entry.digest.crc64nvme),
        "etag": entry.etag,
    }


def _files(value: Mapping[str, Any], *, at: str) -> tuple[FileEntry, ...]:
    entries = []
    for number, raw in enumerate(take_list(value, "files", at=at)):
        place = f"{at}: files[{number}]"
        entry = as_object(raw, at=place)
        entries.append(
            FileEntry(
                path=check_relative_path(entry.get("path"), of=f"{place}: path"),
                size=take_count(entry, "bytes", at=place),
                digest=Digest(
                    check_sha256(entry.get("sha256")),
                    decode_crc64nvme(take_text(entry, "crc64nvme", at=place)),
                ),
                etag=take_text(entry, "etag", at=place, length_max=500),
            )
        )
    if len({entry.path for entry in entries}) != len(entries):
        raise FormatError(f"`{at}` names a file twice", subject=at)
    return tuple(entries)
