"""SIGKILL of the real daemon at random moments of staging and of upload, against a real S3 server."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest

from s3_server import S3Endpoint
from stager.checksum import digest_of
from stager.formats.manifest import DatasetManifest, ShardEntry, encode_dataset_manifest
from tests.daemon.process import daemon, json_of, stager
from tests.servers.choice import BUCKET

KILLS = 10
SEED = random.SystemRandom().randrange(1 << 32)


def client_of(server: S3Endpoint) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=server.region,
    )


def objects_below(server: S3Endpoint, bucket: str, prefix: str) -> dict[str, bytes]:
    client = client_of(server)
    found = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {
        entry["Key"]: client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read() for entry in found
    }


@pytest.mark.timeout(400)
def test_staging_survives_ten_kills(tmp_path: Path, seaweedfs: S3Endpoint) -> None:
    """Killed ten times while it stages, nothing visible is ever wrong, and in the end everything is there."""
    bucket = BUCKET
    chance = random.Random(SEED)
    bodies = {f"shard-{number:06d}.tar": chance.randbytes(3_000_000) for number in range(12)}
    manifest = DatasetManifest(
        tuple(ShardEntry(name, len(body), 10, digest_of(body)) for name, body in bodies.items())
    )
    client = client_of(seaweedfs)
    for name, body in bodies.items():
        client.put_object(Bucket=bucket, Key=f"kills/{name}", Body=body)
    client.put_object(Bucket=bucket, Key="kills/manifest.json", Body=encode_dataset_manifest(manifest))
    config = (
        f'cache_bytes = "100MB"\n[[dataset]]\nsource = "s3://{bucket}/kills"\n[limits]\ndownload = "2MB/s"\n'
    )
    with daemon(tmp_path, seaweedfs.environment(), config) as running:
        for _ in range(KILLS):
            running.start_ready()
            time.sleep(chance.uniform(0.0, 1.5))
            running.kill()
            check_shards(running.cache, bodies)
        running.config.write_text(running.config.read_text().replace("2MB/s", "off"))
        running.start_ready()
        running.wait_until(
            lambda: running.status()["staging"]["cache"]["shards"] == len(bodies), f"all shards (seed {SEED})"
        )
        assert check_shards(running.cache, bodies) == len(bodies)
        assert running.stop() == 0


def check_shards(cache: Path, bodies: Mapping[str, bytes]) -> int:
    """Every visible shard is whole; returns how many there are."""
    visible = [path for path in (cache / "shards").rglob("*") if path.is_file()]
    for path in visible:
        assert path.read_bytes() == bodies[path.name], f"{path.name} is not what was put (seed {SEED})"
    return len(visible)


@pytest.mark.timeout(400)
def test_upload_survives_ten_kills(tmp_path: Path, seaweedfs: S3Endpoint) -> None:
    """Killed ten times while it uploads, nothing is ever half-visible, and in the end it restores to the same bytes."""
    bucket = BUCKET
    chance = random.Random(SEED)
    run_url, checkpoint = f"s3://{bucket}/runs/kills", tmp_path / "checkpoints" / "step-7"
    checkpoint.mkdir(parents=True)
    files = {
        "weights.bin": chance.randbytes(34_000_000),
        "optimizer.bin": chance.randbytes(5_000_000),
        "config.json": b"{}",
    }
    for name, body in files.items():
        (checkpoint / name).write_bytes(body)
    config = (
        f'cache_bytes = "100MB"\n[[checkpoint]]\nwatch = "{checkpoint.parent}"\nrun = "{run_url}"\nrescan_s = 0.2\n'
        '[limits]\nupload = "6MB/s"\n'
    )
    with daemon(tmp_path, seaweedfs.environment(), config) as running:
        running.start_ready()
        assert running.client.seal(str(checkpoint)).state != "committed"
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.0, 1.5))
            running.kill()
            check_run(seaweedfs, bucket, files)
            running.start_ready()
        running.kill()
        running.config.write_text(running.config.read_text().replace("6MB/s", "off"))
        running.start_ready()
        running.wait_until(
            lambda: bool(
                json_of(stager("ls", run_url, "--json", environment=running.environment))["checkpoints"]
            ),
            f"the commit (seed {SEED})",
        )
        check_run(seaweedfs, bucket, files)
        assert running.stop() == 0
        target = tmp_path / "restored"
        done = stager("restore", run_url, str(target), environment=running.environment)
        assert done.returncode == 0, done.stderr
        for name, body in files.items():
            assert (target / name).read_bytes() == body


def check_run(server: S3Endpoint, bucket: str, files: Mapping[str, bytes]) -> None:
    """If the manifest is there, so is every file, whole."""
    found = objects_below(server, bucket, "runs/kills/")
    if "runs/kills/.stager/step-7/manifest.json" in found:
        for name, body in files.items():
            got = found.get(f"runs/kills/step-7/{name}", b"")
            assert hashlib.sha256(got).digest() == hashlib.sha256(body).digest(), f"{name} (seed {SEED})"
