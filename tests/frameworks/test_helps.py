"""What `stager.trainers` offers, inside real training runs: nothing has to settle, and the trainer's words arrive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.process import DaemonProcess, daemon
from tests.frameworks.watched import run_ranks, watched

pytestmark = pytest.mark.timeout(300)


async def test_hugging_face(tmp_path: Path) -> None:
    """Two ranks, whose number nobody was told, which otherwise takes a minute of quiet; the step's loss is kept."""
    found = await watched(tmp_path, "transformers_commit", world=2)
    manifests = list(found.manifests.values())
    assert [(m.layout, m.step) for m in manifests] == [("hf_trainer", 2), ("hf_trainer", 4)]
    assert all({"loss", "learning_rate"} <= m.metrics.keys() for m in manifests)
    place = await found.restored("checkpoint-4", target=tmp_path / "again" / "checkpoint-4")
    await run_ranks("transformers_resume", place.parent, world=2)


async def test_lightning_directories(tmp_path: Path) -> None:
    """Step and metrics of a sharded checkpoint."""
    found = await watched(tmp_path, "lightning_commit", world=2, saved_over=1)
    committed = found.manifests["epoch=0-step=4.ckpt"]
    assert committed.layout == "lightning" and committed.step == 4 and "loss" in committed.metrics
    await run_ranks("lightning_sharded_resume", await found.restored(committed.checkpoint), world=2)


def a_daemon(folder: Path) -> str:
    (folder / "watch").mkdir()
    return f'cache_bytes = "1GB"\n[[checkpoint]]\nwatch = "{folder}/watch"\nrun = "{folder}/run"\n'


async def test_lightning_files_through_a_daemon(tmp_path: Path) -> None:
    """A file has no room for a marker; the daemon is told of it when it is whole."""
    with daemon(tmp_path, {}, a_daemon(tmp_path)) as running:
        running.start_ready()
        await run_ranks("lightning_commit", tmp_path / "watch", environment={"STAGER_SOCKET": running.socket})
        wait_for(running, tmp_path, {"epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"})
        assert (
            "commit.ping_failed"
            not in (tmp_path / "watch-lightning_commit" / "lightning_commit-0.log").read_text()
        )


async def test_dcp_writer_and_reader(tmp_path: Path) -> None:
    """Saved through the writer under a real daemon; read by two ranks on an empty disk, one of which restores."""
    with daemon(tmp_path, {}, a_daemon(tmp_path)) as running:
        running.start_ready()
        environment = {"STAGER_SOCKET": running.socket}
        await run_ranks("dcp_commit", tmp_path / "watch", world=2, environment=environment)
        wait_for(running, tmp_path, {"step-2"})
    manifest = json.loads((tmp_path / "run" / ".stager" / "step-2" / "manifest.json").read_text())
    assert manifest["step"] == 2 and "loss" in manifest["metrics"]
    await run_ranks("dcp_fetch", tmp_path / "empty", world=2, arguments=(str(tmp_path / "run"),))


def wait_for(running: DaemonProcess, folder: Path, names: set[str]) -> None:
    manifests = [folder / "run" / ".stager" / name / "manifest.json" for name in names]
    running.wait_until(lambda: all(manifest.exists() for manifest in manifests), f"commits of {names}")


def test_nothing_imports_the_frameworks() -> None:
    """`import stager` and its client stay without any framework."""
    code = (
        "import sys, stager, stager.client.commit, stager.trainers;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'lightning')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
