"""Anything that is quiet for long: the layout to name in the configuration where no other fits.

Files with a format that states its length must be whole, and no such file may be empty; of all others nothing is known.
It is never guessed: without being named it takes nothing. `stager.commit()` or ``stager seal`` is the better way.
"""

from __future__ import annotations

from stager.formats.layouts.api import SETTLE_UNKNOWN_S, Candidate, Unfinished
from stager.formats.layouts.rules import Found, Rules, check_formats
from stager.formats.layouts.steps import is_unfinished_file, is_unfinished_name
from stager.formats.layouts.torch_dcp import MARKER_PATTERN, check_dcp, has_dcp


def _claims(candidate: Candidate) -> bool:
    return bool(candidate.listing) and not is_unfinished_name(candidate.name)


def _check(candidate: Candidate) -> Found:
    growing = next((path for path in candidate.listing if is_unfinished_file(path)), None)
    if growing is not None:
        raise Unfinished(f"`{growing}` is there")
    if not any(entry.size for entry in candidate.listing.values()):
        raise Unfinished("all its files are empty")
    check_formats(candidate)
    files = check_dcp(candidate).files if has_dcp(candidate) else None
    return Found(SETTLE_UNKNOWN_S, files=files)


LAYOUT = Rules("generic", _claims, _check, (MARKER_PATTERN,))
