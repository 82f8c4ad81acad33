"""A single file of `torch.save`. It grows in place, also under its final name, so only its tail says that it is whole."""

from __future__ import annotations

import re

from stager.formats.layouts.api import SETTLE_MARKED_S, SETTLE_RANKS_S, Candidate
from stager.formats.layouts.rules import Found, Rules
from stager.formats.layouts.steps import is_unfinished_name, step_in
from stager.formats.layouts.structure import check_torch_zip
from stager.formats.layouts.torch_facts import stated_step, torch_facts

_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_=+.-]{0,190}?)\.(?:pt|pth|ckpt|pth\.tar)")
# A tracker of Megatron-Bridge, which is a file of torch.save like any other.
_TRACKER = "latest_train_state.pt"


def is_torch_name(candidate: Candidate) -> bool:
    """Whether a file is named ``<name>.pt``, ``.pth``, ``.ckpt`` or ``.pth.tar``."""
    name = candidate.name
    return candidate.is_file and _NAME.fullmatch(name) is not None and not is_unfinished_name(name)


def check_torch_file(candidate: Candidate) -> Found:
    """The file is whole. Its step is the one in its name; failing that, the one inside."""
    match = _NAME.fullmatch(candidate.name)
    step = step_in(match[1]) if match else None
    whole = check_torch_zip(candidate, candidate.name)
    if step is None:
        step = stated_step(torch_facts(candidate, candidate.name))
    return Found(SETTLE_MARKED_S if whole else SETTLE_RANKS_S, step=step)


def _claims(candidate: Candidate) -> bool:
    return is_torch_name(candidate) and candidate.name != _TRACKER


LAYOUT = Rules("torch_file", _claims, check_torch_file)
