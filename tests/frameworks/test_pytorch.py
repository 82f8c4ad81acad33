"""PyTorch's own checkpoints: written by real training runs of two processes while the watcher looks on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.watched import run_ranks, watched

pytestmark = pytest.mark.timeout(300)


async def test_dcp(tmp_path: Path) -> None:
    """FSDP2 with `save` and `async_save`, rotated by the trainer: each is committed, and two of them are trained on."""
    found = await watched(tmp_path, "dcp_save", world=2)
    assert list(found.manifests) == [f"step-{step}" for step in range(1, 7)]
    assert {manifest.layout for manifest in found.manifests.values()} == {"torch_dcp"}
    for step in ("2", "5"):
        await run_ranks("dcp_resume", await found.restored(f"step-{step}"), world=2, arguments=(step,))


async def test_torchtitan(tmp_path: Path) -> None:
    """torchtitan's manager over FSDP2, in the background, which purges by itself and resumes by itself."""
    found = await watched(tmp_path, "torchtitan_save", world=2, below="checkpoint")
    assert [(m.layout, m.step) for m in found.manifests.values()] == [
        ("torch_dcp", step) for step in range(1, 5)
    ]
    await found.restored("step-4", target=tmp_path / "again" / "checkpoint" / "step-4")
    await run_ranks("torchtitan_resume", tmp_path / "again", world=2)
