"""PyTorch Distributed Checkpoint: ``.metadata`` (or one a rank) and ``__<rank>_<n>.distcp`` files.

With collectives the coordinator renames ``.metadata`` into place after every rank has written and synced. It stays
there when the same directory is saved into again, so it counts only if it is not older than the files that it names; and
files it does not name are left over from another world size. Without collectives (experimental) every rank writes a
``__<rank>.metadata`` of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from stager.errors import FormatError
from stager.formats.layouts.api import (
    SETTLE_RANKS_S,
    SETTLE_SOUND_S,
    Candidate,
    Complete,
    Corrupt,
    Listing,
    NotMine,
    Verdict,
    Writing,
    read_whole,
)
from stager.formats.layouts.dcp_metadata import METADATA_BYTES_MAX, decode_dcp_metadata
from stager.formats.layouts.steps import is_directory_name, is_unfinished_file, step_in

MARKER = ".metadata"
_RANK_MARKER = re.compile(r"__(0|[1-9][0-9]{0,7})\.metadata")
_SHARD = re.compile(r"__(0|[1-9][0-9]{0,7})_(0|[1-9][0-9]{0,7})\.distcp")


class TorchDcp:
    """What `torch.distributed.checkpoint.FileSystemWriter` leaves; torchtitan's ``step-<N>`` too."""

    name = "torch_dcp"

    def judge(self, candidate: Candidate) -> Verdict:
        listing = candidate.listing
        if candidate.is_file or not is_directory_name(candidate.name):
            return NotMine()
        shards = {path for path in listing if _SHARD.fullmatch(path)}
        ranks = {int(match[1]): path for path in listing if (match := _RANK_MARKER.fullmatch(path))}
        if MARKER in listing:
            return self._by_one_marker(candidate, shards, ranks)
        if ranks:
            return self._by_rank_markers(candidate, shards, ranks)
        if shards or f"{MARKER}.tmp" in listing:
            return Writing(f"no `{MARKER}` yet")
        return NotMine()

    def markers(self, paths: Collection[str]) -> tuple[str, ...]:
        ranks = sorted((int(match[1]), path) for path in paths if (match := _RANK_MARKER.fullmatch(path)))
        return (MARKER,) if MARKER in paths else tuple(path for _, path in ranks)

    def trackers(self, checkpoint: str, step: int | None) -> Mapping[str, bytes]:
        return {}

    def _by_one_marker(self, candidate: Candidate, shards: set[str], ranks: dict[int, str]) -> Verdict:
        problem, needed = _check_marker(candidate, MARKER)
        if problem is not None:
            return problem
        files = _without_leftovers(candidate.listing, needed, shards, set(ranks.values()))
        written = {match[1] for path in needed if (match := _SHARD.fullmatch(path))}
        return Complete(
            layout=self.name,
            step=step_in(candidate.name),
            files=files,
            settle_s=SETTLE_SOUND_S,
            markers=self.markers(files),
            ranks=len(written) or None,
        )

    def _by_rank_markers(self, candidate: Candidate, shards: set[str], ranks: dict[int, str]) -> Verdict:
        expected = candidate.ranks or max(ranks) + 1
        missing = [rank for rank in range(expected) if rank not in ranks]
        if missing:
            return Writing(f"no `__{missing[0]}{MARKER}` yet, of {expected} ranks")
        needed: set[str] = set()
        for rank in range(expected):
            problem, named = _check_marker(candidate, ranks[rank])
            if problem is not None:
                return problem
            needed |= named
        markers = tuple(ranks[rank] for rank in range(expected))
        files = _without_leftovers(candidate.listing, needed, shards, set(ranks.values()) - set(markers))
        return Complete(
            layout=self.name,
            step=step_in(candidate.name),
            files=files,
            settle_s=SETTLE_SOUND_S if candidate.ranks else SETTLE_RANKS_S,
            markers=markers,
            ranks=expected,
        )


def _check_marker(candidate: Candidate, marker: str) -> tuple[Writing | Corrupt | None, set[str]]:
    """What is wrong with a metadata file or the files that it names, and their names."""
    listing = candidate.listing
    try:
        metadata = decode_dcp_metadata(
            read_whole(candidate, marker, bytes_max=METADATA_BYTES_MAX), of=f"{candidate.name}/{marker}"
        )
    except FormatError as error:
        return Corrupt(error.message), set()
    for path, least in metadata.shards.items():
        entry = listing.get(path)
        if entry is None:
            return Writing(f"`{marker}` names `{path}`, which is not there"), set()
        if entry.mtime_ns > listing[marker].mtime_ns:
            return Writing(f"`{path}` is younger than `{marker}`, which is from an earlier save"), set()
        if entry.size < least:
            return Corrupt(f"`{path}` has {entry.size} bytes where `{marker}` names {least}"), set()
    return None, set(metadata.shards)


def _without_leftovers(
    listing: Listing, needed: set[str], shards: set[str], stale_markers: set[str]
) -> tuple[str, ...]:
    leftovers = (shards - needed) | stale_markers
    return tuple(sorted(path for path in listing if path not in leftovers and not is_unfinished_file(path)))
