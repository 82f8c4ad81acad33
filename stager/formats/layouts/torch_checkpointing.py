"""torch_checkpointing, and torch's experimental CheckpointWriter: ``checkpoint_<rank>.pt`` of every rank.

torch_checkpointing writes into ``tmp_<id>/`` and role rank 0 renames the directory after a barrier: its own name proves it,
and ``metadata.pkl`` shows that it is one. Without a barrier, and with CheckpointWriter, ranks write in place and nothing is
last. On nodes without role rank 0 the data stays in ``tmp_<id>/``, which is never taken. Sources: torch_checkpointing 0.1
``checkpoint_writer.py``, ``metadata_serialization.py``.
"""

from __future__ import annotations

import re

from stager.formats.layouts.api import SETTLE_MARKED_S, SETTLE_RANKS_S, Candidate, Unfinished
from stager.formats.layouts.rules import (
    Found,
    Rules,
    any_of,
    check_formats,
    count_ranks,
)
from stager.formats.layouts.steps import is_directory_name

MARKER = "metadata.pkl"
_RANK_FILE = re.compile(r"checkpoint_(0|[1-9][0-9]{0,7})\.pt")
_PICKLE_STOP = b"."


def has_rank_files(candidate: Candidate) -> bool:
    """Whether a directory is one of torch_checkpointing, by its metadata or the files of its ranks."""
    return not candidate.is_file and (MARKER in candidate.listing or any_of(candidate.listing, _RANK_FILE))


def check_rank_files(candidate: Candidate) -> Found:
    """The metadata is a whole pickle, and every rank's file is there and whole."""
    listing = candidate.listing
    ranks = {int(match[1]) for path in listing if (match := _RANK_FILE.fullmatch(path))}
    check_formats(candidate)
    count = count_ranks(candidate, ranks, lambda rank: f"checkpoint_{rank}.pt") if ranks else None
    if MARKER not in listing:
        return Found(SETTLE_RANKS_S, count)
    size = listing[MARKER].size
    if size == 0 or candidate.read(MARKER, size - 1, 1) != _PICKLE_STOP:
        raise Unfinished(f"`{MARKER}` is not whole")
    others = [path for path in listing if path != MARKER]
    if not others:
        raise Unfinished(f"it holds nothing but `{MARKER}`")
    if ranks and candidate.ranks is None:
        # Written in place, ranks may be missing at the end of the row; renamed, they may not. Nothing tells which.
        return Found(SETTLE_RANKS_S, count)
    return Found(SETTLE_MARKED_S, count)


def _claims(candidate: Candidate) -> bool:
    return is_directory_name(candidate.name) and has_rank_files(candidate)


LAYOUT = Rules("torch_checkpointing", _claims, check_rank_files, (re.compile(re.escape(MARKER)),))
