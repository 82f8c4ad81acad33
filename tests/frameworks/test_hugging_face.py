"""Hugging Face's Trainer and Accelerate: real training runs while the watcher looks on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.watched import run_ranks, watched

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("world", [1, 2])
async def test_trainer(tmp_path: Path, world: int) -> None:
    """Saved at steps 2 and 4; the Trainer finds step 4 in the restored directory and trains on."""
    found = await watched(tmp_path, "transformers_save", world=world, ranks=world)
    assert [(m.layout, m.step) for m in found.manifests.values()] == [("hf_trainer", 2), ("hf_trainer", 4)]
    place = await found.restored("checkpoint-4", target=tmp_path / "again" / "checkpoint-4")
    await run_ranks("transformers_resume", place.parent, world=world)


async def test_accelerate(tmp_path: Path) -> None:
    """`save_state` of two processes, in turn; `load_state` from the restored directory."""
    found = await watched(tmp_path, "accelerate_save", world=2, ranks=2, below="checkpoints")
    assert [(m.layout, m.checkpoint) for m in found.manifests.values()] == [
        ("accelerate", "checkpoint_0"),
        ("accelerate", "checkpoint_1"),
    ]
    await run_ranks("accelerate_resume", await found.restored("checkpoint_1"), world=2)
