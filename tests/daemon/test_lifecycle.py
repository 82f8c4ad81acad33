"""The real daemon from start to end: what it serves, whom it refuses, how it stops."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from stager import commit
from stager.checksum import digest_of
from stager.formats.manifest import DatasetManifest, ShardEntry, encode_dataset_manifest
from tests.daemon.process import WAIT_S, DaemonProcess, daemon, stager

# No cloud, whatever the machine that runs the tests has set.
PLAIN = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_EC2_METADATA_DISABLED": "true"}


def put_dataset(folder: Path, shards: int = 4, size: int = 200_000) -> dict[str, bytes]:
    """A dataset in a directory; what is in its shards does not matter here."""
    chance = random.Random(7)
    bodies = {f"shard-{number:06d}.tar": chance.randbytes(size) for number in range(shards)}
    folder.mkdir(parents=True)
    for name, body in bodies.items():
        (folder / name).write_bytes(body)
    entries = tuple(ShardEntry(name, len(body), 10, digest_of(body)) for name, body in bodies.items())
    (folder / "manifest.json").write_bytes(encode_dataset_manifest(DatasetManifest(entries)))
    return bodies


def save(folder: Path, step: int, size: int = 100_000) -> Path:
    """A checkpoint that says itself that it is complete."""
    checkpoint = folder / f"step-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.bin").write_bytes(random.Random(step).randbytes(size))
    commit(checkpoint, step=step)
    return checkpoint


def committed(bucket: Path) -> list[str]:
    return sorted(path.parent.name for path in bucket.glob("run/.stager/*/manifest.json"))


def config_of(folder: Path, extra: str = "", *, node: str = "") -> str:
    return (
        f'cache_bytes = "100MB"\n{node}\n'
        f'[[dataset]]\nsource = "{folder}/bucket/dataset"\n'
        f'[[checkpoint]]\nwatch = "{folder}/saves"\nrun = "{folder}/bucket/run"\nrescan_s = 0.2\n{extra}'
    )


def ask(socket_path: str, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """What curl --unix-socket does."""
    connection = http.client.HTTPConnection("stager", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(10)
    connection.sock.connect(socket_path)
    try:
        connection.request(method, path, body)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A ready daemon with a dataset of four shards and a watched folder."""
    put_dataset(tmp_path / "bucket" / "dataset")
    with daemon(tmp_path, PLAIN, config_of(tmp_path)) as made:
        made.start_ready()
        yield made


def test_the_whole_round(running: DaemonProcess, tmp_path: Path) -> None:
    """It stages, publishes a checkpoint, tells so by every way of asking, and ends with 0, its socket gone."""
    save(tmp_path / "saves", 5)
    running.wait_until(lambda: running.status()["staging"]["cache"]["shards"] == 4, "four shards")
    running.wait_until(lambda: committed(tmp_path / "bucket") == ["step-5"], "the commit")
    status = running.status()
    assert status["ready"] and status["state"] == "running" and status["stores"]["away"] == {}
    assert stat.S_IMODE(os.lstat(running.socket).st_mode) == 0o600
    code, body = ask(running.socket, "GET", "/v1/live")
    assert (code, json.loads(body)) == (200, {"live": True})
    code, body = ask(running.socket, "GET", "/metrics")
    for line in (
        "stager_ready 1.0",
        "stager_cache_shards 4.0",
        "stager_checkpoints_committed_total",
        "stager_loop_lag",
    ):
        assert line.encode() in body
    told = stager("status", "--socket", running.socket, environment=PLAIN)
    assert "4 of 4 shards" in told.stdout and "watching" in told.stdout and told.returncode == 0
    told = stager("status", "--config", str(running.config), "--json", environment=PLAIN)
    assert json.loads(told.stdout)["process"] == status["process"]
    assert stager("status", "--ready", "--socket", running.socket, environment=PLAIN).returncode == 0
    assert running.stop() == 0
    assert not os.path.exists(running.socket)
    assert stager("status", "--live", "--socket", running.socket, environment=PLAIN).returncode == 12


def test_what_callers_get_wrong(running: DaemonProcess) -> None:
    """Every refusal is JSON with a status of its kind; none of them hurts the daemon."""
    cases = [
        ("POST", "/v1/want", b"not json", 422, "FormatError"),
        ("POST", "/v1/want", b'{"dataset": 7}', 422, "FormatError"),
        (
            "POST",
            "/v1/want",
            b'{"dataset": "x", "shard": "../../etc/passwd", "deadline_s": 1}',
            422,
            "FormatError",
        ),
        ("POST", "/v1/want", b'{"dataset": "x", "shard": "s.tar", "deadline_s": 1}', 404, "NotFound"),
        ("POST", "/v1/open", b'{"source": "gs://x/y", "deadline_s": 1}', 502, "NotSupported"),
        ("POST", "/v1/seal", b'{"directory": "/etc", "wait": false, "deadline_s": 1}', 404, "NotFound"),
        ("POST", "/v1/want", b'"' + b"x" * (2 << 20) + b'"', 413, "UsageError"),
        ("GET", "/v1/nothing", None, 404, "UsageError"),
        ("DELETE", "/v1/status", None, 405, "UsageError"),
    ]
    for method, path, body, status, kind in cases:
        code, raw = ask(running.socket, method, path, body)
        error = json.loads(raw)["error"]
        assert (code, error["kind"]) == (status, kind), (path, body and body[:60], raw)
        assert error["message"]
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(running.socket)
        rude.sendall(b"\x00\xff not http\r\n\r\n")
        rude.settimeout(10)
        rude.recv(1000)
    assert running.client.live()


def test_one_daemon_a_cache(running: DaemonProcess, tmp_path: Path) -> None:
    """A second one on the same cache, or on the same socket, exits 11 and names who is there; the first does not notice."""
    second = stager("run", "--config", str(running.config), environment=PLAIN)
    assert second.returncode == 11 and running.process is not None
    assert f"process {running.process.pid}" in second.stderr and "hint:" in second.stderr
    other = stager(
        "run",
        "--config",
        str(running.config),
        environment={**PLAIN, "STAGER_NODE__CACHE": str(tmp_path / "other")},
    )
    assert other.returncode == 11 and running.socket in other.stderr
    assert running.client.ready()[0]


def test_a_killed_daemon_is_succeeded(running: DaemonProcess) -> None:
    """After SIGKILL the next one takes over the socket and the shards, and fetches nothing again."""
    running.wait_until(lambda: running.status()["staging"]["cache"]["shards"] == 4, "four shards")
    running.kill()
    assert os.path.exists(running.socket)
    running.start_ready()
    staging = running.status()["staging"]
    assert (staging["cache"]["shards"], staging["published"]) == (4, 0)


def test_draining_publishes_what_is_complete(tmp_path: Path) -> None:
    """SIGTERM right after a save: not ready any more, still answering, the checkpoint committed, exit code 0."""
    put_dataset(tmp_path / "bucket" / "dataset")
    config = config_of(tmp_path, '[limits]\nupload = "400KB/s"\n').replace(
        "rescan_s = 0.2", "rescan_s = 3600.0"
    )
    with daemon(tmp_path, PLAIN, config) as running:
        running.start_ready()
        save(tmp_path / "saves", 1, size=800_000)
        process = running.process
        assert process is not None
        process.terminate()
        running.wait_until(lambda: running.status()["state"] == "draining", "draining")
        ready, waiting_for = running.client.ready()
        assert not ready and waiting_for[0] == "draining"
        assert process.wait(WAIT_S) == 0
        assert "drain.waiting unpublished=step-1" in running.log()
    assert committed(tmp_path / "bucket") == ["step-1"]


@pytest.mark.parametrize("second_signal", [True, False])
def test_draining_ends(tmp_path: Path, second_signal: bool) -> None:
    """By a second signal at once, or when its time is up: exit code 3, and the next daemon finishes the work."""
    put_dataset(tmp_path / "bucket" / "dataset")
    timeout = "drain_timeout_s = 600" if second_signal else "drain_timeout_s = 1"
    config = config_of(tmp_path, '[limits]\nupload = "100KB/s"\n', node=timeout)
    with daemon(tmp_path, PLAIN, config) as running:
        running.start_ready()
        save(tmp_path / "saves", 1, size=20_000_000)
        running.wait_until(lambda: running.status()["checkpoints"][0]["sealed"] == 1, "the seal")
        process = running.process
        assert process is not None
        process.terminate()
        if second_signal:
            running.wait_until(lambda: running.status()["state"] == "draining", "draining")
            process.terminate()
        assert process.wait(WAIT_S) == 3
        assert "drain.ended unpublished=step-1" in running.log()
        assert committed(tmp_path / "bucket") == []
        running.config.write_text(running.config.read_text().replace("100KB/s", "off"))
        running.start_ready()
        running.wait_until(lambda: committed(tmp_path / "bucket") == ["step-1"], "the commit")
        assert running.stop() == 0


def test_another_file_in_the_sockets_place_is_left_alone(tmp_path: Path) -> None:
    """What is no socket is not replaced: exit code 10, naming it."""
    put_dataset(tmp_path / "bucket" / "dataset")
    with daemon(tmp_path, PLAIN, config_of(tmp_path)) as made:
        Path(made.socket).write_text("precious")
        done = stager("run", "--config", str(made.config), environment=PLAIN)
        assert done.returncode == 10 and made.socket in done.stderr
        assert Path(made.socket).read_text() == "precious"


def test_the_log_level_turns(running: DaemonProcess) -> None:
    """SIGUSR2 turns debugging on, and off again."""
    assert running.process is not None
    for level in ("DEBUG", "INFO"):
        running.process.send_signal(signal.SIGUSR2)
        told = f"log.level level={level}"
        running.wait_until(partial(_is_logged, running, told), level)


def _is_logged(running: DaemonProcess, told: str) -> bool:
    return told in running.log()


def test_an_interrupt_is_a_stop(running: DaemonProcess) -> None:
    """Ctrl-C on a terminal drains as SIGTERM does."""
    assert running.process is not None
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(WAIT_S) == 0


def test_a_store_that_is_away(tmp_path: Path) -> None:
    """Nobody behind the endpoint: the daemon lives, says what it waits for, seals what is saved, and ends with 3."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        # Bound and not listening: refused for as long as the test holds it.
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        config = (
            'cache_bytes = "100MB"\ndrain_timeout_s = 1\n'
            f'[store]\nendpoint = "{endpoint}"\nregion = "us-east-1"\n[[dataset]]\nsource = "s3://bucket/dataset"\n'
            f'[[checkpoint]]\nwatch = "{tmp_path}/saves"\nrun = "s3://bucket/run"\nrescan_s = 0.2\n'
        )
        with daemon(tmp_path, PLAIN, config) as running:
            running.start()
            running.wait_until(lambda: len(running.status()["stores"]["away"]) == 2, "both stores away")
            status = running.status()
            assert "staging" in status["waiting_for"] and "cannot be reached" in str(status["stores"]["away"])
            save(tmp_path / "saves", 3)
            running.wait_until(lambda: running.status()["checkpoints"][0]["sealed"] == 1, "the seal")
            assert running.stop() == 3
