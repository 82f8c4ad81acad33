"""What hostile or unlucky users leave in folders, buckets, disks and sockets; the real daemon lives on and says so."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stager.checksum import digest_of
from stager.formats.commits import CommitMarker, encode_marker
from stager.formats.manifest import DatasetManifest, ShardEntry, encode_dataset_manifest
from tests.daemon.process import DaemonProcess, daemon, json_of, stager

NOTHING: Mapping[str, str] = {}
LINK_MARKER = "root:"


def save(folder: Path, step: int, files: Mapping[str, bytes]) -> Path:
    """A checkpoint, marked as finished."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        (folder / name).write_bytes(body)
    mark(folder, step)
    return folder


def mark(folder: Path, step: int) -> None:
    hidden = folder.parent / f".{folder.name}.marker"
    hidden.write_bytes(encode_marker(CommitMarker(step)))
    hidden.rename(folder / ".stager-commit.json")


def put_dataset(folder: Path, bodies: Mapping[str, bytes]) -> None:
    """Shards and their manifest, in a bucket that is a directory."""
    folder.mkdir(parents=True)
    for name, body in bodies.items():
        (folder / name).write_bytes(body)
    entries = tuple(ShardEntry(name, len(body), 1, digest_of(body)) for name, body in bodies.items())
    (folder / "manifest.json").write_bytes(encode_dataset_manifest(DatasetManifest(entries)))


def watching(folder: Path, extra: str = "") -> str:
    return (
        f'cache_bytes = "50MB"\n[[checkpoint]]\nwatch = "{folder}/watch"\nrun = "{folder}/bucket/run"\n'
        f"rescan_s = 0.2\n{extra}"
    )


def reasons(running: DaemonProcess) -> dict[str, str]:
    """Why each name in the watched folder is refused."""
    shown = running.status()["checkpoints"][0]["checkpoints"]
    return {entry["name"]: entry["reason"] for entry in shown if entry["state"] == "corrupt"}


def committed(running: DaemonProcess) -> set[str]:
    shown = running.status()["checkpoints"][0]["checkpoints"]
    return {entry["name"] for entry in shown if entry["state"] == "committed"}


def test_what_is_no_checkpoint_in_the_watched_folder(tmp_path: Path) -> None:
    """Links out of the folder, in circles or to nothing, names of no alphabet, pipes: told by name; others are taken."""
    watch = tmp_path / "watch"
    with daemon(tmp_path, NOTHING, watching(tmp_path)) as running:
        running.start_ready()
        links = {"outside": "/etc/passwd", "circle": "link", "nowhere": "/does/not/exist", "folder": "/tmp"}
        for name, target in links.items():
            (watch / name).mkdir()
            os.symlink(target, watch / name / "link")
            save(watch / name, 1, {"weights.bin": b"w"})
        strange = os.fsencode(watch) + b"/strange-\xff"
        os.mkdir(strange)
        os.mkfifo(watch / "pipe.pt")
        os.symlink("step-3", watch / "latest")
        save(watch / "step-2", 2, {"tab\tname": b"t"})
        # What a link inside the folder leads to is pinned and sent, not the link.
        (watch / "step-3").mkdir()
        os.symlink("real name with ü & % [x].bin", watch / "step-3" / "link.bin")
        save(watch / "step-3", 3, {"real name with ü & % [x].bin": b"real"})
        refused = {*links, "step-2", "strange-\\udcff"}
        running.wait_until(lambda: set(reasons(running)) == refused, "refusals of all that is wrong")
        running.wait_until(lambda: "step-3" in committed(running), "the one that is right")
        assert all("symbolic link" in reasons(running)[name] for name in links)
        shown = stager("status", "--socket", running.socket, environment=NOTHING)
        assert shown.returncode == 0 and "strange-" in shown.stdout and "step-3" in shown.stdout
        target = tmp_path / "restored"
        assert stager("restore", f"{tmp_path}/bucket/run", str(target), environment=NOTHING).returncode == 0
        assert (target / "link.bin").read_bytes() == b"real"
        assert running.stop() == 0 and "Traceback" not in running.log()
    sent = b"".join(path.read_bytes() for path in (tmp_path / "bucket").rglob("*") if path.is_file())
    assert LINK_MARKER.encode() not in sent


def test_a_watched_folder_that_goes_away(tmp_path: Path) -> None:
    """Removed, replaced by a file, made again: the daemon says so, lives on, and takes what is saved afterwards."""
    watch = tmp_path / "watch"
    with daemon(tmp_path, NOTHING, watching(tmp_path)) as running:
        running.start_ready()
        save(watch / "step-1", 1, {"a": b"1"})
        running.wait_until(lambda: "step-1" in committed(running), "the first commit")
        subprocess.run(["rm", "-rf", str(watch)], check=True)
        watch.write_text("not a folder")
        running.wait_until(lambda: bool(running.status()["checkpoints"][0]["problem"]), "the problem")
        watch.unlink()
        save(watch / "step-2", 2, {"a": b"2"})
        running.wait_until(lambda: "step-2" in committed(running), "the commit after it is back")
        assert not running.status()["checkpoints"][0]["problem"]
        assert running.stop() == 0 and "Traceback" not in running.log()


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    """A cache that is a file, a watched folder below one: both are told at once, exit code 10, no traceback."""
    for name in ("file", "other"):
        (tmp_path / name).write_text("x")
    config = tmp_path / "stager.toml"
    config.write_text(
        f'[node]\ncache = "{tmp_path}/file"\ncache_bytes = "1MB"\nsocket = "{tmp_path}/file/socket"\n'
        f'[[checkpoint]]\nwatch = "{tmp_path}/other/watch"\nrun = "{tmp_path}/bucket"\n'
    )
    done = stager("run", "--config", str(config), environment=NOTHING)
    assert done.returncode == 10 and "Traceback" not in done.stderr and "hint:" in done.stderr
    for place in ("node.cache", "node.socket", "checkpoint[0].watch"):
        assert place in done.stderr


def test_sections_that_do_not_fit(tmp_path: Path) -> None:
    """Nested watched folders, a cache in one, one run twice, unknown stores: one error names them all."""
    config = tmp_path / "stager.toml"
    config.write_text(
        '[node]\ncache = "/c/w/cache"\ncache_bytes = "1MB"\nsocket = "/c/s"\n'
        '[[checkpoint]]\nwatch = "/c/w"\nrun = "s3://b/r"\n[[checkpoint]]\nwatch = "/c/w/x"\nrun = "s3://b/r/"\n'
    )
    done = stager("config", "check", "--config", str(config), environment=NOTHING)
    assert done.returncode == 10 and "3 problems" in done.stderr
    for told in ("the cache `/c/w/cache` lies in", "one lies in the other", "go into the run"):
        assert told in done.stderr
    config.write_text(config.read_text().replace('"s3://b/r"', '"ftp://b"').replace('"1MB"', '"much"'))
    done = stager("config", "check", "--config", str(config), environment=NOTHING)
    assert done.returncode == 10 and "checkpoint[0].run: `ftp://b`" in done.stderr and "`much`" in done.stderr


def exchange(path: str, raw: bytes) -> bytes:
    """Send bytes to the socket; the beginning of the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(path)
        try:
            connection.sendall(raw)
        except BrokenPipeError:
            pass  # it has read enough
        try:
            return connection.recv(1 << 16)
        except ConnectionResetError:
            return b""


def test_hostile_clients_of_the_socket(tmp_path: Path) -> None:
    """Garbage, huge and slow bodies, text that is no Unicode: each is refused, and the next caller is served."""
    with daemon(tmp_path, NOTHING, watching(tmp_path)) as running:
        running.start_ready()

        def post(route: str, body: bytes, length: int | None = None) -> bytes:
            size = len(body) if length is None else length
            head = f"POST {route} HTTP/1.1\r\nHost: stager\r\nContent-Length: {size}\r\n\r\n"
            return exchange(running.socket, head.encode() + body)

        assert b" 400 " in exchange(running.socket, b"\x16\x03\x01 garbage\r\n\r\n")
        assert b" 400 " in exchange(running.socket, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n")
        assert b" 413 " in post("/v1/open", b"x" * 3_000_000)
        assert b" 422 " in post("/v1/open", b"[" * 100_000)
        assert b" 422 " in post("/v1/open", b'{"source": "s3://b/\\ud800"}')
        assert b" 422 " in post("/v1/want", b'{"dataset": "d", "shard": "../../etc/passwd", "deadline_s": 1}')
        assert b" 422 " in post("/v1/want", b'{"dataset": "d", "shard": "s", "deadline_s": 1e999}')
        with ExitStack() as slow:
            for _ in range(100):
                connection = slow.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connection.settimeout(10)
                connection.connect(running.socket)
                connection.sendall(b"POST /v1/open HTTP/1.1\r\nHost: stager\r\nContent-Length: 500\r\n\r\n{")
            assert stager("status", "--socket", running.socket, "--live", environment=NOTHING).returncode == 0
            assert running.stop() == 0 and "Traceback" not in running.log()


def test_damaged_shards_in_the_bucket(tmp_path: Path) -> None:
    """Altered, truncated and missing ones are named in the status and never visible; the others are staged."""
    chance = random.Random(3)
    bodies = {f"shard-{number}.tar": chance.randbytes(300_000) for number in range(5)}
    bucket = tmp_path / "bucket" / "data"
    put_dataset(bucket, bodies)
    altered = bytearray(bodies["shard-1.tar"])
    altered[1000] ^= 1
    (bucket / "shard-1.tar").write_bytes(altered)
    (bucket / "shard-2.tar").write_bytes(altered[:1000])
    (bucket / "shard-3.tar").unlink()
    config = f'cache_bytes = "50MB"\n[[dataset]]\nsource = "{bucket}"\n'
    with daemon(tmp_path, NOTHING, config) as running:
        running.start_ready()
        running.wait_until(lambda: running.status()["staging"]["cache"]["shards"] == 2, "two shards")
        running.wait_until(lambda: len(running.status()["staging"]["failures"]) == 3, "three failures")
        failures = running.status()["staging"]["failures"]
        assert all(any(f"shard-{bad}.tar" in name for name in failures) for bad in (1, 2, 3))
        visible = {path.name for path in (running.cache / "shards").rglob("*.tar")}
        assert visible == {"shard-0.tar", "shard-4.tar"}
        assert running.stop() == 0 and "Traceback" not in running.log()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, so that it can be full."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until nothing goes any more."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def test_a_full_disk(tmp_path: Path) -> None:
    """With no byte left under its cache, the daemon says so, goes on sealing and committing, and starts again."""
    with small_disk(tmp_path / "small", "3m") as small:
        bodies = {f"shard-{number}.tar": bytes([number]) * 1_300_000 for number in range(3)}
        put_dataset(tmp_path / "bucket" / "data", bodies)
        extra = f'[[dataset]]\nsource = "{tmp_path}/bucket/data"\n'
        with daemon(tmp_path, NOTHING, watching(tmp_path, extra)) as running:
            running.config.write_text(
                running.config.read_text().replace(str(running.cache), f"{small}/cache")
            )
            running.start_ready()
            running.wait_until(
                lambda: bool(running.status()["staging"]["failures"]), "the shard with no room"
            )
            told = list(running.status()["staging"]["failures"].values())
            assert all("space" in reason for reason in told)
            fill(small / "filler")
            save(tmp_path / "watch" / "step-1", 1, {"weights.bin": b"w" * 9_000_000})
            running.wait_until(lambda: "step-1" in committed(running), "the commit on a full disk")
            assert running.stop() == 0 and "Traceback" not in running.log()
            running.start_ready()
            save(tmp_path / "watch" / "step-2", 2, {"weights.bin": b"v" * 9_000_000})
            running.wait_until(
                lambda: "step-2" in committed(running), "the commit after a start on a full disk"
            )
            assert running.stop() == 0 and "Traceback" not in running.log()
        listed = json_of(stager("ls", f"{tmp_path}/bucket/run", "--json", environment=NOTHING))
        assert [entry["step"] for entry in listed["checkpoints"]] == [1, 2]


def test_restores_that_cannot_be(tmp_path: Path) -> None:
    """A path through a file, a full disk, a damaged or missing object: told with a hint, and nothing is at the target."""
    run, saved = f"{tmp_path}/bucket/run", tmp_path / "step-5"
    save(saved, 5, {"weights.bin": bytes(range(256)) * 8000})
    assert stager("seal", str(saved), "--run", run, environment=NOTHING).returncode == 0
    (tmp_path / "file").write_text("x")

    def refused(target: Path, code: int, told: str) -> None:
        done = stager("restore", run, str(target), environment=NOTHING)
        assert done.returncode == code and told in done.stderr and "hint:" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and not (target.is_dir() and list(target.iterdir()))

    refused(tmp_path / "file" / "below", 2, "is no directory")
    with small_disk(tmp_path / "small", "1m") as small:
        refused(small / "target", 12, "lacks")
        assert not list(small.iterdir()) or all(not path.is_file() for path in small.rglob("*.bin"))
    body = tmp_path / "bucket" / "run" / "step-5" / "weights.bin"
    whole = body.read_bytes()
    body.write_bytes(whole[:-1] + b"?")
    refused(tmp_path / "target", 13, "step-5/weights.bin")
    body.unlink()
    refused(tmp_path / "target", 12, "step-5/weights.bin")
    (tmp_path / "bucket" / "run" / ".stager" / "step-5" / "manifest.json").write_bytes(b"\xff")
    refused(tmp_path / "target", 12, "damaged")
