"""Directories of one framework inside a checkpoint of another: FSDP's (DCP) and DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stager.errors import FormatError
from stager.formats.layouts.api import SETTLE_RANKS_S, Candidate, Unfinished, below
from stager.formats.layouts.deepspeed import check_deepspeed, has_deepspeed
from stager.formats.layouts.rules import Found
from stager.formats.layouts.torch_dcp import check_dcp, has_dcp


def folders(paths: Iterable[str]) -> list[str]:
    """First folders of paths, sorted."""
    return sorted({path.split("/", 1)[0] for path in paths if "/" in path})


def check_in(candidate: Candidate, folder: str, check: Callable[[Candidate], Found]) -> Found:
    """The check of a nested directory; what it lacks names the directory. Paths it finds are those of ``candidate``."""
    try:
        found = check(below(candidate, folder))
    except Unfinished as reason:
        raise Unfinished(f"`{folder}`: {reason}") from None
    except FormatError as error:
        raise FormatError(f"`{folder}`: {error.message}", subject=folder) from None
    files = None if found.files is None else [f"{folder}/{path}" for path in found.files]
    return Found(found.settle_s, found.ranks, found.step, files)


@dataclass(frozen=True, slots=True)
class Nested:
    """First-level directories of DCP and DeepSpeed.

    Attributes:
        sound: Whether none of them may have ranks that still write.
        paths: What belongs to them.
        leftovers: What does not: shards of another world size.
        of_deepspeed: Those of DeepSpeed.
    """

    sound: bool
    paths: frozenset[str]
    leftovers: frozenset[str]
    of_deepspeed: tuple[str, ...]


def check_nested_states(candidate: Candidate) -> Nested:
    """Every first-level directory of DCP or DeepSpeed is complete."""
    sound, paths, leftovers, of_deepspeed = True, set[str](), set[str](), []
    for folder in folders(candidate.listing):
        for has, check in ((has_dcp, check_dcp), (has_deepspeed, check_deepspeed)):
            if has(below(candidate, folder)):
                found = check_in(candidate, folder, check)
                sound = found.settle_s < SETTLE_RANKS_S and sound
                there = {path for path in candidate.listing if path.startswith(f"{folder}/")}
                belonging = there if found.files is None else set(found.files)
                paths |= belonging
                leftovers |= there - belonging
                if check is check_deepspeed:
                    of_deepspeed.append(folder)
    return Nested(sound, frozenset(paths), frozenset(leftovers), tuple(of_deepspeed))
