"""NeMo: a directory with ``weights/`` (Megatron Core's) and ``context/``, or one directory a model-parallel rank.

A sibling ``<name>-unfinished`` is touched before anything is written, and while the checkpoint is removed; every layout
heeds it (`stager.formats.layouts.detection`). So here everything that is left to say is that the files are whole. Source:
NeMo ``lightning/pytorch/callbacks/model_checkpoint.py``.
"""

from __future__ import annotations

import re

from stager.formats.layouts.api import SETTLE_MARKED_S, SETTLE_RANKS_S, Candidate, below
from stager.formats.layouts.megatron import MARKERS, check_core
from stager.formats.layouts.nested import check_in
from stager.formats.layouts.rules import Found, Rules, any_of, check_formats
from stager.formats.layouts.steps import is_directory_name, step_in
from stager.formats.layouts.torch_dcp import has_dcp

_WEIGHTS = "weights"
_CONTEXT = re.compile(r"context/.+", re.DOTALL)
_RANK_FILE = re.compile(r"(?:mp_rank|tp_rank)_[0-9]+(?:_pp_rank_[0-9]+)?/.+\.ckpt", re.DOTALL)


def _claims(candidate: Candidate) -> bool:
    if candidate.is_file or not is_directory_name(_stem(candidate)):
        return False
    return has_dcp(below(candidate, _WEIGHTS)) or any_of(candidate.listing, _RANK_FILE)


def _check(candidate: Candidate) -> Found:
    step = step_in(_stem(candidate))
    if not has_dcp(below(candidate, _WEIGHTS)):
        check_formats(candidate)
        return Found(SETTLE_RANKS_S, step=step)
    found = check_in(candidate, _WEIGHTS, check_core)
    # Without it, it may have yet to come, or was not asked for.
    sound = any_of(candidate.listing, _CONTEXT) and not candidate.node_local
    others = [path for path in candidate.listing if not path.startswith(f"{_WEIGHTS}/")]
    files = None if found.files is None else [*found.files, *others]
    return Found(SETTLE_MARKED_S if sound else SETTLE_RANKS_S, found.ranks, step, files)


def _stem(candidate: Candidate) -> str:
    return candidate.name.removesuffix(".ckpt")


LAYOUT = Rules("nemo", _claims, _check, MARKERS)
