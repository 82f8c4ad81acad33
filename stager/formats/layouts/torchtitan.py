"""torchtitan: ``step-<N>``, in the layout of DCP, of DCP with safetensors, or of torch_checkpointing.

Its resume code takes ``.metadata``, ``model.safetensors.index.json`` or ``metadata.pkl`` for complete, and once took
``step-100.backup`` for step 100; here the name must match in full. Without being named in the configuration its
directories are recognised as what they are written with. Source: torchtitan 0.3 ``components/checkpointer/dcp.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from stager.formats.layouts.api import Candidate
from stager.formats.layouts.rules import Found, Rules
from stager.formats.layouts.safetensors import check_safetensors_directory, has_safetensors
from stager.formats.layouts.torch_checkpointing import MARKER, check_rank_files, has_rank_files
from stager.formats.layouts.torch_dcp import MARKER_PATTERN, check_dcp, has_dcp

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_BACKENDS: tuple[tuple[Callable[[Candidate], bool], Callable[[Candidate], Found]], ...] = (
    (has_dcp, check_dcp),
    (has_rank_files, check_rank_files),
    (has_safetensors, check_safetensors_directory),
)


def _claims(candidate: Candidate) -> bool:
    return _NAME.fullmatch(candidate.name) is not None and any(has(candidate) for has, _ in _BACKENDS)


def _check(candidate: Candidate) -> Found:
    check = next(check for has, check in _BACKENDS if has(candidate))
    return check(candidate)


LAYOUT = Rules(
    "torchtitan",
    _claims,
    _check,
    (MARKER_PATTERN, re.compile(re.escape(MARKER)), re.compile(r"[^/]+\.safetensors\.index\.json")),
)
