"""DLRover Flash Checkpoint: any framework's files, and ``dlrover_latest.txt`` beside them.

The agents write from shared memory, in place; when all have left their done-files in ``._dlrover_ckpt_stage``, the
tracker gets the step. A step that timed out never gets there. The tracker is rewritten by each later save, so one that
has come past a step vouches for it. Source: DLRover ``python/elastic_agent/torch/ckpt_saver.py``.
"""

from __future__ import annotations

from collections.abc import Collection

from stager.formats.layouts.api import SETTLE_MARKED_S, SETTLE_RANKS_S, Candidate, Trackers, Unfinished
from stager.formats.layouts.deepspeed import are_shards, point_latest
from stager.formats.layouts.megatron import point_iteration
from stager.formats.layouts.nested import check_nested_states
from stager.formats.layouts.rules import Found, Rules, Step, check_formats, tracked_step
from stager.formats.layouts.steps import is_directory_name, step_in
from stager.formats.layouts.torch_dcp import MARKER_PATTERN, check_dcp, has_dcp
from stager.formats.layouts.torch_file import is_torch_name

_TRACKER = "dlrover_latest.txt"
_STAGE = "._dlrover_ckpt_stage"


def _claims(candidate: Candidate) -> bool:
    if candidate.beside(_TRACKER) is None and candidate.beside(_STAGE) is None:
        return False
    named = is_torch_name(candidate) if candidate.is_file else is_directory_name(candidate.name)
    return named and step_in(_stem(candidate)) is not None and bool(candidate.listing)


def _check(candidate: Candidate) -> Found:
    step = step_in(_stem(candidate))
    tracked = tracked_step(candidate, _TRACKER)
    if not candidate.node_local and (tracked is None or step is None or tracked < step):
        raise Unfinished(f"`{_TRACKER}` has not come to {step} yet")
    check_formats(candidate)
    files = check_dcp(candidate).files if has_dcp(candidate) else None
    check_nested_states(candidate)
    return Found(SETTLE_RANKS_S if candidate.node_local else SETTLE_MARKED_S, step=step, files=files)


def _stem(candidate: Candidate) -> str:
    return candidate.name.rsplit(".", 1)[0] if candidate.is_file else candidate.name


def _point(name: str, step: Step, paths: Collection[str]) -> Trackers:
    found = step_in(name.rsplit(".", 1)[0] if name in paths else name)
    tag = point_latest(name, step, paths) if are_shards(paths) else {}
    return (
        {} if found is None else {_TRACKER: str(found).encode(), **point_iteration(name, step, paths), **tag}
    )


LAYOUT = Rules("dlrover", _claims, _check, (MARKER_PATTERN,), _point)
