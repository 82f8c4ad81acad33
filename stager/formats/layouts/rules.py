"""The vocabulary of layouts: an adapter is a `Rules` value, put together from the checks below.

A check says what lacks by raising Unfinished, and what can never become right by raising FormatError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stager.errors import FormatError
from stager.formats.layouts.api import (
    SETTLE_RANKS_S,
    Candidate,
    Complete,
    NotMine,
    Trackers,
    Unfinished,
    read_whole,
)
from stager.formats.layouts.steps import is_unfinished_file, step_in
from stager.formats.layouts.structure import check_safetensors, check_torch_zip

JSON_BYTES_MAX = 256 << 20
_TORCH_FILE = re.compile(
    r".*\.(?:pt|pth|ckpt)"
    r"|(?:.*/)?(?:pytorch_model|adapter_model|optimizer|scheduler|sampler|training_args|dl_state_dict)[^/]*\.bin",
    re.DOTALL,
)
_INDEX = re.compile(r".*\.index\.json", re.DOTALL)
_NUMBER = re.compile(rb"\s*([0-9]{1,18})\s*")

Step = int | None


@dataclass(frozen=True, slots=True)
class Found:
    """What a layout's check found in a checkpoint that is complete.

    Attributes:
        settle_s: Seconds without a change before it is believed.
        ranks: How many ranks wrote it, where the files tell.
        step: Training step, where it is not the one in the name.
        files: What belongs to it, where that is not every file but unfinished ones.
    """

    settle_s: float
    ranks: int | None = None
    step: Step = None
    files: Iterable[str] | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """A layout as data.

    Attributes:
        name: As in the configuration and in manifests.
        claims: Whether a candidate is of this layout, by its name and the names of its files.
        check: What it holds, once it is complete.
        marker_patterns: Files that say "complete" to the framework, in the order to make them visible in.
        point: Trackers to write next to a checkpoint of a given name, step and files.
    """

    name: str
    claims: Callable[[Candidate], bool]
    check: Callable[[Candidate], Found]
    marker_patterns: tuple[re.Pattern[str], ...] = ()
    point: Callable[[str, Step, Collection[str]], Trackers] = lambda name, step, paths: {}

    def judge(self, candidate: Candidate) -> Complete | NotMine:
        if not self.claims(candidate):
            return NotMine()
        found = self.check(candidate)
        files = candidate.listing if found.files is None else found.files
        files = tuple(sorted(path for path in files if not is_unfinished_file(path)))
        return Complete(
            layout=self.name,
            step=step_in(candidate.name) if found.step is None else found.step,
            files=files,
            settle_s=found.settle_s,
            markers=self.markers(files),
            ranks=found.ranks,
        )

    def markers(self, paths: Collection[str]) -> tuple[str, ...]:
        return tuple(
            path for pattern in self.marker_patterns for path in sorted(paths) if pattern.fullmatch(path)
        )

    def trackers(self, name: str, step: int | None, paths: Collection[str]) -> Trackers:
        return self.point(name, step, paths)


def any_of(paths: Iterable[str], *patterns: re.Pattern[str]) -> bool:
    """Whether any path matches any of the patterns in full."""
    return any(pattern.fullmatch(path) for path in paths for pattern in patterns)


def check_formats(candidate: Candidate, paths: Iterable[str] | None = None) -> bool:
    """Every file that has a format of its own accounts for its bytes, and every index names what is there.

    Args:
        candidate: Whose files.
        paths: Which of them; all by default.

    Returns:
        False if some have a format whose end cannot be told.
    """
    whole = True
    for path in sorted(candidate.listing if paths is None else paths):
        if is_unfinished_file(path):
            continue
        if path.endswith(".safetensors"):
            check_safetensors(candidate, path)
        elif _INDEX.fullmatch(path):
            _check_index(candidate, path)
        elif _TORCH_FILE.fullmatch(path):
            whole = check_torch_zip(candidate, path) and whole
    return whole


def check_not_younger(candidate: Candidate, marker: str, paths: Iterable[str]) -> None:
    """A marker counts only if it is not older than what it covers: it survives when the directory is saved into again."""
    stated_ns = candidate.listing[marker].mtime_ns
    for path in paths:
        if candidate.listing[path].mtime_ns > stated_ns:
            raise Unfinished(f"`{path}` is younger than `{marker}`, which is from an earlier save")


def check_there(candidate: Candidate, paths: Iterable[str], *, named_by: str) -> None:
    """Everything that a manifest names is there, unless it may lie on other nodes."""
    if candidate.node_local:
        return
    for path in sorted(paths):
        if path not in candidate.listing:
            raise Unfinished(f"`{named_by}` names `{path}`, which is not there")


def count_ranks(
    candidate: Candidate, found: Collection[int], name: Callable[[int], str], *, expected: int | None = None
) -> int:
    """How many ranks there are, once the files of ranks 0 to the last are there.

    Args:
        candidate: Its ``ranks`` are demanded where known, and so are ``expected``.
        found: Ranks whose files are there; not empty.
        name: What the file of a rank is called, for the message.
        expected: How many the checkpoint itself tells of.
    """
    if candidate.node_local:
        return max(found) + 1
    wanted = max(max(found) + 1, expected or 0) if candidate.ranks is None else candidate.ranks
    missing = next((rank for rank in range(wanted) if rank not in found), None)
    if missing is not None:
        raise Unfinished(f"no `{name(missing)}` yet, of {wanted} ranks")
    return wanted


def marker_elsewhere(candidate: Candidate, reason: str) -> Found:
    """No marker is here: unfinished; on a node-local disk complete, as far as this node goes, if quiet for long."""
    if not candidate.node_local:
        raise Unfinished(reason)
    return Found(SETTLE_RANKS_S)


def read_json(candidate: Candidate, path: str) -> Mapping[str, Any]:
    """An object that is written in place: a piece of it is a file that is still being written."""
    try:
        found = json.loads(read_whole(candidate, path, bytes_max=JSON_BYTES_MAX))
    except (ValueError, RecursionError):
        raise Unfinished(f"`{path}` is not whole") from None
    if not isinstance(found, dict):
        raise FormatError(f"`{path}` is no JSON object", subject=path)
    return found


def tracked_step(candidate: Candidate, tracker: str) -> int | None:
    """The number in a tracker next to the candidate; None if there is no such file or no number in it."""
    raw = candidate.beside(tracker)
    match = None if raw is None else _NUMBER.fullmatch(raw)
    return None if match is None else int(match[1])


def tracked_name(candidate: Candidate, tracker: str) -> str | None:
    """The name in a tracker next to the candidate; None if there is no such file."""
    raw = candidate.beside(tracker)
    return None if raw is None else raw.decode("utf-8", "replace").strip()


def _check_index(candidate: Candidate, path: str) -> None:
    named = read_json(candidate, path).get("weight_map")
    folder = path[: path.rfind("/") + 1]
    if not isinstance(named, dict):
        raise FormatError(f"`{path}` has no `weight_map`", subject=path)
    check_there(candidate, {f"{folder}{name}" for name in named.values()}, named_by=path)
