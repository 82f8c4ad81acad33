"""PyTorch Distributed Checkpoint: ``.metadata`` (or one a rank) and ``__<rank>_<n>.distcp`` files.

With collectives the coordinator renames ``.metadata`` into place after every rank has written and synced. It stays
there when the same directory is saved into again, so it counts only if it is not older than the files that it names; and
files it does not name are left over from another world size. Without collectives (experimental) every rank writes a
``__<rank>.metadata`` of its own. Sources: torch 2.14 ``distributed/checkpoint/filesystem.py``, ``state_dict_saver.py``.
"""

from __future__ import annotations

import re

from stager.errors import FormatError
from stager.formats.layouts.api import SETTLE_RANKS_S, SETTLE_SOUND_S, Candidate, read_whole
from stager.formats.layouts.dcp_metadata import METADATA_BYTES_MAX, decode_dcp_metadata
from stager.formats.layouts.rules import (
    Found,
    Rules,
    any_of,
    check_not_younger,
    check_there,
    count_ranks,
    marker_elsewhere,
)
from stager.formats.layouts.steps import is_directory_name

MARKER = ".metadata"
MARKER_PATTERN = re.compile(r"(?:[^/]+/)*\.metadata", re.DOTALL)
_RANK_MARKER = re.compile(r"__(0|[1-9][0-9]{0,7})\.metadata")
_SHARD = re.compile(r"__(0|[1-9][0-9]{0,7})_(0|[1-9][0-9]{0,7})\.distcp")
_BEGUN = re.compile(r"\.metadata\.tmp")


def has_dcp(candidate: Candidate) -> bool:
    """Whether DCP writes into this directory, whatever else does."""
    return not candidate.is_file and any_of(
        candidate.listing, re.compile(re.escape(MARKER)), _RANK_MARKER, _SHARD, _BEGUN
    )


def check_dcp(candidate: Candidate) -> Found:
    """The directory's DCP part is complete."""
    listing = candidate.listing
    ranks = {int(match[1]): path for path in listing if (match := _RANK_MARKER.fullmatch(path))}
    if MARKER in listing:
        needed = _check_marker(candidate, MARKER)
        written = {match[1] for path in needed if (match := _SHARD.fullmatch(path))}
        files = _without_leftovers(candidate, needed, set(ranks.values()))
        return Found(SETTLE_SOUND_S, len(written) or None, files=files)
    if not ranks:
        return marker_elsewhere(candidate, f"no `{MARKER}` yet")
    count = count_ranks(candidate, ranks, lambda rank: f"__{rank}{MARKER}")
    needed = {
        path for rank in range(count) if rank in ranks for path in _check_marker(candidate, ranks[rank])
    }
    stale = {path for rank, path in ranks.items() if rank >= count}
    settle_s = SETTLE_SOUND_S if candidate.ranks else SETTLE_RANKS_S
    return Found(settle_s, count, files=_without_leftovers(candidate, needed, stale))


def _check_marker(candidate: Candidate, marker: str) -> set[str]:
    """What a metadata file names, once it is there with the bytes that it must have."""
    listing = candidate.listing
    of = f"{candidate.name}/{marker}"
    metadata = decode_dcp_metadata(read_whole(candidate, marker, bytes_max=METADATA_BYTES_MAX), of=of)
    check_there(candidate, metadata.shards, named_by=marker)
    here = {path: least for path, least in metadata.shards.items() if path in listing}
    check_not_younger(candidate, marker, here)
    for path, least in here.items():
        if listing[path].size < least:
            raise FormatError(
                f"`{path}` has {listing[path].size} bytes where `{marker}` names {least}", subject=path
            )
    return set(here)


def _without_leftovers(candidate: Candidate, needed: set[str], stale_markers: set[str]) -> list[str]:
    shards = {path for path in candidate.listing if _SHARD.fullmatch(path)}
    leftovers = (shards - needed) | stale_markers
    return [path for path in candidate.listing if path not in leftovers]


def _claims(candidate: Candidate) -> bool:
    return is_directory_name(candidate.name) and has_dcp(candidate)


LAYOUT = Rules(
    "torch_dcp", _claims, check_dcp, (re.compile(r"__[0-9]+\.metadata"), re.compile(r"\.metadata"))
)
