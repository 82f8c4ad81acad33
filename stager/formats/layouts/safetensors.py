"""safetensors: a single file, or a directory with shards and ``model.safetensors.index.json``.

Written by DCP's `HuggingFaceStorageWriter` (``shard-<rank>-model-...`` by every rank, consolidated by one, with
``sharded/`` below the consolidated files), by `save_pretrained`, and by hand. Nothing is renamed: the index is written in
place, last, and saving without consolidation leaves no marker at all. Every file states its own length. Sources: torch
2.14 ``distributed/checkpoint/hf_storage.py``, ``_hf_utils.py``.
"""

from __future__ import annotations

import re

from stager.formats.layouts.api import (
    SETTLE_COUNTED_S,
    SETTLE_MARKED_S,
    SETTLE_RANKS_S,
    Candidate,
    Unfinished,
)
from stager.formats.layouts.rules import Found, Rules, any_of, check_formats, check_not_younger, count_ranks
from stager.formats.layouts.steps import is_directory_name, is_unfinished_name, step_in

_SUFFIX = ".safetensors"
_UNCONSOLIDATED = "sharded/"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_=+.-]{0,190}\.safetensors")
_SHARD = re.compile(r"(?:sharded/)?[^/]+\.safetensors")
_OF_RANK = re.compile(r"(?:sharded/)?shard-([0-9]{1,8})-.*\.safetensors")
_PIECE = re.compile(r"(.*-)([0-9]{5,8})-of-([0-9]{5,8})(\.safetensors|\.bin)")
_INDEX = re.compile(r"[^/]+\.safetensors\.index\.json")


def has_safetensors(candidate: Candidate) -> bool:
    """Whether a directory holds such files, at its top or in ``sharded/``."""
    return not candidate.is_file and any_of(candidate.listing, _SHARD)


def check_safetensors_directory(candidate: Candidate) -> Found:
    """Every file is whole, and so are the sets that an index or the files' own names tell of."""
    check_formats(candidate)
    ranks = {int(match[1]) for path in candidate.listing if (match := _OF_RANK.fullmatch(path))}
    count = _count(candidate, ranks)
    index = next((path for path in sorted(candidate.listing) if _INDEX.fullmatch(path)), None)
    if index is not None:
        check_not_younger(candidate, index, [path for path in candidate.listing if _SHARD.fullmatch(path)])
        return Found(SETTLE_COUNTED_S, count)
    if any(path.startswith(_UNCONSOLIDATED) for path in candidate.listing):
        raise Unfinished(f"`{_UNCONSOLIDATED}` is there, and no index of the consolidated files yet")
    check_pieces(candidate)
    return Found(SETTLE_RANKS_S, count)


def check_pieces(candidate: Candidate) -> None:
    """``model-00001-of-00003`` demands two more."""
    if candidate.node_local:
        return
    for path in candidate.listing:
        match = _PIECE.fullmatch(path)
        if match is None or _OF_RANK.fullmatch(path):
            continue
        for number in range(1, int(match[3]) + 1):
            piece = f"{match[1]}{number:0{len(match[2])}d}-of-{match[3]}{match[4]}"
            if piece not in candidate.listing:
                raise Unfinished(f"no `{piece}` yet")


def _count(candidate: Candidate, ranks: set[int]) -> int | None:
    if not ranks:
        return None
    first = min(ranks)  # DCP counts ranks from 1 in some versions
    count = count_ranks(
        candidate, {rank - first for rank in ranks}, lambda rank: f"shard-{rank + first:05d}-…"
    )
    return count


def _claims(candidate: Candidate) -> bool:
    if candidate.is_file:
        return _FILE.fullmatch(candidate.name) is not None and not is_unfinished_name(candidate.name)
    return is_directory_name(candidate.name) and has_safetensors(candidate)


def _check(candidate: Candidate) -> Found:
    if not candidate.is_file:
        return check_safetensors_directory(candidate)
    check_formats(candidate)
    return Found(SETTLE_MARKED_S, step=step_in(candidate.name.removesuffix(_SUFFIX)))


LAYOUT = Rules("safetensors", _claims, _check, (_INDEX,))
