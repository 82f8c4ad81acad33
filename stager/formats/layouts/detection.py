"""Which layout a candidate has. Adapters are asked in an order, the surest first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from stager.errors import ConfigError
from stager.formats.layouts.api import Candidate, Complete, Corrupt, Layout, NotMine, Verdict
from stager.formats.layouts.commit_marker import CommitMarked
from stager.formats.layouts.hf_trainer import HuggingFaceTrainer
from stager.formats.layouts.torch_dcp import TorchDcp
from stager.formats.layouts.torch_file import TorchFile

AUTO = "auto"
_COMMIT = CommitMarked()
# Trainer before DCP: its directories may hold DCP's, and never the other way round.
_BY_FRAMEWORK: tuple[Layout, ...] = (HuggingFaceTrainer(), TorchDcp(), TorchFile())
LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in (_COMMIT, *_BY_FRAMEWORK)}


def check_layout_name(name: str) -> str:
    """``name`` if the configuration may ask for it; ConfigError otherwise."""
    if name != AUTO and name not in LAYOUTS:
        raise ConfigError(
            f"layout `{name}` is not known",
            subject="layout",
            hint=f"use `{AUTO}` or one of {', '.join(sorted(LAYOUTS))}",
        )
    return name


def judge(candidate: Candidate, *, layout: str = AUTO) -> Verdict:
    """What ``candidate`` is, by the named layout, or by the first that knows it.

    The trainer's own commit marker is believed before any framework's rules; they then only add what they know (step,
    markers, leftovers), and veto what is damaged.

    Raises:
        FileNotFoundError: A file of the listing has gone meanwhile.
    """
    committed = _COMMIT.judge(candidate)
    verdict = _first(candidate, layout)
    if not isinstance(committed, Complete):
        return verdict if isinstance(committed, NotMine) else committed
    if isinstance(verdict, Corrupt):
        return verdict
    if not isinstance(verdict, Complete):
        return committed
    return replace(
        committed,
        layout=verdict.layout,
        step=verdict.step if committed.commit is None or committed.commit.step is None else committed.step,
        files=tuple(sorted({*verdict.files, *committed.markers})),
        markers=(*verdict.markers, *committed.markers),
        ranks=verdict.ranks,
    )


def markers_of(layout: str, paths: Collection[str]) -> tuple[str, ...]:
    """Files of a checkpoint to write last, in order, by the layout's name in a manifest; an unknown one has only ours."""
    adapter = LAYOUTS.get(layout, _COMMIT)
    return tuple(dict.fromkeys((*adapter.markers(paths), *_COMMIT.markers(paths))))


def _first(candidate: Candidate, layout: str) -> Verdict:
    asked = _BY_FRAMEWORK if layout == AUTO else (LAYOUTS[check_layout_name(layout)],)
    for adapter in asked:
        verdict = adapter.judge(candidate)
        if not isinstance(verdict, NotMine):
            return verdict
    return NotMine()
