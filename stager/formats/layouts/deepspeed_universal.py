"""DeepSpeed universal: ``<step>_universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt``, made by one converter.

Its working files lie in ``tmp/`` inside until near the end; the very last thing is ``latest_universal`` beside the
directory. Source: DeepSpeed 0.19 ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from stager.formats.layouts.api import SETTLE_MARKED_S, SETTLE_RANKS_S, Candidate, Trackers, Unfinished
from stager.formats.layouts.rules import Found, Rules, Step, any_of, check_formats, tracked_name
from stager.formats.layouts.steps import is_directory_name

_LATEST = "latest_universal"
_FRAGMENT = re.compile(r"(?:tmp|zero)/.+", re.DOTALL)
_PARAMETER = re.compile(r"(zero/[^/]+)/[^/]+\.pt", re.DOTALL)
_WORKING = "tmp/"


def _claims(candidate: Candidate) -> bool:
    return (
        not candidate.is_file
        and is_directory_name(candidate.name)
        and ("universal" in candidate.name or candidate.beside(_LATEST) is not None)
        and any_of(candidate.listing, _FRAGMENT)
    )


def _check(candidate: Candidate) -> Found:
    working = next((path for path in candidate.listing if path.startswith(_WORKING)), None)
    if working is not None:
        raise Unfinished(f"`{working}` is a working file of the converter")
    parameters = {match[1] for path in candidate.listing if (match := _PARAMETER.fullmatch(path))}
    for parameter in sorted(parameters):
        if f"{parameter}/fp32.pt" not in candidate.listing:
            raise Unfinished(f"no `{parameter}/fp32.pt` yet")
    whole = check_formats(candidate)
    # Written over by the next conversion, so another name there says nothing of this directory.
    named = tracked_name(candidate, _LATEST) == candidate.name
    return Found(SETTLE_MARKED_S if whole and named else SETTLE_RANKS_S)


def _point(name: str, step: Step, paths: Collection[str]) -> Trackers:
    return {_LATEST: name.encode()}


LAYOUT = Rules("deepspeed_universal", _claims, _check, point=_point)
