"""What operators and trainers do to a daemon while it works; nothing is lost and nothing half-visible."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from s3_server import SeaweedServer
from stager.checksum import digest_of
from stager.formats.commits import CommitMarker, encode_marker
from stager.formats.manifest import DatasetManifest, ShardEntry, encode_dataset_manifest
from tests.daemon.process import ROOT, WAIT_S, DaemonProcess, daemon, json_of, stager

NOTHING: Mapping[str, str] = {}


def save(folder: Path, step: int, files: Mapping[str, bytes]) -> Path:
    """A checkpoint, marked as finished."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        (folder / name).write_bytes(body)
    hidden = folder.parent / f".{folder.name}.marker"
    hidden.write_bytes(encode_marker(CommitMarker(step)))
    hidden.rename(folder / ".stager-commit.json")
    return folder


def watching(folder: Path, run: str, extra: str = "") -> str:
    return f'cache_bytes = "50MB"\n[[checkpoint]]\nwatch = "{folder}/watch"\nrun = "{run}"\nrescan_s = 0.2\n{extra}'


def run_of(running: DaemonProcess) -> Mapping[str, object]:
    found: Mapping[str, object] = running.status()["checkpoints"][0]
    return found


def names_in_run(run: str, environment: Mapping[str, str]) -> list[str]:
    listed = json_of(stager("ls", run, "--json", environment=environment))
    return [entry["checkpoint"] for entry in listed["checkpoints"]]


def test_a_trainer_that_goes_back(tmp_path: Path) -> None:
    """After a rollback to an earlier step, neither the bucket's rule nor the folder's takes the new, lower steps away."""
    run = f"{tmp_path}/bucket/run"
    rules = f'keep_local = 2\ntiers = [{{url = "{run}", keep = {{last = 2}}}}]\n'
    with daemon(tmp_path, NOTHING, watching(tmp_path, run, rules)) as running:
        running.start_ready()
        for count, step in enumerate((100, 110, 120, 50, 60, 70), 1):
            save(tmp_path / "watch" / f"step-{step}", step, {"weights.bin": b"%d" % step})
            running.wait_until(lambda count=count: run_of(running)["committed"] == count, f"step {step}")
        running.wait_until(lambda: run_of(running)["retired"] == 2, "retention")
        assert running.stop() == 0
    assert names_in_run(run, NOTHING) == ["step-60", "step-70", "step-110", "step-120"]
    left = {path.name for path in (tmp_path / "watch").iterdir() if not path.name.startswith(".")}
    assert left == {"step-60", "step-70", "step-110", "step-120"}


def test_a_trainer_that_rotates_during_the_upload(tmp_path: Path) -> None:
    """Deleted and renamed checkpoints are sent as they were sealed; one that is overwritten in place is sent anew."""
    run, watch = f"{tmp_path}/bucket/run", tmp_path / "watch"
    chance = random.Random(5)
    bodies = {name: chance.randbytes(1_500_000) for name in ("deleted", "renamed", "again")}
    config = watching(tmp_path, run, '[limits]\nupload = "1MB/s"\n')
    with daemon(tmp_path, NOTHING, config) as running:
        running.start_ready()
        for step, (name, body) in enumerate(bodies.items(), 1):
            save(watch / name, step, {"weights.bin": body})
        running.wait_until(lambda: run_of(running)["sealed"] == 3, "three seals")
        subprocess.run(["rm", "-r", str(watch / "deleted")], check=True)
        os.rename(watch / "renamed", tmp_path / "elsewhere")
        bodies["again"] = chance.randbytes(1_500_000)
        with open(watch / "again" / "weights.bin", "r+b") as file:
            file.write(bodies["again"])
        save(watch / "again", 3, {})
        running.config.write_text(running.config.read_text().replace("1MB/s", "off"))
        assert running.stop() == 0
        running.start_ready()
        running.wait_until(lambda: len(names_in_run(run, NOTHING)) == 3, "all three")
        assert running.stop() == 0 and "Traceback" not in running.log()
    for name, body in bodies.items():
        target = tmp_path / f"restored-{name}"
        done = stager("restore", run, str(target), "--name", name, environment=NOTHING)
        assert done.returncode == 0, done.stderr
        assert (target / "weights.bin").read_bytes() == body


def test_a_step_saved_again(tmp_path: Path) -> None:
    """Other content under a committed name becomes another generation; the first stays as it was."""
    run, watch = f"{tmp_path}/bucket/run", tmp_path / "watch"
    with daemon(tmp_path, NOTHING, watching(tmp_path, run)) as running:
        running.start_ready()
        save(watch / "step-1", 1, {"weights.bin": b"first"})
        running.wait_until(lambda: run_of(running)["committed"] == 1, "the first")
        subprocess.run(["rm", "-r", str(watch / "step-1")], check=True)
        save(watch / "step-1", 1, {"weights.bin": b"second"})
        running.wait_until(lambda: run_of(running)["committed"] == 2, "the second")
        assert running.stop() == 0
    assert names_in_run(run, NOTHING) == ["step-1", "step-1.r2"]
    for name, body in (("step-1", b"first"), ("step-1.r2", b"second")):
        target = tmp_path / name
        assert stager("restore", run, str(target), "--name", name, environment=NOTHING).returncode == 0
        assert (target / "weights.bin").read_bytes() == body


def test_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    """While the server is gone checkpoints are sealed; when it is back they are committed."""
    folder = tmp_path / "server"
    server = SeaweedServer(folder, buckets=["operations"])
    environment = server.endpoint.environment()
    port = int(server.endpoint.endpoint.rsplit(":", 1)[1])
    run, body = "s3://operations/run//", random.Random(7).randbytes(9_000_000)
    try:
        config = watching(tmp_path, run, '[limits]\nupload = "4MB/s"\n')
        with daemon(tmp_path, environment, config) as running:
            running.start_ready()
            save(tmp_path / "watch" / "step-1", 1, {"weights.bin": body})
            running.wait_until(lambda: run_of(running)["sealed"] == 1, "the seal")
            server.kill()
            save(tmp_path / "watch" / "step-2", 2, {"weights.bin": body[::-1]})
            running.wait_until(lambda: run_of(running)["sealed"] == 2, "the seal without a server")
            server = SeaweedServer(folder, port=port)
            running.wait_until(lambda: run_of(running)["committed"] == 2, "both commits")
            assert running.stop() == 0 and "Traceback" not in running.log()
        target = tmp_path / "restored"
        assert stager("restore", run, str(target), environment=environment).returncode == 0
        assert (target / "weights.bin").read_bytes() == body[::-1]
    finally:
        server.kill()


def test_hands_in_the_cache(tmp_path: Path) -> None:
    """Shards that somebody deletes or cuts while the daemon runs come back whole for whoever asks for them."""
    chance = random.Random(9)
    bodies = {f"shard-{number}.tar": chance.randbytes(200_000) for number in range(3)}
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    for name, body in bodies.items():
        (bucket / name).write_bytes(body)
    entries = tuple(ShardEntry(name, len(body), 1, digest_of(body)) for name, body in bodies.items())
    (bucket / "manifest.json").write_bytes(encode_dataset_manifest(DatasetManifest(entries)))
    with daemon(tmp_path, NOTHING, f'cache_bytes = "50MB"\n[[dataset]]\nsource = "{bucket}"\n') as running:
        running.start_ready()
        running.wait_until(lambda: running.status()["staging"]["cache"]["shards"] == 3, "three shards")
        opened = running.client.open(str(bucket), deadline_s=10)
        shards = Path(opened.shards_directory)
        (shards / "shard-0.tar").unlink()
        os.truncate(shards / "shard-1.tar", 10)
        subprocess.run(["rm", "-r", str(running.cache / "staging")], check=True)
        got = running.client.want(opened.dataset, "shard-0.tar", deadline_s=20)
        assert Path(got.path).read_bytes() == bodies["shard-0.tar"]
        got = running.client.want(opened.dataset, "shard-1.tar", deadline_s=20, damaged=True)
        assert Path(got.path).read_bytes() == bodies["shard-1.tar"]
        # Cut while no daemon runs: found at the next start, before anybody may see it.
        assert running.stop() == 0
        os.truncate(shards / "shard-2.tar", 10)
        running.start_ready()
        running.wait_until(lambda: running.status()["staging"]["cache"]["shards"] == 3, "three shards again")
        assert all((shards / name).read_bytes() == body for name, body in bodies.items())
        assert running.stop() == 0 and "Traceback" not in running.log()


def test_restores_at_once_and_killed(tmp_path: Path) -> None:
    """Of restores to one target at once one wins and the others say so; one that was killed is gone on from."""
    run, saved = f"{tmp_path}/bucket/run", tmp_path / "step-1"
    files = {f"part-{number}.bin": random.Random(number).randbytes(8_000_000) for number in range(4)}
    save(saved, 1, files)
    assert stager("seal", str(saved), "--run", run, environment=NOTHING).returncode == 0
    target = tmp_path / "restored"
    command = [sys.executable, "-m", "stager", "restore", run, str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + WAIT_S
    while (
        time.monotonic() < end and killed.poll() is None and not list(tmp_path.glob(".restored.restore-*/*"))
    ):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait(WAIT_S)
    if not target.exists():
        assert list(tmp_path.glob(".restored.restore-*"))
    racing = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [process.communicate(timeout=WAIT_S)[1] for process in racing]
    codes = sorted(process.returncode for process in racing)
    assert codes[0] == (12 if killed.returncode == 0 else 0) and set(codes[1:]) <= {11, 12}, said
    assert not any("Traceback" in text for text in said)
    assert all((target / name).read_bytes() == body for name, body in files.items())
    assert not list(tmp_path.glob(".restored.*"))


def test_no_secret_is_told(tmp_path: Path) -> None:
    """Neither log, status, metrics, `config show` nor an error holds a secret of the configuration."""
    secret = "a-secret-that-nobody-may-read"
    store = f'[store]\nendpoint = "http://127.0.0.1:1"\naccess_key = "known"\nsecret_key = "{secret}"\n'
    config = watching(tmp_path, "s3://bucket/run", f'{store}[log]\nlevel = "debug"\n')
    with daemon(tmp_path, NOTHING, config) as running:
        running.start_ready()
        save(tmp_path / "watch" / "step-1", 1, {"a": b"1"})
        running.wait_until(lambda: "store.away" in running.log(), "a store that does not answer")
        shown = stager("config", "show", "--json", "--config", str(running.config), environment=NOTHING)
        failed = stager("ls", "s3://bucket/run", "--config", str(running.config), environment=NOTHING)
        assert shown.returncode == 0 and failed.returncode == 12
        told = [json.dumps(dict(running.status())), shown.stdout, failed.stderr + failed.stdout]
        running.kill()
        assert not any(secret in text for text in (*told, running.log()))
