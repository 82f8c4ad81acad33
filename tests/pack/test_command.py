"""`stager pack` as people run it: worker processes, kill -9, exit codes, a real bucket."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from s3_server import S3Endpoint
from stager.cli.main import app
from tests.daemon.process import interruptible
from tests.servers.choice import BUCKET

DEADLINE_S = 60.0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    chance = random.Random(5)
    for number in range(120):
        (root / f"{number:04d}.bin").write_bytes(chance.randbytes(chance.randrange(40_000)))
        (root / f"{number:04d}.json").write_text(json.dumps({"number": number}))
    return root


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "stager", "pack", *map(str, arguments)]


def run_pack(*arguments: object, code: int = 0) -> Any:
    """Run it in this process, with --json; returns the document."""
    result = CliRunner().invoke(app, ["pack", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def contents(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_the_bytes_do_not_depend_on_the_workers(tree: Path, tmp_path: Path) -> None:
    """One process or three, the same files."""
    one = run_pack(tree, tmp_path / "one", "--max-bytes", "300KB", "--workers", 1)
    three = run_pack(tree, tmp_path / "three", "--max-bytes", "300KB", "--workers", 3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert one["samples"] == three["samples"] == 120 and one["shards_written"] == one["shards"] > 5


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_again_and_again_it_ends_with_the_same_bytes(tree: Path, tmp_path: Path, workers: int) -> None:
    """SIGKILL at random moments: finished shards are never written again, no orphan goes on, nothing differs."""
    options = ("--max-samples", 3, "--workers", workers)
    whole = run_pack(tree, tmp_path / "whole", *options)
    out = tmp_path / "out"
    chance = random.Random(workers)
    finished: dict[str, tuple[int, int]] = {}
    for _ in range(4):
        known = len(list(out.glob("*.tar")))
        kill_after(command(tree, out, *options), out, shards=known + chance.randrange(1, 8))
        assert not (out / "manifest.json").exists()
        records = out / ".stager" / "pack" / "shards"
        for path in records.glob("*.json") if records.exists() else ():
            status = (out / path.name.removesuffix(".json")).stat()
            seen = (status.st_ino, status.st_mtime_ns)
            assert finished.setdefault(path.name, seen) == seen
    done = run_pack(tree, out, *options)
    assert contents(out) == contents(tmp_path / "whole")
    assert done["shards_kept"] >= len(finished) > 0 and done["fingerprint"] == whole["fingerprint"]
    for name, seen in finished.items():
        status = (out / name.removesuffix(".json")).stat()
        assert (status.st_ino, status.st_mtime_ns) == seen


def kill_after(arguments: list[str], out: Path, *, shards: int) -> None:
    """Start a pack, kill it once so many shards are there, and wait until its whole session is gone."""
    process = subprocess.Popen(
        arguments, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(list(out.glob("*.tar"))) < shards:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        process.wait(DEADLINE_S)
        while session_lives(process.pid):
            assert time.monotonic() < deadline, "a worker outlives its parent"
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def session_lives(group: int) -> bool:
    """Whether a process of the group runs; zombies that init has yet to reap do not count."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, found = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            except OSError:
                continue
            if int(found) == group and state not in "ZX":
                return True
    return False


def test_interrupted_it_says_how_to_go_on(tree: Path, tmp_path: Path) -> None:
    """Ctrl-C ends with 130 and a hint, and leaves a destination that can be gone on with."""
    out = tmp_path / "out"
    arguments = command(tree, out, "--max-samples", 1, "--workers", 2)
    process = subprocess.Popen(
        arguments,
        start_new_session=True,
        preexec_fn=interruptible,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + DEADLINE_S
    while not list(out.glob("*.tar")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, said
    assert "run the same command again" in said and "Traceback" not in said
    assert run_pack(tree, out, "--max-samples", 1, "--workers", 1)["samples"] == 120


def test_problems_of_the_input_are_told_at_once(tree: Path, tmp_path: Path) -> None:
    """Exit code 2, every kind of problem with its files, a hint, nothing written; --json says it too."""
    (tree / "Makefile").write_text("all:")
    (tree / "0001.BIN").write_text("clash")
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["pack", str(tree), str(out)])
    assert result.exit_code == 2
    for part in ("Makefile", "0001.bin", "is `bin` of `0001` as well", "hint:", "--on-unkeyable skip"):
        assert part in result.stderr
    assert not out.exists()
    error = run_pack(tree, out, code=2)["error"]
    assert error["kind"] == "UsageError" and "Makefile" in error["message"]
    done = run_pack(tree, out, "--on-unkeyable", "skip", "--workers", 1)
    assert done["left_out"] == {"its name makes no sample": 1, "the same field of the same sample again": 1}


def test_a_dry_run_writes_nothing(tree: Path, tmp_path: Path) -> None:
    """The plan it prints is the one that is carried out."""
    out = tmp_path / "out"
    planned = run_pack(tree, out, "--max-samples", 50, "--dry-run")
    assert not out.exists()
    done = run_pack(tree, out, "--max-samples", 50, "--workers", 1)
    assert planned["plan"] == done["plan"] and planned["shards"] == 3


def test_plain_lines_and_a_summary_without_a_terminal(tree: Path, tmp_path: Path) -> None:
    """Standard output has the summary for people; there are no control sequences in a log."""
    result = subprocess.run(
        command(tree, tmp_path / "out"), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert result.returncode == 0
    assert "120 samples of 240 files" in result.stdout and "fingerprint" in result.stdout
    assert "\x1b" not in result.stdout + result.stderr


def test_into_a_real_bucket(tree: Path, tmp_path: Path, seaweedfs: S3Endpoint) -> None:
    """Straight into S3 with two workers, the same shards as in a directory; again it is a no-op; a wrong bucket is named."""
    environment = {**os.environ, **seaweedfs.environment()}

    def pack_there(url: str, *, code: int = 0) -> Any:
        # A process of its own: the fork server of this one was started with another environment.
        arguments = command(tree, url, "--max-bytes", "12MB", "--workers", 2, "--json")
        result = subprocess.run(
            arguments, capture_output=True, text=True, timeout=DEADLINE_S, env=environment
        )
        assert result.returncode == code, result.stderr
        return json.loads(result.stdout)

    (tree / "big.bin").write_bytes(random.Random(1).randbytes(20 << 20))
    prefix = f"s3://{BUCKET}/packed-{tmp_path.name}"
    done = pack_there(prefix)
    local = run_pack(tree, tmp_path / "out", "--max-bytes", "12MB", "--workers", 1)
    assert done["fingerprint"] == local["fingerprint"] and done["shards"] >= 2
    assert pack_there(prefix)["complete_before"]
    assert "no-such-bucket-at-all" in pack_there("s3://no-such-bucket-at-all/x", code=12)["error"]["message"]


def test_what_could_not_be_read_makes_the_exit_code_3(tree: Path, tmp_path: Path) -> None:
    """A file whose device fails (EIO, here from /proc) stops the pack by name; with skip the rest is packed, and told."""
    (tree / "0007.bad").symlink_to("/proc/self/mem")
    out = tmp_path / "out"
    error = run_pack(tree, out, "--symlinks", "follow", "--workers", 1, code=3)["error"]
    assert "0007.bad" in error["message"] and "Input/output error" in error["message"]
    assert not (out / "manifest.json").exists()
    done = run_pack(tree, out, "--symlinks", "follow", "--workers", 1, "--on-error", "skip", code=3)
    assert done["samples"] == 119 and len(done["skipped"]) == 1 and "0007.bad" in done["skipped"][0]
