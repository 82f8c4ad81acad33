"""Retention: which checkpoints a tier keeps, and why. The plan is pure; carrying it out deletes manifests first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from stager.checkpoint.commit import delete_all, unpublish
from stager.formats.commits import CheckpointManifest
from stager.formats.names import join_key
from stager.logs import event
from stager.store.api import ObjectStore
from stager.transfer.tools import Tools

log = logging.getLogger("stager.retain")

DELETE_BATCH = 1000


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

    The newest is always kept: with it goes the run.
    """
    return [
        _judge(manifest, rule, younger=len(manifests) - 1 - place) for place, manifest in enumerate(manifests)
    ]


def _judge(manifest: CheckpointManifest, rule: KeepRule, *, younger: int) -> Retention:
    if younger == 0:
        return Retention(manifest, True, "it is the newest")
    if rule.keeps_all:
        return Retention(manifest, True, "no rule drops anything")
    if manifest.checkpoint in rule.pinned:
        return Retention(manifest, True, "it is pinned")
    if rule.last is not None and younger < rule.last:
        return Retention(manifest, True, f"it is one of the last {rule.last}")
    if rule.every_steps is not None and manifest.step is not None and manifest.step % rule.every_steps == 0:
        return Retention(manifest, True, f"its step is a multiple of {rule.every_steps}")
    return Retention(manifest, False, "no rule keeps it")


async def carry_out(store: ObjectStore, plan: Sequence[Retention], tools: Tools) -> int:
    """Delete what the plan drops, oldest first; returns how many. A death in between leaves files that nothing names."""
    dropped = [retention for retention in plan if not retention.keep]
    for retention in dropped:
        manifest = retention.manifest
        await unpublish(store, manifest.checkpoint, tools)
        keys = [join_key(manifest.checkpoint, entry.path) for entry in manifest.files]
        for start in range(0, len(keys), DELETE_BATCH):
            await delete_all(store, keys[start : start + DELETE_BATCH], tools)
        event(
            log, logging.INFO, "checkpoint.retired", checkpoint=manifest.checkpoint, reason=retention.reason
        )
    return len(dropped)
