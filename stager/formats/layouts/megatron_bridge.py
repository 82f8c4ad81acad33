"""Megatron-Bridge: Megatron's ``iter_<N>`` with ``train_state.pt`` and ``run_config.yaml``.

After Megatron Core's files come ``train_state.pt``, its copy ``latest_train_state.pt`` beside the directory, the tracker,
and only then ``run_config.yaml``, without which nothing loads; so the tracker comes too early. Source: Megatron-Bridge
``training/checkpointing.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from stager.formats.layouts.api import Candidate, CopyOf, Trackers, Unfinished
from stager.formats.layouts.megatron import MARKERS, check_iteration, is_iteration, point_iteration
from stager.formats.layouts.rules import Found, Rules, Step, check_not_younger

_STATE = "train_state.pt"
_CONFIG = "run_config.yaml"
_LATEST_STATE = "latest_train_state.pt"


def _claims(candidate: Candidate) -> bool:
    if not is_iteration(candidate):
        return False
    # The copy of an earlier save tells whose directory this will be.
    signs = (_STATE in candidate.listing, _CONFIG in candidate.listing)
    return any(signs) or candidate.beside(_LATEST_STATE) is not None


def _check(candidate: Candidate) -> Found:
    found = check_iteration(candidate)
    for path in (_STATE, _CONFIG):
        if path not in candidate.listing and not candidate.node_local:
            raise Unfinished(f"no `{path}` yet")
    if _CONFIG in candidate.listing:
        if candidate.listing[_CONFIG].size == 0:
            raise Unfinished(f"`{_CONFIG}` is empty")
        check_not_younger(candidate, _CONFIG, [path for path in (_STATE,) if path in candidate.listing])
    return found


def _point(name: str, step: Step, paths: Collection[str]) -> Trackers:
    tracker = point_iteration(name, step, paths)
    return {_LATEST_STATE: CopyOf(_STATE), **tracker} if tracker and _STATE in paths else tracker


LAYOUT = Rules(
    "megatron_bridge",
    _claims,
    _check,
    (*MARKERS, re.compile(re.escape(_STATE)), re.compile(re.escape(_CONFIG))),
    _point,
)
