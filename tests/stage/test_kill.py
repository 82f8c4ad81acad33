"""SIGKILL of a real staging process at random moments: nothing is lost, little is sent again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from stager.cache.layout import CacheLayout
from stager.disk import LocalDisk
from stager.errors import LockHeld
from stager.formats.manifest import encode_dataset_manifest
from tests.stage.child import PART_BYTES, PARTS_AT_ONCE, SHARDS_AT_ONCE
from tests.stage.kit import Dataset, make_dataset

ROOT = Path(__file__).parents[2]
KILLS = 12


def write_bucket(folder: Path, dataset: Dataset) -> None:
    folder.mkdir()
    for name, body in dataset.bodies.items():
        (folder / name).write_bytes(body)
    (folder / "manifest.json").write_bytes(encode_dataset_manifest(dataset.manifest))


def start(bucket: Path, cache: Path, log: Path, *, bytes_per_s: float = 1e12) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.stage.child", str(bucket), str(cache), str(log), str(bytes_per_s)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_for(log: Path, size: int, process: subprocess.Popen[bytes], *, deadline_s: float = 60.0) -> None:
    """Until the log has grown beyond ``size``; the process must not end by itself."""
    until = time.monotonic() + deadline_s
    while not log.exists() or log.stat().st_size <= size:
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < until, "nothing was read"
        time.sleep(0.002)


def visible_shards(cache: Path, dataset: Dataset) -> set[str]:
    """Names under shards/, each of which must be complete and right."""
    names = set()
    for path in (cache / "shards").glob("*/*"):
        assert path.read_bytes() == dataset.bodies[path.name], path
        names.add(path.name)
    return names


def end(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    """After each kill what is visible is right and stays; in the end all is there, with few bytes sent twice."""
    dataset = make_dataset(1, [200_000 + 10_000 * number for number in range(12)])
    bucket, cache, log = tmp_path / "bucket", tmp_path / "cache", tmp_path / "log"
    write_bucket(bucket, dataset)
    total = sum(len(body) for body in dataset.bodies.values())
    chance = random.Random(os.urandom(8))
    seen: set[str] = set()
    for _ in range(KILLS):
        process = start(bucket, cache, log, bytes_per_s=total / 1.5)
        try:
            wait_for(log, log.stat().st_size if log.exists() else 0, process)
            time.sleep(chance.random() * 0.15)
        finally:
            end(process)
        visible = visible_shards(cache, dataset)
        assert seen <= visible
        seen = visible
    process = start(bucket, cache, log)
    try:
        until = time.monotonic() + 60
        while visible_shards(cache, dataset) != set(dataset.names):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
    finally:
        end(process)
    sent: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        key, begin, stop = line.split()
        sent[key] += int(stop) - int(begin)
    del sent["manifest.json"]
    in_flight = SHARDS_AT_ONCE * PARTS_AT_ONCE * PART_BYTES
    assert total <= sent.total() <= total + KILLS * in_flight
    assert not list((cache / "staging").iterdir())


def test_a_second_process_on_the_same_cache_is_refused(tmp_path: Path) -> None:
    """The lock names who holds the cache, and is free again after a kill."""
    dataset = make_dataset(2, [1000])
    bucket, cache, log = tmp_path / "bucket", tmp_path / "cache", tmp_path / "log"
    write_bucket(bucket, dataset)
    lock = CacheLayout(str(cache)).lock
    process = start(bucket, cache, log)
    try:
        wait_for(log, 0, process)
        with pytest.raises(LockHeld, match=f"process {process.pid}"), LocalDisk().lock(lock, "another"):
            pass
    finally:
        end(process)
    with LocalDisk().lock(lock, "another"):
        pass
