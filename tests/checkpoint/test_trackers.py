"""Trackers beside restored checkpoints, for every layout that has them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stager.checkpoint.restore import restore
from stager.disk import LocalDisk
from stager.formats.commits import CheckpointManifest, FileEntry
from stager.formats.digests import Digest
from stager.offload import InlineOffload
from stager.store.directory import DirectoryStore
from stager.transfer.download import digest_of_file
from stager.transfer.tools import Tools
from tests.checkpoint.made import MADE, Made

DISK = LocalDisk()


async def restored(made: Made, root: Path, name: str) -> Path:
    """A committed checkpoint of this layout, restored under ``name``; the folder that it is in."""
    entries = []
    for path, body in made.files.items():
        file = root / "run" / made.name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)
        digest: Digest = digest_of_file(DISK, str(file), len(body))
        entries.append(FileEntry(path, len(body), digest))
    manifest = CheckpointManifest(made.name, made.step, made.layout, tuple(entries), 1, "f" * 32, 1)
    store = DirectoryStore(str(root / "run"), disk=DISK, offload=InlineOffload(), chance=random.Random(1))
    await restore(store, manifest, str(root / "again" / name), Tools(DISK, InlineOffload()))
    return root / "again"


@pytest.mark.parametrize(
    ("label", "trackers"),
    [
        ("7 DeepSpeed ZeRO-2", {"latest": b"global_step100"}),
        ("9 DeepSpeed universal", {"latest_universal": b"global_step100_universal"}),
        ("18 Megatron", {"latest_checkpointed_iteration.txt": b"100"}),
        ("19 Megatron legacy", {"latest_checkpointed_iteration.txt": b"100"}),
        (
            "21 Megatron-Bridge",
            {
                "latest_checkpointed_iteration.txt": b"100",
                "latest_train_state.pt": MADE["21 Megatron-Bridge"].files["train_state.pt"],
            },
        ),
        ("27 DLRover", {"dlrover_latest.txt": b"100", "latest": b"global_step100"}),
        ("1 DCP", {}),
        ("11 Trainer with DeepSpeed", {}),
    ],
)
async def test_written_beside_it(label: str, trackers: dict[str, bytes], tmp_path: Path) -> None:
    """Each layout's own, and no other; what pointed elsewhere is replaced. By the frameworks' documented rules."""
    made = MADE[label]
    (tmp_path / "again").mkdir()
    for tracker in trackers:
        (tmp_path / "again" / tracker).write_bytes(b"7")
    folder = await restored(made, tmp_path, made.name)
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert found == trackers


async def test_none_under_a_name_that_would_not_be_found(tmp_path: Path) -> None:
    """Megatron looks for `iter_0000100`; a tracker beside another name would send it nowhere."""
    folder = await restored(MADE["18 Megatron"], tmp_path, "here")
    assert [path.name for path in folder.iterdir()] == ["here"]
