"""NVRx local checkpoints: ``<session>/<rank>/iter_<0000100>_<rank>_local.pt``, one rank's file renamed from ``.dirty.pt``.

A session keeps the newest iteration only, and removes the one before as soon as every rank is covered. So the session's
directory is the candidate, and its newest iteration that every rank of this node has is the checkpoint; files of other
iterations are not part of it. A rank's directory may hold replicas of other ranks, which travel with it. Source: NVRx
``checkpointing/local/ckpt_managers/local_manager.py``.
"""

from __future__ import annotations

import re

from stager.formats.layouts.api import SETTLE_MARKED_S, Candidate, Unfinished
from stager.formats.layouts.rules import Found, Rules, any_of, check_formats
from stager.formats.layouts.steps import is_directory_name

_FILE = re.compile(
    r"(?P<home>0|[1-9][0-9]{0,7})/iter_(?P<iteration>[0-9]{7,18})_(?P<rank>0|[1-9][0-9]{0,7})_local\.pt"
)
_DIRTY = re.compile(r"[0-9]{1,8}/iter_[0-9]{7,18}_[0-9]{1,8}_local\.dirty\.pt")


def _claims(candidate: Candidate) -> bool:
    return (
        not candidate.is_file
        and is_directory_name(candidate.name)
        and any_of(candidate.listing, _FILE, _DIRTY)
    )


def _check(candidate: Candidate) -> Found:
    files = [(path, match) for path in candidate.listing if (match := _FILE.fullmatch(path))]
    homes = {
        path.split("/", 1)[0] for path in candidate.listing if _FILE.fullmatch(path) or _DIRTY.fullmatch(path)
    }
    for iteration in sorted({int(match["iteration"]) for _, match in files}, reverse=True):
        own = {
            match["home"]
            for _, match in files
            if int(match["iteration"]) == iteration and match["home"] == match["rank"]
        }
        if own == homes and len(own) >= (0 if candidate.node_local else candidate.ranks or 0):
            chosen = [path for path, match in files if int(match["iteration"]) == iteration]
            check_formats(candidate, chosen)
            return Found(SETTLE_MARKED_S, len(own), iteration, chosen)
    raise Unfinished("no iteration that every rank of this node has finished")


LAYOUT = Rules("nvrx", _claims, _check)
