"""DeepSpeed: a directory a tag (``global_step<N>``) with shards of every rank, and ``latest`` beside it.

Every data-parallel rank writes its optimizer shard, in place and unsynced; model states come from rank 0 of each
model-parallel rank, with ZeRO-3 from all. ``latest`` is written by global rank 0 right after its own files and before the
barrier, so it proves nothing about the others: what does is that every shard which a model-state file tells of is there
and whole. Also pipelines (``layer_XX-...``), mixtures of experts, and the helper process of FastPersist. Nebula leaves
files of a few bytes at the usual places; those hold nothing to resume from. Sources: DeepSpeed 0.19 ``runtime/engine.py``
(`save_checkpoint`, `_get_ckpt_name`), ``runtime/pipe/module.py`` (`ckpt_layer_path`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from stager.formats.layouts.api import SETTLE_COUNTED_S, SETTLE_RANKS_S, Candidate, Trackers, Unfinished
from stager.formats.layouts.rules import Found, Rules, Step, any_of, check_formats, marker_elsewhere
from stager.formats.layouts.steps import is_directory_name, step_in
from stager.formats.layouts.torch_facts import stated_step, torch_dictionary, torch_facts

LATEST = "latest"
LATEST_PATTERN = re.compile(r"(?:[^/]+/)*latest", re.DOTALL)
_RANK = r"(?P<rank>0|[1-9][0-9]{0,7})"
_SLOT = r"mp_rank_(?P<slot>[0-9]{2,8})"
_OPTIMIZER = re.compile(rf"(?:bf16_|fp16_)?zero_pp_rank_{_RANK}_{_SLOT}_optim_states\.pt")
_ALL_RANKS_MODEL = re.compile(rf"zero_pp_rank_{_RANK}_{_SLOT}_model_states\.pt")
_MODEL = re.compile(rf"{_SLOT}_model_states\.pt")
_OTHERS = re.compile(
    r"(?:layer_[0-9]+-.*model_states|(?:layer_[0-9]+_)?expert_[0-9]+_mp_rank_[0-9]+_model_states"
    r"|expp_rank_[0-9]+_mp_rank_[0-9]+_optim_states)\.pt"
)
_PLACEHOLDER_BYTES = 1024


def are_shards(paths: Collection[str]) -> bool:
    """Whether DeepSpeed's shards are among a directory's files."""
    return any_of(paths, _OPTIMIZER, _ALL_RANKS_MODEL, _MODEL, _OTHERS)


def has_deepspeed(candidate: Candidate) -> bool:
    """Whether the directory holds DeepSpeed's shards."""
    return not candidate.is_file and are_shards(candidate.listing)


def check_deepspeed(candidate: Candidate) -> Found:
    """The directory's shards are all there, as far as its own files tell how many there are, and whole."""
    listing = candidate.listing
    states = [path for path in listing if _MODEL.fullmatch(path) or _ALL_RANKS_MODEL.fullmatch(path)]
    whole = check_formats(candidate)
    if not states:
        return marker_elsewhere(candidate, "no model states yet")
    if all(entry.size < _PLACEHOLDER_BYTES for entry in listing.values()):
        raise Unfinished(
            "it holds the empty files that Nebula leaves; Nebula's own storage has the checkpoint"
        )
    facts = torch_dictionary(candidate, min(states))
    replicas, slots = facts.get("dp_world_size"), facts.get("mp_world_size")
    model = _grid(listing, _ALL_RANKS_MODEL) | {(slot, 0) for slot, _ in _grid(listing, _MODEL)}
    optimizer = _grid(listing, _OPTIMIZER)
    height = max([slot + 1 for slot, _ in model | optimizer] + [slots if isinstance(slots, int) else 0])
    width = max([rank + 1 for _, rank in model | optimizer] + [replicas if isinstance(replicas, int) else 0])
    every_rank = any(_ALL_RANKS_MODEL.fullmatch(path) for path in states)
    _check_grid(candidate, model, height, width if every_rank else 1, "model")
    if optimizer:
        _check_grid(candidate, optimizer, height, width, "optimizer")
    elif _is_sharded(facts) and not candidate.node_local:
        raise Unfinished("no optimizer states yet")
    elif "optimizer" in facts and facts["optimizer"] is None:
        whole = False  # its optimizer shards may have yet to begin
    counted = whole and isinstance(replicas, int) and not candidate.node_local
    return Found(
        SETTLE_COUNTED_S if counted else SETTLE_RANKS_S,
        height * width,
        step=stated_step(torch_facts(candidate, min(states))) if step_in(candidate.name) is None else None,
    )


def _is_sharded(facts: Mapping[Any, Any]) -> bool:
    """Whether the configuration in a model-state file is ZeRO's, whose optimizer states are in files of every rank."""
    config = facts.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return isinstance(stage, int) and stage > 0 and facts.get("optimizer") is None


def _grid(listing: Collection[str], pattern: re.Pattern[str]) -> set[tuple[int, int]]:
    """(model-parallel rank, data-parallel rank) of every file that matches; 0 where a name has no data-parallel rank."""
    matches = filter(None, (pattern.fullmatch(path) for path in listing))
    return {(int(match["slot"]), int(match.groupdict().get("rank") or 0)) for match in matches}


def _check_grid(candidate: Candidate, grid: set[tuple[int, int]], slots: int, ranks: int, kind: str) -> None:
    if candidate.node_local:
        return
    for slot in range(slots):
        for rank in range(ranks):
            if (slot, rank) not in grid:
                raise Unfinished(
                    f"no {kind} states yet of data-parallel rank {rank}, model-parallel rank {slot}"
                    f" of {ranks} × {slots}"
                )


def point_latest(name: str, step: Step, paths: Collection[str]) -> Trackers:
    """``latest`` beside the directory names its tag."""
    return {LATEST: name.encode()}


def _claims(candidate: Candidate) -> bool:
    return is_directory_name(candidate.name) and has_deepspeed(candidate)


LAYOUT = Rules("deepspeed", _claims, check_deepspeed, point=point_latest)
