"""Hugging Face Trainer: ``checkpoint-<N>`` directories, written in place.

Rank 0 writes weights, optimizer, scheduler and ``trainer_state.json``, in this order; every rank writes its own
``rng_state_<rank>.pth`` with no barrier, so with several ranks nothing says that all have finished. Weights may be a nested
directory of DCP (FSDP) or DeepSpeed. ``checkpoint-is-incomplete.txt`` says no (transformers 5, on SIGTERM). Versions 4.36 to
4.38 write into ``tmp-checkpoint-<N>`` and rename. Sources: transformers 5.24 ``trainer.py`` (`_save_checkpoint`),
``trainer_jit_checkpoint.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stager.formats.layouts.api import (
    BESIDE_BYTES_MAX,
    SETTLE_MARKED_S,
    SETTLE_RANKS_S,
    SETTLE_SOUND_S,
    Candidate,
    Unfinished,
)
from stager.formats.layouts.deepspeed import LATEST_PATTERN
from stager.formats.layouts.nested import Nested, check_nested_states
from stager.formats.layouts.rules import (
    Found,
    Rules,
    any_of,
    check_formats,
    check_not_younger,
    count_ranks,
    marker_elsewhere,
    read_json,
)
from stager.formats.layouts.safetensors import check_pieces
from stager.formats.layouts.torch_dcp import MARKER_PATTERN

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_STATE = "trainer_state.json"
_SENTINEL = "checkpoint-is-incomplete.txt"
_SCHEDULER = "scheduler.pt"
_LATEST = "latest"
_SIGNS = (
    _STATE,
    _SENTINEL,
    "training_args.bin",
    "rng_state.pth",
    _SCHEDULER,
    "optimizer.pt",
    "config.json",
)
_RANDOM = re.compile(r"rng_state(?:_(0|[1-9][0-9]{0,7}))?\.pth")
_WEIGHTS = re.compile(
    r"(?:pytorch_model|model|adapter_model|optimizer|scheduler|scaler)(?:[-.][^/]*)?\.(?:bin|pt|safetensors)"
)

_PIECE = re.compile(r"(model|pytorch_model|adapter_model)-[0-9]{5}-of-[0-9]{5}\.(safetensors|bin)")
_OPTIMIZER = re.compile(r"(?:[^/]*-)?optimizer(?:_[0-9]+)?(?:\.pt|\.bin|/.+)", re.DOTALL)
# Everything else may be weights of a model that saves itself in its own way.
_NO_WEIGHTS = re.compile(
    r"(?:.*/)?[^/]*\.(?:json|txt|md|py|jinja|pth)|training_args\.bin|latest|scheduler\.pt|scaler\.pt"
    r"|(?:[^/]*-)?optimizer(?:_[0-9]+)?(?:\.pt|\.bin|/.+)",
    re.DOTALL,
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
    nested = check_nested_states(candidate)
    check_not_younger(
        candidate, _STATE, [path for path in listing if path in nested.paths or _WEIGHTS.fullmatch(path)]
    )
    check_formats(candidate)
    check_pieces(candidate)
    _check_rank_0(candidate, nested)
    ranks = _count_random_states(candidate)
    settle_s = SETTLE_RANKS_S
    if nested.sound and not candidate.node_local:
        if ranks in (None, 1):
            settle_s = SETTLE_SOUND_S  # one process wrote all of it, its state last
        elif candidate.ranks is not None:
            settle_s = SETTLE_MARKED_S  # a random state may be an earlier save's
    return Found(settle_s, ranks, files=listing.keys() - nested.leftovers)


def _check_rank_0(candidate: Candidate, nested: Nested) -> None:
    """What rank 0 writes before its state, as far as one file tells of another."""
    listing = candidate.listing
    if candidate.node_local:
        return
    if not nested.paths and all(map(_NO_WEIGHTS.fullmatch, listing)):
        raise Unfinished("no weights")
    for path in listing:
        match = _PIECE.fullmatch(path)
        if match and f"{match[1]}.{match[2]}.index.json" not in listing:
            raise Unfinished(f"no `{match[1]}.{match[2]}.index.json` yet")
    if nested.of_deepspeed and not _points_to(candidate, nested.of_deepspeed):
        raise Unfinished(f"no `{_LATEST}`, by which DeepSpeed finds `{nested.of_deepspeed[0]}`")
    has_optimizer = bool(nested.of_deepspeed) or any_of(listing, _OPTIMIZER)
    if _SCHEDULER in listing and not has_optimizer:
        raise Unfinished(f"`{_SCHEDULER}` is there, and no state of the optimizer")
    if any_of(listing, _OPTIMIZER) and _SCHEDULER not in listing:
        raise Unfinished(f"a state of the optimizer is there, and no `{_SCHEDULER}`")
    if has_optimizer and not any_of(listing, _RANDOM):
        raise Unfinished("a state of the optimizer is there, and no random state")


def _points_to(candidate: Candidate, folders: Sequence[str]) -> bool:
    if _LATEST not in candidate.listing:
        return False
    return candidate.read(_LATEST, 0, BESIDE_BYTES_MAX).decode("utf-8", "replace").strip() in folders


def _count_random_states(candidate: Candidate) -> int | None:
    found = [match for path in candidate.listing if (match := _RANDOM.fullmatch(path))]
    numbered = {int(match[1]) for match in found if match[1] is not None}
    if not numbered:
        return 1 if found else None
    return count_ranks(candidate, numbered, lambda rank: f"rng_state_{rank}.pth")


LAYOUT = Rules("hf_trainer", _claims, _check, (MARKER_PATTERN, LATEST_PATTERN, re.compile(re.escape(_STATE))))
