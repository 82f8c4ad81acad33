"""Lightning: a ``.ckpt`` file, or a directory of that name with FSDP's or DeepSpeed's shards.

Files come by a temporary name and a move, which is a copy in place where the temporary directory is another file system;
so a file counts by its tail, never by an event. ``last.ckpt`` is a copy, or a link, which is passed over. FSDP's
directories get ``meta.pt`` after DCP has finished; DeepSpeed's have the constant tag ``checkpoint`` and follow
DeepSpeed's rule. Sources: lightning 2.6 ``fabric/strategies/fsdp.py``, ``fabric/utilities/cloud_io.py``,
``pytorch/callbacks/model_checkpoint.py``.
"""

from __future__ import annotations

import re

from stager.formats.layouts.api import SETTLE_RANKS_S, SETTLE_SOUND_S, Candidate, below
from stager.formats.layouts.deepspeed import LATEST_PATTERN, check_deepspeed, has_deepspeed
from stager.formats.layouts.nested import check_in
from stager.formats.layouts.rules import Found, Rules, check_formats, check_not_younger, marker_elsewhere
from stager.formats.layouts.steps import is_directory_name, step_in
from stager.formats.layouts.torch_dcp import MARKER, MARKER_PATTERN, check_dcp, has_dcp
from stager.formats.layouts.torch_facts import stated_step, torch_facts
from stager.formats.layouts.torch_file import check_torch_file, is_torch_name

_SUFFIX = ".ckpt"
_META = "meta.pt"
_DEEPSPEED_TAG = "checkpoint"
_VERSION_KEY = "pytorch-lightning_version"


def _claims(candidate: Candidate) -> bool:
    if candidate.is_file:
        return (
            candidate.name.endswith(_SUFFIX)
            and is_torch_name(candidate)
            and _VERSION_KEY in torch_facts(candidate, candidate.name)
        )
    if not is_directory_name(candidate.name.removesuffix(_SUFFIX)):
        return False
    if candidate.name.endswith(_SUFFIX):
        return _META in candidate.listing or has_dcp(candidate) or _has_deepspeed(candidate)
    return _META in candidate.listing and has_dcp(candidate)


def _has_deepspeed(candidate: Candidate) -> bool:
    return has_deepspeed(below(candidate, _DEEPSPEED_TAG))


def _check(candidate: Candidate) -> Found:
    if candidate.is_file:
        found = check_torch_file(candidate)
        # ``epoch=3.ckpt`` tells an epoch; what is inside tells the step.
        return Found(found.settle_s, 1, stated_step(torch_facts(candidate, candidate.name)))
    name = candidate.name.removesuffix(_SUFFIX)
    if _has_deepspeed(candidate):
        found = check_in(candidate, _DEEPSPEED_TAG, check_deepspeed)
        return Found(found.settle_s, found.ranks, step_in(name) or found.step)
    found = check_dcp(candidate)
    if _META not in candidate.listing:
        return marker_elsewhere(candidate, f"no `{_META}` yet")
    check_formats(candidate, [_META])
    if MARKER in candidate.listing:
        check_not_younger(candidate, _META, [MARKER])
    step = stated_step(torch_facts(candidate, _META))
    settle_s = SETTLE_RANKS_S if candidate.node_local else SETTLE_SOUND_S
    return Found(settle_s, found.ranks, step_in(name) if step is None else step, found.files)


LAYOUT = Rules("lightning", _claims, _check, (MARKER_PATTERN, re.compile(re.escape(_META)), LATEST_PATTERN))
