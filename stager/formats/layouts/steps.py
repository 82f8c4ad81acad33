"""Names of checkpoints: what may be one, what is still being written, and the step in it. All are full matches."""

from __future__ import annotations

import re

STEP_MAX = 1 << 62

# Dots stand only before digits (`loss=0.25`), so that `step-100.backup` and `step-100.r2` are no trainer's names.
_DIRECTORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_=+-]*(?:\.[0-9]+[A-Za-z0-9_=+-]*)*")
_UNFINISHED = re.compile(
    r"(?:\..*|tmp[-_].*|.*-unfinished|.*[-_]tmp|.*\.(?:tmp|temp|part|partial|incomplete|dirty|orbax-checkpoint-tmp.*))",
    re.DOTALL,
)
_UNFINISHED_FILE = re.compile(
    r"(?:.*/)?(?:[^/]*\.(?:tmp|temp|part|partial|incomplete)|[^/]*\.dirty\.pt)", re.DOTALL
)
_NAMED_STEP = re.compile(
    r"(?:.*[^A-Za-z0-9])?(?:global_?)?step[-_=]?([0-9]{1,18})(?:[^0-9].*)?", re.IGNORECASE
)
_TRAILING_STEP = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})")


def is_directory_name(name: str) -> bool:
    """Whether a trainer may have named a checkpoint directory so."""
    return len(name) <= 200 and _DIRECTORY.fullmatch(name) is not None and not is_unfinished_name(name)


def is_unfinished_name(name: str) -> bool:
    """Whether the name says that its content is not complete: ``tmp-*``, ``*.partial``, ``*-tmp``, ``*-unfinished``, hidden."""
    return _UNFINISHED.fullmatch(name) is not None


def is_unfinished_file(path: str) -> bool:
    """Whether a file inside a checkpoint is one that its writer will rename."""
    return _UNFINISHED_FILE.fullmatch(path) is not None


def step_in(name: str) -> int | None:
    """The step that a name tells: the number after ``step``, else the number it ends in, else None."""
    match = _NAMED_STEP.fullmatch(name) or _TRAILING_STEP.fullmatch(name)
    return int(match[1]) if match else None
