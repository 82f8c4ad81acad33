"""The examples as users run them: stopped and resumed, each sees the samples and the losses of a run that went through."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import webdataset

EXAMPLES = Path(__file__).parents[2] / "examples"
# Example, and the checkpoint of its step 3.
RUNS = {
    "train_bytes": "step-3",
    "train_torchdata": "step-3.pt",
    "train_lightning": "step=3.ckpt",
    "train_hugging_face": "checkpoint-3",
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 sources in 3 shards: 4 batches of 16 in an epoch."""
    folder = tmp_path_factory.mktemp("sources")
    with webdataset.ShardWriter(f"{folder}/shard-%06d.tar", maxcount=25, verbose=0) as writer:
        for number in range(70):
            writer.write({"__key__": f"{number:03d}", "py": (f"print({number})\n" * 30).encode()})
    return folder


@pytest.mark.parametrize("example", RUNS)
def test_resumed_like_uninterrupted(shards: Path, tmp_path: Path, example: str) -> None:
    """In the middle of an epoch, and over the end of it."""

    def run(folder: str, steps: int, *more: str) -> None:
        log = tmp_path / f"{folder}.jsonl"
        options = ["--steps", str(steps), "--log", str(log), "--workers", "1", *more]
        if example == "train_bytes":
            options += ["--batch", "16"]
        if example != "train_torchdata":
            options += ["--save-every", "3"]
        command = [
            sys.executable,
            str(EXAMPLES / f"{example}.py"),
            str(shards),
            str(tmp_path / folder),
            *options,
        ]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert not ran.returncode, ran.stderr

    def logged(folder: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (tmp_path / f"{folder}.jsonl").read_text().splitlines()]

    run("whole", 6)
    run("parts", 3)
    run("parts", 6, "--resume", str(tmp_path / "parts" / RUNS[example]))
    assert logged("parts") == logged("whole")
    assert [line["step"] for line in logged("whole")] == [1, 2, 3, 4, 5, 6]
    assert len({line["keys"] for line in logged("whole")}) == 6
