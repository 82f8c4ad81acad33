"""The dataset through the real daemon, from a real S3 server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from botocore.config import Config
from botocore.session import Session

from s3_server import S3Endpoint
from stager import StagedDataset, StagedLoader
from stager.client import Client
from stager.client.private import private_files, release_private_daemons
from tests.dataset.shards import write_with_manifest
from tests.servers.choice import BUCKET


@pytest.fixture
def source(seaweedfs: S3Endpoint, tmp_path: Path) -> str:
    """A dataset of 8 shards and 96 samples in the bucket."""
    origin = write_with_manifest(tmp_path / "origin", [12] * 8)
    client = Session().create_client(
        "s3",
        endpoint_url=seaweedfs.endpoint,
        region_name=seaweedfs.region,
        aws_access_key_id=seaweedfs.access_key,
        aws_secret_access_key=seaweedfs.secret_key,
        config=Config(s3={"addressing_style": "path"}),
    )
    prefix = f"dataset-{tmp_path.name}"
    for path in sorted(origin.iterdir(), key=lambda path: path.name == "manifest.json"):
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
    client.close()
    return f"s3://{BUCKET}/{prefix}"


@contextmanager
def running_daemon(tmp_path: Path, endpoint: S3Endpoint) -> Iterator[subprocess.Popen[bytes]]:
    """``stager run`` in a process of its own, answering; killed in the end."""
    config = tmp_path / "stager.toml"
    config.write_text(
        f"[node]\ncache = {json.dumps(str(tmp_path / 'cache'))}\ncache_bytes = '1GB'\n"
        f"socket = {json.dumps(str(tmp_path / 'socket'))}\n[store]\nprovider = 'seaweedfs'\n"
    )
    with (tmp_path / "daemon.log").open("ab") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "stager", "run", "--config", str(config)],
            env={**os.environ, **endpoint.environment()},
            stdout=log,
            stderr=log,
        )
    try:
        end = time.monotonic() + 60
        client = Client(str(tmp_path / "socket"))
        while not client.live():
            assert daemon.poll() is None, (tmp_path / "daemon.log").read_text()
            assert time.monotonic() < end, (tmp_path / "daemon.log").read_text()
            time.sleep(0.02)
        yield daemon
    finally:
        daemon.kill()
        daemon.wait()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_from_a_bucket_with_the_daemon_killed_in_it(
    source: str, seaweedfs: S3Endpoint, tmp_path: Path, workers: int
) -> None:
    """The stream equals that of the local shards although the daemon is killed, with its socket left, and restarted."""
    expected = [
        batch["__key__"] for batch in StagedDataset(tmp_path / "origin", batch_size=8, window=2, seed=1)
    ]
    found = []
    with running_daemon(tmp_path, seaweedfs) as daemon:
        dataset = StagedDataset(
            source, batch_size=8, window=2, seed=1, socket=str(tmp_path / "socket"), wait_timeout_s=60
        )
        items = iter(StagedLoader(dataset, num_workers=workers, timeout=90))
        found.append(next(items)["__key__"])
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.wait()
        with running_daemon(tmp_path, seaweedfs):
            found += [batch["__key__"] for batch in items]
            assert found == expected
            assert [
                batch["__key__"]
                for batch in StagedDataset(
                    source, batch_size=8, window=2, seed=1, socket=str(tmp_path / "socket")
                )
            ] == expected


def test_a_private_daemon_needs_no_set_up(
    source: str, seaweedfs: S3Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cache=DIRECTORY and the SDK's own variables are enough to read a bucket."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("STAGER_SOCKET", raising=False)
    short = tempfile.mkdtemp(prefix="s-")
    monkeypatch.setattr(tempfile, "tempdir", short)
    try:
        dataset = StagedDataset(source, cache=tmp_path / "cache", cache_bytes="1GB", wait_timeout_s=60)
        assert sorted(sample["cls"] for sample in dataset) == list(range(96))
        client = Client(private_files(str(tmp_path / "cache")).socket)
        assert client.live()
        release_private_daemons()
        end = time.monotonic() + 60
        while client.live():
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        release_private_daemons()
        shutil.rmtree(short)
