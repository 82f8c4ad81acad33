"""Commits in a tier: node parts, then the manifest. A checkpoint exists if and only if its manifest does.

Whoever completes the expected set of parts writes the manifest, create-only. On a store that does not honour create-only
puts atomically (found by a probe, never assumed) node 0 alone commits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from stager.checkpoint.keep import age_of
from stager.clock import Clock
from stager.errors import AlreadyExists, FormatError, IntegrityError, NotFound, StagerError, StoreError
from stager.formats.commits import (
    COMMIT_BYTES_MAX,
    CheckpointManifest,
    CheckpointPart,
    CommitMarker,
    FileEntry,
    decode_checkpoint_manifest,
    decode_part,
    encode_checkpoint_manifest,
    encode_part,
)
from stager.formats.fields import canonical_json
from stager.formats.names import MANIFEST_NAME, STAGER_FOLDER, latest_key, manifest_key, node_part_key
from stager.logs import event
from stager.store.api import CREATE, ObjectStore, read_all
from stager.transfer.retry import retried
from stager.transfer.tools import Tools

log = logging.getLogger("stager.commit")


@dataclass(frozen=True, slots=True)
class Damaged:
    """A manifest that is there and cannot be read: told, never taken for a checkpoint, never overwritten."""

    checkpoint: str
    error: StagerError


async def read_manifest(store: ObjectStore, checkpoint: str) -> CheckpointManifest | None:
    """A checkpoint's commit, or None if it does not exist.

    Raises:
        FormatError: It is there, and damaged or of another checkpoint.
    """
    key = manifest_key(checkpoint)
    try:
        raw, _ = await read_all(store, key, bytes_max=COMMIT_BYTES_MAX)
    except NotFound:
        return None
    manifest = decode_checkpoint_manifest(raw, of=f"{store.properties.name}/{key}")
    if manifest.checkpoint != checkpoint:
        raise FormatError(f"`{key}` is the manifest of `{manifest.checkpoint}`", subject=key)
    return manifest


async def list_manifests(store: ObjectStore) -> list[CheckpointManifest | Damaged]:
    """Every checkpoint that exists in a run, oldest first: by step, and by time where there is no step."""
    start, end = f"{STAGER_FOLDER}/", f"/{MANIFEST_NAME}"
    names = [
        info.key.removeprefix(start).removesuffix(end)
        async for info in store.list_objects(start)
        if info.key.endswith(end)
    ]
    found: list[CheckpointManifest | Damaged] = []
    for name in names:
        try:
            manifest = await read_manifest(store, name)
        except (FormatError, IntegrityError) as error:
            found.append(Damaged(name, error))
        else:
            # None: retired between the listing and the reading.
            if manifest is not None:
                found.append(manifest)
    return sorted(found, key=_age)


def newest(manifests: Sequence[CheckpointManifest | Damaged]) -> CheckpointManifest | None:
    """The last sound one of `list_manifests`."""
    return next((found for found in reversed(manifests) if isinstance(found, CheckpointManifest)), None)


async def publish_part(store: ObjectStore, part: CheckpointPart, tools: Tools) -> None:
    """Write a node's part. Its files are durable in the tier before this is called; writing it again changes nothing."""
    key = node_part_key(part.checkpoint, part.node)
    raw = encode_part(part)
    await retried(lambda: store.put(key, raw), tools, doing=f"publish {key}")


async def missing_parts(store: ObjectStore, checkpoint: str, nodes: int) -> list[int]:
    """Nodes of ``nodes`` that have not published their part."""
    return [node for node in range(nodes) if await _read_part(store, checkpoint, node) is None]


async def try_commit(
    store: ObjectStore, checkpoint: str, *, layout: str, nodes: int, tools: Tools, clock: Clock
) -> CheckpointManifest | None:
    """Commit a checkpoint if every node's part is there; None if one is missing.

    Raises:
        IntegrityError: The parts contradict each other, or the checkpoint exists with other files.
    """
    parts = []
    for node in range(nodes):
        read = partial(_read_part, store, checkpoint, node)
        part = await retried(read, tools, doing=f"read part {node} of {checkpoint}")
        if part is None:
            return None
        parts.append(part)
    manifest = _merge(checkpoint, layout, parts, tools, clock)
    won = await _create_manifest(store, manifest, tools)
    if won.write_id == manifest.write_id:
        event(
            log,
            logging.INFO,
            "checkpoint.committed",
            checkpoint=checkpoint,
            bytes=won.size,
            files=len(won.files),
        )
        await _write_latest(store, won, tools)
    return won


async def delete_all(store: ObjectStore, keys: Sequence[str], tools: Tools) -> None:
    """Delete every key, or raise for the first that could not be."""

    async def delete() -> None:
        failed = await store.delete(list(keys))
        for error in failed.values():
            raise error

    if keys:
        await retried(delete, tools, doing=f"delete {keys[0]}")


def same_files(one: Sequence[FileEntry], other: Sequence[FileEntry]) -> bool:
    """Whether two lists name the same paths with the same bytes."""
    return {(entry.path, entry.size, entry.digest) for entry in one} == {
        (entry.path, entry.size, entry.digest) for entry in other
    }


async def _create_manifest(
    store: ObjectStore, manifest: CheckpointManifest, tools: Tools
) -> CheckpointManifest:
    """The manifest that stands in the end: ours, or an equal one that another node wrote first."""
    key = manifest_key(manifest.checkpoint)
    raw = encode_checkpoint_manifest(manifest)

    async def create() -> CheckpointManifest:
        try:
            await store.put(key, raw, mode=CREATE)
            return manifest
        except StoreError as error:
            if not (isinstance(error, AlreadyExists) or error.retryable):
                raise
            # Refused, or the answer was lost: whoever's write-id stands there has won.
            standing = await read_manifest(store, manifest.checkpoint)
            if standing is None:
                raise
            return standing

    standing = await retried(create, tools, doing=f"commit {manifest.checkpoint}")
    if standing.write_id != manifest.write_id and not same_files(standing.files, manifest.files):
        raise IntegrityError(
            f"checkpoint `{manifest.checkpoint}` exists in {store.properties.name} with other files",
            subject=manifest.checkpoint,
            hint="two runs save under one name: give each its own run URL",
        )
    return standing


async def _write_latest(store: ObjectStore, manifest: CheckpointManifest, tools: Tools) -> None:
    """The hint for people and scripts; nothing of stager trusts it, so a failure is told and passed over."""
    raw = canonical_json(
        {"checkpoint": manifest.checkpoint, "step": manifest.step, "write_id": manifest.write_id}
    )
    try:
        await retried(lambda: store.put(latest_key(), raw), tools, doing="write latest", attempts=2)
    except StoreError as error:
        event(
            log, logging.WARNING, "latest.not_written", checkpoint=manifest.checkpoint, reason=error.message
        )


async def _read_part(store: ObjectStore, checkpoint: str, node: int) -> CheckpointPart | None:
    key = node_part_key(checkpoint, node)
    try:
        raw, _ = await read_all(store, key, bytes_max=COMMIT_BYTES_MAX)
    except NotFound:
        return None
    part = decode_part(raw, of=f"{store.properties.name}/{key}")
    if (part.checkpoint, part.node) != (checkpoint, node):
        raise FormatError(f"`{key}` is node {part.node}'s part of `{part.checkpoint}`", subject=key)
    return part


def _merge(
    checkpoint: str, layout: str, parts: Sequence[CheckpointPart], tools: Tools, clock: Clock
) -> CheckpointManifest:
    by_path: dict[str, FileEntry] = {}
    for part in parts:
        if part.nodes != len(parts):
            raise IntegrityError(
                f"node {part.node} counts {part.nodes} nodes in `{checkpoint}`; this one counts {len(parts)}",
                subject=checkpoint,
                hint="every node's configuration needs the same node_count",
            )
        for entry in part.files:
            known = by_path.setdefault(entry.path, entry)
            if (known.size, known.digest) != (entry.size, entry.digest):
                raise IntegrityError(
                    f"two nodes hold different bytes of `{checkpoint}/{entry.path}`",
                    subject=entry.path,
                    hint="the nodes saved different checkpoints under one name, or one was taken half-written",
                )
    marker = next((part.marker for part in parts if part.marker.cursor is not None), parts[0].marker)
    steps = {part.marker.step for part in parts if part.marker.step is not None}
    if len(steps) > 1:
        raise IntegrityError(
            f"the nodes' steps of `{checkpoint}` differ: {sorted(steps)}", subject=checkpoint
        )
    marker = CommitMarker(next(iter(steps), None), marker.metrics, marker.cursor)
    return CheckpointManifest(
        checkpoint=checkpoint,
        step=marker.step,
        layout=layout,
        files=tuple(sorted(by_path.values(), key=lambda entry: entry.path)),
        nodes=len(parts),
        write_id=f"{tools.random.getrandbits(128):032x}",
        created_ns=clock.wall_ns(),
        metrics=marker.metrics,
        cursor=marker.cursor,
    )


def _age(found: CheckpointManifest | Damaged) -> tuple[int, int, str]:
    if isinstance(found, Damaged):
        return (-1, 0, found.checkpoint)
    return age_of(found)
