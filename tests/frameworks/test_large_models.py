"""DeepSpeed, Megatron Core, NVRx: real processes write while the watcher looks on, and read what was restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.watched import run_ranks, watched

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("stage", ["1", "2"])
async def test_deepspeed(tmp_path: Path, stage: str) -> None:
    """ZeRO by two processes, each of which writes its optimizer shard when it comes to it."""
    found = await watched(tmp_path, "deepspeed_save", world=2, arguments=(stage,))
    assert [(m.layout, m.step) for m in found.manifests.values()] == [("deepspeed", 1), ("deepspeed", 2)]
    place = await found.restored("global_step2")
    await run_ranks("deepspeed_resume", place.parent, world=2, arguments=(stage,))


async def test_megatron_core(tmp_path: Path) -> None:
    """`torch_dist` by two processes."""
    found = await watched(tmp_path, "megatron_save", world=2)
    assert [(m.layout, m.step) for m in found.manifests.values()] == [("megatron", 1), ("megatron", 2)]
    await run_ranks("megatron_resume", (await found.restored("iter_0000002")).parent, world=2)


async def test_nvrx(tmp_path: Path) -> None:
    """Local checkpoints of two processes; the manager removes the one before as soon as the next is valid."""
    found = await watched(tmp_path, "nvrx_save", world=2, ranks=2)
    newest = list(found.manifests.values())[-1]
    assert (newest.layout, newest.step) == ("nvrx", 2)
    await found.restored(newest.checkpoint, target=tmp_path / "again" / "session")
    await run_ranks("nvrx_resume", tmp_path / "again", world=2)
