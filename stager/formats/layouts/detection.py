"""Which layout a candidate has. Adapters are asked in an order, the surest first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from stager.errors import ConfigError, FormatError
from stager.formats.layouts import (
    accelerate,
    commit_marker,
    composer,
    deepspeed,
    deepspeed_universal,
    dlrover,
    generic,
    hf_trainer,
    lightning,
    megatron,
    megatron_bridge,
    nemo,
    nvrx,
    orbax,
    safetensors,
    torch_checkpointing,
    torch_dcp,
    torch_file,
    torchsnapshot,
    torchtitan,
)
from stager.formats.layouts.api import (
    Candidate,
    Complete,
    Corrupt,
    Layout,
    NotMine,
    Trackers,
    Unfinished,
    Verdict,
    Writing,
    judged,
)

AUTO = "auto"
_COMMIT: Layout = commit_marker.LAYOUT
# Whose directories may hold those of others stands before them, and DLRover before everybody, whose files it writes.
_GUESSED: tuple[Layout, ...] = (
    dlrover.LAYOUT,
    hf_trainer.LAYOUT,
    megatron_bridge.LAYOUT,
    megatron.LAYOUT,
    nemo.LAYOUT,
    lightning.LAYOUT,
    accelerate.LAYOUT,
    deepspeed_universal.LAYOUT,
    deepspeed.LAYOUT,
    orbax.LAYOUT,
    torchsnapshot.LAYOUT,
    composer.LAYOUT,
    torch_dcp.LAYOUT,
    torch_checkpointing.LAYOUT,
    safetensors.LAYOUT,
    nvrx.LAYOUT,
    torch_file.LAYOUT,
)
# torchtitan's directories are recognised by what writes them; what is generic takes anything, so it must be asked for.
_NAMED: tuple[Layout, ...] = (torchtitan.LAYOUT, generic.LAYOUT)
LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in (_COMMIT, *_GUESSED, *_NAMED)}
UNFINISHED_SUFFIX = "-unfinished"


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
    try:
        committed = commit_marker.judge_committed(candidate)
    except Unfinished as reason:
        return Writing(str(reason))
    except FormatError as error:
        return Corrupt(error.message)
    verdict = _first(candidate, layout)
    if not isinstance(verdict, NotMine | Corrupt) and (marker := _unfinished_marker(candidate)):
        return Writing(f"`{marker}` beside it says so")
    if isinstance(committed, NotMine) or isinstance(verdict, Corrupt):
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


def trackers_of(layout: str, name: str, step: int | None, paths: Collection[str]) -> Trackers:
    """Files to write next to a restored checkpoint, by the layout's name in a manifest; an unknown one has none."""
    return LAYOUTS.get(layout, _COMMIT).trackers(name, step, paths)


def _first(candidate: Candidate, layout: str) -> Verdict:
    asked = _GUESSED if layout == AUTO else (LAYOUTS[check_layout_name(layout)],)
    for adapter in asked:
        verdict = judged(adapter, candidate)
        if not isinstance(verdict, NotMine):
            return verdict
    return NotMine()


def _unfinished_marker(candidate: Candidate) -> str | None:
    """NeMo's sibling ``<name>-unfinished``: there while a checkpoint is written, and while it is removed."""
    stems = dict.fromkeys((candidate.name, candidate.name.removesuffix(".ckpt")))
    names = (f"{stem}{UNFINISHED_SUFFIX}" for stem in stems)
    return next((name for name in names if candidate.beside(name) is not None), None)
