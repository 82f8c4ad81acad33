"""Hugging Face Trainer: ``checkpoint-<N>`` directories, written in place.

Rank 0 writes weights, optimizer, scheduler and ``trainer_state.json``, in this order; every rank writes its own
``rng_state_<rank>.pth`` with no barrier, so with several ranks nothing says that all have finished. Weights may be a nested
directory of DCP (FSDP) or DeepSpeed. ``checkpoint-is-incomplete.txt`` says no (transformers 5, on SIGTERM). Versions 4.36 to
4.38 write into ``tmp-checkpoint-<N>`` and rename. Sources: transformers 5.24 ``trainer.py`` (`_save_checkpoint`),
``trainer_jit_checkpoint.py``.
"""

from __future__ import annotations

import re

from stager.formats.layouts.api import SETTLE_MARKED_S, SETTLE_RANKS_S, Candidate, Unfinished
from stager.formats.layouts.nested import check_nested_states
from stager.formats.layouts.rules import (
    Found,
    Rules,
    check_formats,
    check_not_younger,
    count_ranks,
    marker_elsewhere,
    read_json,
)
from stager.formats.layouts.torch_dcp import MARKER_PATTERN

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_STATE = "trainer_state.json"
_SENTINEL = "checkpoint-is-incomplete.txt"
_SIGNS = (
    _STATE,
    _SENTINEL,
    "training_args.bin",
    "rng_state.pth",
    "scheduler.pt",
    "optimizer.pt",
    "config.json",
)
_RANDOM = re.compile(r"rng_state(?:_(0|[1-9][0-9]{0,7}))?\.pth")
_WEIGHTS = re.compile(
    r"(?:pytorch_model|model|adapter_model|optimizer|scheduler|scaler)(?:[-.][^/]*)?\.(?:bin|pt|safetensors)"
)


def _claims(candidate: Candidate) -> bool:
    if candidate.is_file or _NAME.fullmatch(candidate.name) is None:
        return False
    return any(sign in candidate.listing for sign in _SIGNS) or any(map(_RANDOM.fullmatch, candidate.listing))


def _check(candidate: Candidate) -> Found:
    listing = candidate.listing
    if _SENTINEL in listing:
        raise Unfinished(f"`{_SENTINEL}` says so")
    if _STATE not in listing:
        check_formats(candidate)
        return marker_elsewhere(candidate, f"no `{_STATE}` yet")
    stated = read_json(candidate, _STATE).get("global_step")
    if stated != int(candidate.name.rsplit("-", 1)[1]):
        raise Unfinished(f"`{_STATE}` is of step {str(stated)[:20]}")
    sound, nested = check_nested_states(candidate)
    check_not_younger(
        candidate, _STATE, [path for path in listing if path in nested or _WEIGHTS.fullmatch(path)]
    )
    check_formats(candidate)
    ranks = _count_random_states(candidate)
    if ranks is not None and ranks > 1 and candidate.ranks is None:
        sound = False
    return Found(SETTLE_MARKED_S if sound and not candidate.node_local else SETTLE_RANKS_S, ranks)


def _count_random_states(candidate: Candidate) -> int | None:
    found = [match for path in candidate.listing if (match := _RANDOM.fullmatch(path))]
    numbered = {int(match[1]) for match in found if match[1] is not None}
    if not numbered:
        return 1 if found else None
    return count_ranks(candidate, numbered, lambda rank: f"rng_state_{rank}.pth")


LAYOUT = Rules("hf_trainer", _claims, _check, (MARKER_PATTERN, re.compile(re.escape(_STATE))))
