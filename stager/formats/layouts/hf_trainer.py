"""Hugging Face Trainer: ``checkpoint-<N>`` directories, written in place.

Rank 0 writes weights, optimizer, scheduler and ``trainer_state.json``, in this order; every rank writes its own
``rng_state_<rank>.pth`` with no barrier, so with several ranks nothing says that all have finished. Weights may be a nested
directory of DCP or DeepSpeed. ``checkpoint-is-incomplete.txt`` says no (transformers 5, on SIGTERM). Sources: transformers
5.24 ``trainer.py`` (`_save_checkpoint`), ``trainer_jit_checkpoint.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from stager.errors import FormatError
from stager.formats.layouts.api import (
    SETTLE_MARKED_S,
    SETTLE_RANKS_S,
    Candidate,
    Complete,
    Corrupt,
    NotMine,
    Verdict,
    Writing,
    below,
    read_whole,
)
from stager.formats.layouts.steps import is_unfinished_file
from stager.formats.layouts.structure import Unfinished, check_safetensors, check_torch_zip
from stager.formats.layouts.torch_dcp import MARKER as DCP_MARKER
from stager.formats.layouts.torch_dcp import TorchDcp

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_STATE = "trainer_state.json"
_SENTINEL = "checkpoint-is-incomplete.txt"
_SIGNS = (
    "trainer_state.json",
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
_INDEX = re.compile(r"[^/]+\.index\.json")
_TORCH = re.compile(r"[^/]+\.(?:bin|pt|pth)")
_DEEPSPEED_STEP = re.compile(r"global_step(0|[1-9][0-9]{0,17})")
_DEEPSPEED_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(0|[1-9][0-9]{0,7})_mp_rank_([0-9]{2,8})_optim_states\.pt"
)
_STATE_BYTES_MAX = 256 << 20
_INDEX_BYTES_MAX = 64 << 20


class HuggingFaceTrainer:
    """``checkpoint-<N>`` of transformers 4.39 and later."""

    name = "hf_trainer"

    def judge(self, candidate: Candidate) -> Verdict:
        match = _NAME.fullmatch(candidate.name)
        listing = candidate.listing
        if candidate.is_file or match is None or not any(sign in listing for sign in (*_SIGNS, _SENTINEL)):
            return NotMine()
        step = int(match[1])
        try:
            ranks = self._check(candidate, step)
        except Unfinished as reason:
            return Writing(str(reason))
        except FormatError as error:
            return Corrupt(error.message)
        sound = ranks is None or ranks == 1 or candidate.ranks is not None
        return Complete(
            layout=self.name,
            step=step,
            files=tuple(sorted(path for path in listing if not is_unfinished_file(path))),
            settle_s=SETTLE_MARKED_S if sound else SETTLE_RANKS_S,
            markers=self.markers(listing),
            ranks=ranks,
        )

    def markers(self, paths: Collection[str]) -> tuple[str, ...]:
        # Nested DCP markers first, then the state that resume code reads.
        nested = sorted(path for path in paths if path.endswith(f"/{DCP_MARKER}"))
        return (*nested, *(path for path in (_STATE,) if path in paths))

    def trackers(self, checkpoint: str, step: int | None) -> Mapping[str, bytes]:
        return {}

    def _check(self, candidate: Candidate, step: int) -> int | None:
        """How many ranks left their random state, or None if none is kept; Unfinished or FormatError say what lacks."""
        listing = candidate.listing
        if _SENTINEL in listing:
            raise Unfinished(f"`{_SENTINEL}` says so")
        if _STATE not in listing:
            raise Unfinished(f"no `{_STATE}` yet")
        _check_state(candidate, step)
        stated_ns = listing[_STATE].mtime_ns
        for path in listing:
            if _WEIGHTS.fullmatch(path) and listing[path].mtime_ns > stated_ns:
                raise Unfinished(f"`{path}` is younger than `{_STATE}`, which is from an earlier save")
        _check_weights(candidate)
        _check_nested(candidate, stated_ns)
        return _count_ranks(candidate)


def _check_state(candidate: Candidate, step: int) -> None:
    # It is written in place by one `write`, so a piece of JSON is a file that is still being written.
    try:
        state = json.loads(read_whole(candidate, _STATE, bytes_max=_STATE_BYTES_MAX))
    except (ValueError, RecursionError):
        raise Unfinished(f"`{_STATE}` is not whole") from None
    stated = state.get("global_step") if isinstance(state, dict) else None
    if stated != step:
        raise Unfinished(f"`{_STATE}` is of step {stated}")


def _check_weights(candidate: Candidate) -> None:
    """Every file at the top has the bytes that its own format accounts for, and an index names only what is there."""
    for path in candidate.listing:
        if "/" in path:
            continue
        if path.endswith(".safetensors"):
            check_safetensors(candidate, path)
        elif _INDEX.fullmatch(path):
            _check_index(candidate, path)
        elif _TORCH.fullmatch(path):
            check_torch_zip(candidate, path)


def _check_index(candidate: Candidate, path: str) -> None:
    try:
        index = json.loads(read_whole(candidate, path, bytes_max=_INDEX_BYTES_MAX))
        named = set(index["weight_map"].values())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise Unfinished(f"`{path}` is not whole") from None
    missing = sorted(str(name) for name in named if name not in candidate.listing)
    if missing:
        raise Unfinished(f"`{path}` names `{missing[0]}`, which is not there")


def _check_nested(candidate: Candidate, stated_ns: int) -> None:
    folders = {path.split("/", 1)[0] for path in candidate.listing if "/" in path}
    for folder in sorted(folders):
        nested = below(candidate, folder)
        if DCP_MARKER in nested.listing or any(path.endswith(".distcp") for path in nested.listing):
            verdict = TorchDcp().judge(nested)
            if isinstance(verdict, Corrupt):
                raise FormatError(f"`{folder}`: {verdict.reason}", subject=folder)
            if not isinstance(verdict, Complete):
                raise Unfinished(
                    f"`{folder}`: {verdict.reason if isinstance(verdict, Writing) else 'no DCP'}"
                )
        elif _DEEPSPEED_STEP.fullmatch(folder):
            _check_deepspeed(nested, folder, stated_ns)


def _check_deepspeed(nested: Candidate, folder: str, stated_ns: int) -> None:
    """Optimizer shards of ranks 0 to W-1 for each model-parallel rank, all whole, none younger than the state."""
    ranks: dict[str, set[int]] = {}
    for path, entry in nested.listing.items():
        if entry.size == 0:
            raise Unfinished(f"`{folder}/{path}` is empty")
        if entry.mtime_ns > stated_ns:
            raise Unfinished(f"`{folder}/{path}` is younger than `{_STATE}`")
        if match := _DEEPSPEED_OPTIMIZER.fullmatch(path):
            ranks.setdefault(match[2], set()).add(int(match[1]))
        if _TORCH.fullmatch(path):
            check_torch_zip(nested, path)
    for slot, found in sorted(ranks.items()):
        missing = set(range(max(found) + 1)) - found
        if missing:
            raise Unfinished(
                f"`{folder}` lacks the optimizer shard of rank {min(missing)} for model rank {slot}"
            )
    if len({len(found) for found in ranks.values()}) > 1:
        raise Unfinished(f"`{folder}` has not the same optimizer shards for every model rank")


def _count_ranks(candidate: Candidate) -> int | None:
    found = [match for path in candidate.listing if (match := _RANDOM.fullmatch(path))]
    if not found:
        return None
    numbered = {int(match[1]) for match in found if match[1] is not None}
    if not numbered:
        return 1
    missing = set(range(candidate.ranks or max(numbered) + 1)) - numbered
    if missing:
        raise Unfinished(f"no `rng_state_{min(missing)}.pth` yet")
    return max(numbered) + 1
