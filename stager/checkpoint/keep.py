"""Which checkpoints a tier keeps, and why. Pure: manifests and rules go in, a plan with reasons comes out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from stager.formats.commits import CheckpointManifest

HOUR_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Best:
    """The best ``count`` by a metric. A checkpoint without the metric, or with one that is no number, is not among them."""

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, slots=True)
class KeepRule:
    """What a tier keeps; any part of the rule keeps a checkpoint. Without any part everything is kept.

    Attributes:
        last: The newest so many.
        every_steps: Those whose step is a multiple of it.
        every_hours: The first, and then each that was committed at least so long after the one that is kept before it.
        best: The best by a metric.
        names: Patterns of names, as in a shell.
        pinned: Names that are kept whatever else; alone they make no rule.
    """

    last: int | None = None
    every_steps: int | None = None
    every_hours: float | None = None
    best: Best | None = None
    names: tuple[str, ...] = ()
    pinned: frozenset[str] = frozenset()

    @property
    def keeps_all(self) -> bool:
        parts = (self.last, self.every_steps, self.every_hours, self.best)
        return not self.names and all(part is None for part in parts)


@dataclass(frozen=True, slots=True)
class NextTier:
    """The tier behind one: what is committed there, and what it would keep."""

    name: str
    manifests: Sequence[CheckpointManifest]
    rule: KeepRule


@dataclass(frozen=True, slots=True)
class Retention:
    """What becomes of one checkpoint."""

    manifest: CheckpointManifest
    keep: bool
    reason: str


def plan_retention(
    manifests: Sequence[CheckpointManifest], rule: KeepRule, behind: NextTier | None = None
) -> list[Retention]:
    """What to keep of ``manifests``, oldest first as `list_manifests` gives them.

    The newest is always kept: with it goes the run. So is what was committed last, and the last few are counted both ways: a
    trainer that went back to an earlier step saves lower steps than the run has, and they are what it will resume from.

    With a tier ``behind``, nothing goes before that one holds it, unless its own rule would drop it there at once.
    """
    # Of equal times the younger in the run's order comes first.
    by_time = sorted(reversed(manifests), key=lambda manifest: -manifest.created_ns)
    later = {manifest.checkpoint: place for place, manifest in enumerate(by_time)}
    spaced = _spaced(by_time, rule.every_hours)
    best = _best(by_time, rule.best)
    plan = []
    for place, manifest in enumerate(manifests):
        reason = _first_reason(
            manifest, rule, len(manifests) - 1 - place, later[manifest.checkpoint], spaced, best
        )
        if not reason and behind is not None:
            reason = _not_behind(manifest, behind)
        plan.append(Retention(manifest, bool(reason), reason or "no rule keeps it"))
    return plan


def age_of(manifest: CheckpointManifest) -> tuple[int, int, str]:
    """The order of a run: by step, and by time where there is no step."""
    return (-1 if manifest.step is None else manifest.step, manifest.created_ns, manifest.checkpoint)


def content_of(manifest: CheckpointManifest) -> str:
    """A digest of a checkpoint's paths, sizes and bytes: equal in every tier that holds it, under whatever name."""
    digest = hashlib.sha256()
    for entry in sorted(manifest.files, key=lambda entry: entry.path):
        digest.update(f"{entry.size} {entry.digest.sha256} {len(entry.path)} {entry.path}\n".encode())
    return digest.hexdigest()


def _first_reason(
    manifest: CheckpointManifest,
    rule: KeepRule,
    younger: int,
    later: int,
    spaced: frozenset[str],
    best: frozenset[str],
) -> str:
    """Why it stays; empty if nothing keeps it."""
    name, step = manifest.checkpoint, manifest.step
    if younger == 0:
        return "it is the newest"
    if later == 0:
        return "it was committed last"
    if rule.keeps_all:
        return "no rule drops anything"
    if name in rule.pinned:
        return "it is pinned"
    if rule.last is not None and younger < rule.last:
        return f"it is one of the last {rule.last}"
    if rule.last is not None and later < rule.last:
        return f"it is one of the {rule.last} that were committed last"
    if rule.every_steps is not None and step is not None and step % rule.every_steps == 0:
        return f"its step is a multiple of {rule.every_steps}"
    if name in spaced:
        return f"it is the first, or {rule.every_hours:g} h after the one before it"
    if name in best and rule.best is not None:
        return f"it is one of the best {rule.best.count} by {rule.best.metric}"
    pattern = next((pattern for pattern in rule.names if fnmatchcase(name, pattern)), "")
    return f"its name fits `{pattern}`" if pattern else ""


def _not_behind(manifest: CheckpointManifest, behind: NextTier) -> str:
    """Why the tier behind keeps it here, if it does."""
    content = content_of(manifest)
    if any(content_of(held) == content for held in behind.manifests):
        return ""
    # As the tier behind would judge it if it were there; what it dropped by its rule is no reason to stay.
    with_it = sorted([*behind.manifests, manifest], key=age_of)
    judged = plan_retention(with_it, behind.rule)
    if any(not retention.keep for retention in judged if retention.manifest is manifest):
        return ""
    return f"{behind.name} does not hold it yet"


def _spaced(by_time: Sequence[CheckpointManifest], every_hours: float | None) -> frozenset[str]:
    """From the oldest on, so that the choice is the same again when the others are gone."""
    kept: list[CheckpointManifest] = []
    for manifest in reversed(by_time) if every_hours is not None else ():
        if not kept or manifest.created_ns - kept[-1].created_ns >= (every_hours or 0.0) * HOUR_NS:
            kept.append(manifest)
    return frozenset(manifest.checkpoint for manifest in kept)


def _best(by_time: Sequence[CheckpointManifest], best: Best | None) -> frozenset[str]:
    """Of equal ones the younger."""
    if best is None:
        return frozenset()
    sign = 1 if best.mode == "min" else -1
    measured = [one for one in by_time if math.isfinite(one.metrics.get(best.metric, math.nan))]
    ordered = sorted(measured, key=lambda one: sign * one.metrics[best.metric])
    return frozenset(manifest.checkpoint for manifest in ordered[: best.count])
