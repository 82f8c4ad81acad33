"""Checkpoints through real stores and the command line: SeaweedFS and a directory, parts, kills, damage."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from s3_server import S3Endpoint
from stager.budget import ByteBudget
from stager.checkpoint.commit import list_manifests, read_manifest
from stager.checkpoint.restore import restore
from stager.clock import SystemClock
from stager.disk import LocalDisk
from stager.errors import IntegrityError
from stager.journal import Journal
from stager.offload import ThreadOffload
from stager.store.api import ObjectStore
from stager.store.registry import StoreTools, open_store
from stager.store.s3_settings import S3Settings
from stager.transfer.tools import Tools
from tests.checkpoint.conftest import Copy, run_framework
from tests.checkpoint.material import make_service, running, write_checkpoint
from tests.servers.choice import BUCKET

ROOT = Path(__file__).parents[2]
DISK = LocalDisk()
MIB = 1 << 20
_numbers = itertools.count()


def settings_of(endpoint: S3Endpoint) -> S3Settings:
    return S3Settings(
        provider="seaweedfs",
        endpoint=endpoint.endpoint,
        region=endpoint.region,
        access_key=endpoint.access_key,
        secret_key=endpoint.secret_key,
    )


def environment_of(endpoint: S3Endpoint) -> dict[str, str]:
    """For commands in processes of their own."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "STAGER_STORE__PROVIDER": "seaweedfs",
        "STAGER_STORE__ENDPOINT": endpoint.endpoint,
        "STAGER_STORE__REGION": endpoint.region,
        "STAGER_STORE__ACCESS_KEY": endpoint.access_key,
        "STAGER_STORE__SECRET_KEY": endpoint.secret_key,
    }


def stager(endpoint: S3Endpoint, *arguments: str, code: int = 0) -> dict[str, object]:
    """Run a command with ``--json``; what it printed."""
    result = subprocess.run(
        [sys.executable, "-m", "stager", *arguments, "--json"],
        env=environment_of(endpoint),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == code, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(params=["seaweedfs", "directory"])
def run_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run of the test's own."""
    if request.param == "directory":
        return str(tmp_path / "bucket" / "run")
    return f"s3://{BUCKET}/runs/test-{next(_numbers)}-{os.getpid()}"


@asynccontextmanager
async def opened(url: str, endpoint: S3Endpoint) -> AsyncIterator[tuple[ObjectStore, Tools]]:
    offload = ThreadOffload(disk_threads=4, hash_threads=1)
    store = await open_store(
        url, settings_of(endpoint), StoreTools(DISK, offload, random.Random(), durable=False)
    )
    try:
        yield store, Tools(DISK, offload, memory=ByteBudget(64 * MIB), random=random.Random())
    finally:
        await store.aclose()
        offload.close()


async def test_there_and_back(run_url: str, seaweedfs: S3Endpoint, tmp_path: Path, copied: Copy) -> None:
    """A real DCP checkpoint and one with a file of several parts: found, uploaded, restored, loaded by torch."""
    path = copied("save_dcp", "step-100")
    large = random.Random(1).randbytes(13 * MIB)
    bodies = write_checkpoint(DISK, str(path.parent / "step-200"), 200)
    (path.parent / "step-300").mkdir()
    (path.parent / "step-300" / "large.bin").write_bytes(large)
    write_checkpoint(DISK, str(path.parent / "step-300"), 300)
    journal = Journal(str(tmp_path / "journal.sqlite"), DISK)
    async with opened(run_url, seaweedfs) as (store, tools):
        service = make_service(
            store,
            DISK,
            journal,
            SystemClock(),
            watch=str(path.parent),
            rescan_s=0.2,
            offload=tools.offload,
            part_bytes=5 * MIB,
            hints=True,
        )
        async with running(service), asyncio.timeout(60):
            await service.drain()
        assert [found.checkpoint for found in await list_manifests(store)] == [
            "step-100",
            "step-200",
            "step-300",
        ]
        for name in ("step-100", "step-200", "step-300"):
            manifest = await read_manifest(store, name)
            assert manifest is not None
            await restore(store, manifest, str(tmp_path / "back" / name), tools)
        assert (tmp_path / "back" / "step-300" / "large.bin").read_bytes() == large
        assert {name: (tmp_path / "back" / "step-200" / name).read_bytes() for name in bodies} == bodies
        await asyncio.to_thread(run_framework, ("load_dcp", str(tmp_path / "back" / "step-100")))
        # What was restored is complete in the eyes of the next watcher, and known by its bytes.
        again = make_service(
            store, DISK, Journal(":memory:", DISK), SystemClock(), watch=str(tmp_path / "back"), rescan_s=0.2
        )
        async with running(again), asyncio.timeout(60):
            await again.drain()
        assert again.status()["committed"] == 3
        assert len(await list_manifests(store)) == 3
    journal.close()


async def test_damage_in_the_bucket_is_found(run_url: str, seaweedfs: S3Endpoint, tmp_path: Path) -> None:
    """An altered object and a truncated one fail the restore by name, and nothing becomes visible."""
    watch = tmp_path / "watch"
    write_checkpoint(DISK, str(watch / "step-1"), 1)
    async with opened(run_url, seaweedfs) as (store, tools):
        service = make_service(
            store, DISK, Journal(":memory:", DISK), SystemClock(), watch=str(watch), rescan_s=0.2
        )
        async with running(service), asyncio.timeout(60):
            await service.drain()
        manifest = await read_manifest(store, "step-1")
        assert manifest is not None
        body = (watch / "step-1" / "model.bin").read_bytes()
        for damaged in (bytes([body[0] ^ 1]) + body[1:], body[:-1]):
            await store.put("step-1/model.bin", damaged)
            with pytest.raises(IntegrityError, match=r"step-1/model\.bin"):
                await restore(store, manifest, str(tmp_path / "back"), tools)
            assert not (tmp_path / "back").exists()
        await store.put("step-1/model.bin", body)
        await restore(store, manifest, str(tmp_path / "back"), tools)


def test_the_commands(run_url: str, seaweedfs: S3Endpoint, tmp_path: Path) -> None:
    """`seal --run`, `ls`, `restore` and `retain`, without a daemon; their errors have codes and hints."""
    watch = tmp_path / "watch"
    for step in (1, 2, 3):
        folder = watch / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "weights.bin").write_bytes(bytes([step]) * 1000)
        said = stager(seaweedfs, "seal", str(folder), "--run", run_url)
        assert (said["checkpoint"], said["state"], said["step"]) == (f"step-{step}", "committed", step)
    assert os.listdir(watch / ".stager-once") == ["lock"]
    listed = stager(seaweedfs, "ls", run_url)["checkpoints"]
    assert isinstance(listed, list) and [entry["step"] for entry in listed] == [1, 2, 3]
    planned = stager(seaweedfs, "retain", run_url, "--last", "1", "--every-steps", "2", "--dry-run")[
        "checkpoints"
    ]
    assert isinstance(planned, list) and [entry["keep"] for entry in planned] == [False, True, True]
    stager(seaweedfs, "retain", run_url, "--last", "1", "--every-steps", "2")
    stager(seaweedfs, "restore", run_url, str(tmp_path / "back"), "--step", "latest")
    assert (tmp_path / "back" / "weights.bin").read_bytes() == bytes([3]) * 1000
    error = stager(seaweedfs, "restore", run_url, str(tmp_path / "none"), "--step", "1", code=12)["error"]
    assert isinstance(error, dict) and "step-2" in error["hint"]
    stager(seaweedfs, "seal", str(tmp_path / "nothing"), "--run", run_url, code=2)
    (tmp_path / "empty").mkdir()
    stager(seaweedfs, "seal", str(tmp_path / "empty"), "--run", run_url, code=2)
