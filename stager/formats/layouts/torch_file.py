"""A single file of `torch.save`. It grows in place, also under its final name, so only its tail says that it is whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from stager.errors import FormatError
from stager.formats.layouts.api import (
    SETTLE_MARKED_S,
    SETTLE_RANKS_S,
    Candidate,
    Complete,
    Corrupt,
    NotMine,
    Verdict,
    Writing,
)
from stager.formats.layouts.steps import is_unfinished_name, step_in
from stager.formats.layouts.structure import Unfinished, check_torch_zip

_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_=+.-]{0,190}?)\.(?:pt|pth|ckpt|pth\.tar)")


class TorchFile:
    """``<name>.pt``, ``.pth``, ``.ckpt`` or ``.pth.tar``."""

    name = "torch_file"

    def judge(self, candidate: Candidate) -> Verdict:
        match = _NAME.fullmatch(candidate.name)
        if not candidate.is_file or match is None or is_unfinished_name(candidate.name):
            return NotMine()
        try:
            checked = check_torch_zip(candidate, candidate.name)
        except Unfinished as reason:
            return Writing(str(reason))
        except FormatError as error:
            return Corrupt(error.message)
        settle_s = SETTLE_MARKED_S if checked else SETTLE_RANKS_S
        return Complete(self.name, step_in(match[1]), (candidate.name,), settle_s)

    def markers(self, paths: Collection[str]) -> tuple[str, ...]:
        return ()

    def trackers(self, checkpoint: str, step: int | None) -> Mapping[str, bytes]:
        return {}
