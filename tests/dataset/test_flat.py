"""Nothing grows with the epochs: neither memory, nor open files, nor mappings, in the trainer or in its workers."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stager import StagedDataset, StagedLoader
from tests.dataset.shards import write_with_manifest

EPOCHS = 50
WARM = 8
SLACK_KIB = 3 << 10


@dataclass(frozen=True)
class Held:
    """What a process holds: private memory, open files, mappings of shards."""

    anonymous_kib: int
    files: int
    shards_mapped: int


def held(pid: int) -> Held:
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    maps = Path(f"/proc/{pid}/maps").read_text()
    return Held(int(anonymous), len(os.listdir(f"/proc/{pid}/fd")), maps.count(".tar\n"))


@pytest.mark.parametrize("options", [{}, {"decode": False}, {"decode": False, "copy": False}], ids=str)
def test_fifty_epochs_with_persistent_workers(tmp_path: Path, options: dict[str, Any]) -> None:
    """Of far more shards than are kept open."""
    source = write_with_manifest(tmp_path / "data", [12] * 60)
    loader = StagedLoader(
        StagedDataset(source, batch_size=16, window=3, **options),
        num_workers=2,
        persistent_workers=True,
        timeout=60,
    )
    after: list[list[Held]] = []
    for _ in range(EPOCHS):
        assert sum(len(batch["__key__"]) for batch in loader) == 720
        gc.collect()
        workers = loader._iterator._workers  # type: ignore[union-attr]
        after.append([held(pid) for pid in (os.getpid(), *(worker.pid for worker in workers))])
    assert len(after[0]) == 3
    for process in range(3):
        early = [epoch[process] for epoch in after[WARM : WARM + 5]]
        late = [epoch[process] for epoch in after[-5:]]
        assert min(at.anonymous_kib for at in late) <= max(at.anonymous_kib for at in early) + SLACK_KIB
        assert min(at.files for at in late) <= max(at.files for at in early)
        assert max(at.shards_mapped for at in late) <= 1 + 8
