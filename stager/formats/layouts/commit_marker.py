"""Our own marker, which `stager.commit()` and ``stager seal`` leave: the trainer itself says that it has finished."""

from __future__ import annotations

import re
from dataclasses import replace

from stager.formats.commits import COMMIT_MARKER_NAME, CommitMarker, decode_marker
from stager.formats.layouts.api import Candidate, Complete, NotMine, Unfinished, read_whole
from stager.formats.layouts.rules import Found, Rules
from stager.formats.layouts.steps import is_unfinished_file, is_unfinished_name

_MARKER_BYTES_MAX = 16 << 20


def judge_committed(candidate: Candidate) -> Complete | NotMine:
    """What the marker says, the trainer's words included. Raises as `Layout.judge` does."""
    verdict = LAYOUT.judge(candidate)
    return replace(verdict, commit=_marker(candidate)) if isinstance(verdict, Complete) else verdict


def _claims(candidate: Candidate) -> bool:
    named = not candidate.is_file and not is_unfinished_name(candidate.name)
    return named and COMMIT_MARKER_NAME in candidate.listing


def _check(candidate: Candidate) -> Found:
    listing = candidate.listing
    commit = _marker(candidate)
    files = [path for path in listing if not is_unfinished_file(path)]
    committed_ns = listing[COMMIT_MARKER_NAME].mtime_ns
    younger = sorted(path for path in files if listing[path].mtime_ns > committed_ns)
    if younger:
        raise Unfinished(f"`{younger[0]}` is younger than `{COMMIT_MARKER_NAME}`: commit again after saving")
    if len(files) == 1:
        raise Unfinished("it holds nothing but the commit marker")
    return Found(0.0, step=commit.step)


def _marker(candidate: Candidate) -> CommitMarker:
    raw = read_whole(candidate, COMMIT_MARKER_NAME, bytes_max=_MARKER_BYTES_MAX)
    return decode_marker(raw, of=f"{candidate.name}/{COMMIT_MARKER_NAME}")


LAYOUT = Rules("commit", _claims, _check, (re.compile(re.escape(COMMIT_MARKER_NAME)),))
