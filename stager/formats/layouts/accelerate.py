"""Accelerate's `save_state`: ``checkpoint_<i>`` or a name of the user's, written in place, without any marker.

The main process writes model, optimizer, scheduler and samplers; every rank its ``random_states_<rank>.pkl``,
unsynchronised, and custom objects come last. Models may be nested directories of FSDP (DCP) or DeepSpeed. Source:
accelerate 1.15 ``accelerator.py`` (`save_state`), ``checkpointing.py``.
"""

from __future__ import annotations

import re

from stager.formats.layouts.api import SETTLE_COUNTED_S, SETTLE_RANKS_S, Candidate
from stager.formats.layouts.deepspeed import LATEST_PATTERN
from stager.formats.layouts.nested import check_nested_states
from stager.formats.layouts.rules import Found, Rules, any_of, check_formats, count_ranks, marker_elsewhere
from stager.formats.layouts.safetensors import check_pieces
from stager.formats.layouts.steps import is_directory_name
from stager.formats.layouts.structure import check_torch_zip
from stager.formats.layouts.torch_dcp import MARKER_PATTERN

_NAME = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")
_RANDOM = re.compile(r"random_states_(0|[1-9][0-9]{0,7})\.pkl")
_CUSTOM = re.compile(r"custom_checkpoint_[0-9]{1,8}\.pkl")
_BEGUN = re.compile(
    r"(?:model|pytorch_model)(?:_[0-9]+)?(?:-[0-9]+-of-[0-9]+)?\.(?:safetensors|bin)"
    r"|(?:optimizer|scheduler|sampler|dl_state_dict)(?:_[0-9]+)?\.bin|scaler\.pt"
    r"|(?:pytorch_model_fsdp|optimizer|pytorch_model)(?:_[0-9]+)?/.+",
    re.DOTALL,
)


def _claims(candidate: Candidate) -> bool:
    if candidate.is_file or not is_directory_name(candidate.name):
        return False
    if any_of(candidate.listing, _RANDOM):
        return True
    return _NAME.fullmatch(candidate.name) is not None and any_of(candidate.listing, _BEGUN)


def _check(candidate: Candidate) -> Found:
    check_formats(candidate)
    for path in candidate.listing:
        if _CUSTOM.fullmatch(path) or _RANDOM.fullmatch(path):
            check_torch_zip(candidate, path)
    check_pieces(candidate)
    leftovers = check_nested_states(candidate).leftovers
    ranks = {int(match[1]) for path in candidate.listing if (match := _RANDOM.fullmatch(path))}
    if not ranks:
        return marker_elsewhere(candidate, "no `random_states_0.pkl` yet")
    count = count_ranks(candidate, ranks, lambda rank: f"random_states_{rank}.pkl")
    known = (count == 1 or candidate.ranks is not None) and not candidate.node_local
    files = candidate.listing.keys() - leftovers
    return Found(SETTLE_COUNTED_S if known else SETTLE_RANKS_S, count, files=files)


LAYOUT = Rules("accelerate", _claims, _check, (MARKER_PATTERN, LATEST_PATTERN))
