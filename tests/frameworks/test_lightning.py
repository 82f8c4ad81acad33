"""Lightning: real training runs while the watcher looks on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.watched import run_ranks, watched

pytestmark = pytest.mark.timeout(300)


async def test_files(tmp_path: Path) -> None:
    """A file a step and `last.ckpt`; training goes on from a restored one."""
    found = await watched(tmp_path, "lightning_save")
    names = ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    assert {*names} <= {*found.manifests}
    assert all(manifest.layout == "lightning" for manifest in found.manifests.values())
    assert [found.manifests[name].step for name in names] == [2, 4]
    await run_ranks("lightning_resume", await found.restored(names[1]) / names[1])


async def test_sharded_directory(tmp_path: Path) -> None:
    """FSDP2 by two processes: DCP's files and `meta.pt`."""
    found = await watched(tmp_path, "lightning_sharded_save", world=2, saved_over=1)
    name = "epoch=0-step=4.ckpt"
    assert (found.manifests[name].layout, found.manifests[name].step) == ("lightning", 4)
    await run_ranks("lightning_sharded_resume", await found.restored(name), world=2)
