"""Composer: ``ep<epoch>-ba<batch>-rank<r>.pt``, or a directory ``ep<epoch>-ba<batch>`` of DCP.

Written in place. A link ``latest-rank<r>.pt`` follows, removed and made again, and is passed over; the file's own tail
and DCP's own rule are what is believed. The step is the batch. Composer finds a checkpoint by the name that it is given
or by its link, so there is no tracker to write. Source: Composer ``callbacks/checkpoint_saver.py``,
``utils/checkpoint.py``.
"""

from __future__ import annotations

import re

from stager.formats.layouts.api import Candidate
from stager.formats.layouts.rules import Found, Rules
from stager.formats.layouts.torch_dcp import MARKER_PATTERN, check_dcp, has_dcp
from stager.formats.layouts.torch_file import check_torch_file

_FILE = re.compile(r"ep[0-9]{1,9}-ba(?P<batch>[0-9]{1,18})-rank[0-9]{1,8}\.pt")
_DIRECTORY = re.compile(r"ep[0-9]{1,9}-ba(?P<batch>[0-9]{1,18})")


def _claims(candidate: Candidate) -> bool:
    if candidate.is_file:
        return _FILE.fullmatch(candidate.name) is not None
    return _DIRECTORY.fullmatch(candidate.name) is not None and has_dcp(candidate)


def _check(candidate: Candidate) -> Found:
    match = (_FILE if candidate.is_file else _DIRECTORY).fullmatch(candidate.name)
    found = check_torch_file(candidate) if candidate.is_file else check_dcp(candidate)
    return Found(found.settle_s, found.ranks, int(match["batch"]) if match else None, found.files)


LAYOUT = Rules("composer", _claims, _check, (MARKER_PATTERN,))
