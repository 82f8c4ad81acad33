"""Megatron-LM: ``iter_<0000100>`` and a tracker beside it, in the formats ``torch_dist`` and ``torch`` (legacy).

``torch_dist`` is DCP, after which rank 0 writes ``metadata.json``, perhaps ``integrity.json``, then the tracker, then
perhaps ``tokenizer/``. The legacy format is a directory a model-parallel rank, written by its data-parallel rank 0, and a
tracker that comes after a barrier; nothing else says that all have written. The tracker exists on rank 0's node only.
Sources: Megatron Core 0.16 ``dist_checkpointing/serialization.py``, Megatron-LM ``training/checkpointing.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from stager.formats.layouts.api import (
    SETTLE_MARKED_S,
    SETTLE_RANKS_S,
    Candidate,
    Trackers,
    Unfinished,
)
from stager.formats.layouts.rules import (
    Found,
    Rules,
    Step,
    any_of,
    check_formats,
    check_not_younger,
    marker_elsewhere,
    read_json,
    tracked_step,
)
from stager.formats.layouts.torch_dcp import MARKER, MARKER_PATTERN, check_dcp, has_dcp

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "metadata.json"
NAME = re.compile(r"iter_([0-9]{7,18})")
MARKERS = (MARKER_PATTERN, re.compile(r"(?:[^/]+/)*(?:metadata|integrity)\.json", re.DOTALL))
_LEGACY = re.compile(r"mp_rank_([0-9]{2,8})(?:_([0-9]{3,8}))?(?:_([0-9]{3,8}))?/[^/]+\.pt")


def has_core(candidate: Candidate) -> bool:
    """Whether Megatron Core's `dist_checkpointing.save` wrote here."""
    return CONFIG in candidate.listing and has_dcp(candidate)


def check_core(candidate: Candidate) -> Found:
    """Megatron Core's directory is complete: DCP, and then its configuration."""
    found = check_dcp(candidate)
    if CONFIG not in candidate.listing:
        return marker_elsewhere(candidate, f"no `{CONFIG}` yet")
    if "sharded_backend" not in read_json(candidate, CONFIG):
        raise Unfinished(f"`{CONFIG}` names no backend")
    if MARKER in candidate.listing:
        check_not_younger(candidate, CONFIG, [MARKER])
    check_formats(candidate)
    return found


def check_iteration(candidate: Candidate) -> Found:
    """A directory of either format is complete, its tracker considered."""
    step = step_of(candidate)
    tracked = tracked_step(candidate, TRACKER)
    reached = tracked is not None and tracked >= step
    if not any_of(candidate.listing, _LEGACY):
        found = check_core(candidate)
        # Its own files prove that every rank has finished. Without a tracker, more of rank 0's may follow.
        settle_s = SETTLE_MARKED_S if reached else SETTLE_RANKS_S
        return Found(max(settle_s, found.settle_s), found.ranks, step, found.files)
    check_formats(candidate)
    if not reached and not candidate.node_local:
        raise Unfinished(f"`{TRACKER}` has not come to {step} yet")
    slots = {match.groups() for path in candidate.listing if (match := _LEGACY.fullmatch(path))}
    return Found(SETTLE_MARKED_S if reached else SETTLE_RANKS_S, len(slots), step)


def step_of(candidate: Candidate) -> int:
    """The iteration in the name."""
    match = NAME.fullmatch(candidate.name)
    return int(match[1]) if match else 0


def is_iteration(candidate: Candidate) -> bool:
    """Whether a directory is named like an iteration and holds files of either format."""
    if candidate.is_file or NAME.fullmatch(candidate.name) is None:
        return False
    return has_dcp(candidate) or any_of(candidate.listing, _LEGACY) or CONFIG in candidate.listing


def point_iteration(name: str, step: Step, paths: Collection[str]) -> Trackers:
    """The tracker, if Megatron would look for this iteration under this name."""
    match = NAME.fullmatch(name)
    return {TRACKER: str(int(match[1])).encode()} if match and name == f"iter_{int(match[1]):07d}" else {}


LAYOUT = Rules("megatron", is_iteration, check_iteration, MARKERS, point_iteration)
