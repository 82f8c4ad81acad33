"""Retention: which checkpoints a tier keeps, and why. The plan is pure; carrying it out deletes manifests first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from stager.checkpoint.commit import delete_all, read_manifest
from stager.errors import FormatError, NotFound
from stager.formats.commits import (
    COMMIT_BYTES_MAX,
    CheckpointManifest,
    decode_checkpoint_manifest,
    encode_checkpoint_manifest,
)
from stager.formats.names import STAGER_FOLDER, join_key, manifest_key, node_part_key
from stager.logs import event
from stager.store.api import ObjectStore, read_all
from stager.transfer.retry import retried
from stager.transfer.tools import Tools

log = logging.getLogger("stager.retain")

DELETE_BATCH = 1000
RETIRED_NAME = "retired.json"


@dataclass(frozen=True, slots=True)
class KeepRule:
    """What a tier keeps; any part of the rule keeps a checkpoint. Without any part everything is kept.

    Attributes:
        last: The newest so many.
        every_steps: Those whose step is a multiple of it.
        pinned: Names that are kept whatever else.
    """

    last: int | None = None
    every_steps: int | None = None
    pinned: frozenset[str] = frozenset()

    @property
    def keeps_all(self) -> bool:
        return self.last is None and self.every_steps is None


@dataclass(frozen=True, slots=True)
class Retention:
    """What becomes of one checkpoint."""

    manifest: CheckpointManifest
    keep: bool
    reason: str


def plan_retention(manifests: Sequence[CheckpointManifest], rule: KeepRule) -> list[Retention]:
    """What to keep of ``manifests``, oldest first as `list_manifests` gives them.

    The newest is always kept: with it goes the run. So is what was committed last, and the last few are counted both ways: a
    trainer that went back to an earlier step saves lower steps than the run has, and they are what it will resume from.
    """
    # Of equal times the younger in the run's order comes first.
    by_time = sorted(reversed(manifests), key=lambda manifest: -manifest.created_ns)
    later = {manifest.checkpoint: place for place, manifest in enumerate(by_time)}
    return [
        _judge(manifest, rule, younger=len(manifests) - 1 - place, later=later[manifest.checkpoint])
        for place, manifest in enumerate(manifests)
    ]


def _judge(manifest: CheckpointManifest, rule: KeepRule, *, younger: int, later: int) -> Retention:
    if younger == 0:
        return Retention(manifest, True, "it is the newest")
    if later == 0:
        return Retention(manifest, True, "it was committed last")
    if rule.keeps_all:
        return Retention(manifest, True, "no rule drops anything")
    if manifest.checkpoint in rule.pinned:
        return Retention(manifest, True, "it is pinned")
    if rule.last is not None and younger < rule.last:
        return Retention(manifest, True, f"it is one of the last {rule.last}")
    if rule.last is not None and later < rule.last:
        return Retention(manifest, True, f"it is one of the {rule.last} that were committed last")
    if rule.every_steps is not None and manifest.step is not None and manifest.step % rule.every_steps == 0:
        return Retention(manifest, True, f"its step is a multiple of {rule.every_steps}")
    return Retention(manifest, False, "no rule keeps it")


async def carry_out(store: ObjectStore, plan: Sequence[Retention], tools: Tools) -> int:
    """Delete what the plan drops, oldest first; returns how many.

    A tombstone with the list of files stands while a checkpoint's objects are deleted, so that `finish_retirements` of a
    later life removes what a death left.
    """
    dropped = [retention for retention in plan if not retention.keep]
    for retention in dropped:
        manifest = retention.manifest
        key, raw = retired_key(manifest.checkpoint), encode_checkpoint_manifest(manifest)
        await retried(partial(store.put, key, raw), tools, doing=f"write {key}")
        await delete_all(store, [manifest_key(manifest.checkpoint)], tools)
        await _clear(store, manifest, tools)
        event(
            log, logging.INFO, "checkpoint.retired", checkpoint=manifest.checkpoint, reason=retention.reason
        )
    return len(dropped)


async def finish_retirements(store: ObjectStore, tools: Tools) -> int:
    """Remove what deaths during `carry_out` left; returns of how many checkpoints."""
    end = f"/{RETIRED_NAME}"
    keys = [info.key async for info in store.list_objects(f"{STAGER_FOLDER}/") if info.key.endswith(end)]
    finished = 0
    for key in keys:
        try:
            raw, _ = await read_all(store, key, bytes_max=COMMIT_BYTES_MAX)
            manifest = decode_checkpoint_manifest(raw, of=key)
        except NotFound:
            continue
        except FormatError as error:
            event(log, logging.WARNING, "tombstone.damaged", key=key, reason=error.message)
            continue
        if retired_key(manifest.checkpoint) != key:
            event(log, logging.WARNING, "tombstone.damaged", key=key, reason="it is of another checkpoint")
        elif await read_manifest(store, manifest.checkpoint) is not None:
            # It died before the checkpoint had ceased to exist: the next plan decides anew.
            await delete_all(store, [key], tools)
        else:
            await _clear(store, manifest, tools)
            finished += 1
    return finished


def retired_key(checkpoint: str) -> str:
    """Where a run keeps the tombstone of a checkpoint that is being deleted, relative to the run."""
    return join_key(STAGER_FOLDER, checkpoint, RETIRED_NAME)


async def _clear(store: ObjectStore, manifest: CheckpointManifest, tools: Tools) -> None:
    """Files, then parts, then the tombstone."""
    keys = [join_key(manifest.checkpoint, entry.path) for entry in manifest.files]
    for start in range(0, len(keys), DELETE_BATCH):
        await delete_all(store, keys[start : start + DELETE_BATCH], tools)
    parts = [node_part_key(manifest.checkpoint, node) for node in range(manifest.nodes)]
    await delete_all(store, parts, tools)
    await delete_all(store, [retired_key(manifest.checkpoint)], tools)
