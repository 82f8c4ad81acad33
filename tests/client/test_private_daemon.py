"""The daemon that a trainer starts for itself: one for a node, ended with its last client."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3_server import S3Endpoint
from stager.client import Client, private
from stager.errors import ConfigError, Unavailable


@pytest.fixture
def short_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for sockets, whose paths must be short."""
    path = Path(tempfile.mkdtemp(prefix="s-"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    private.release_private_daemons()
    shutil.rmtree(path)


def wait_until(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_daemon_that_cannot_start_tells_its_log(short_tmp: Path, tmp_path: Path) -> None:
    """A wrong bound ends the daemon; the error ends with what it said."""
    with pytest.raises(Unavailable, match="cache_bytes"):
        private.start_private_daemon(str(tmp_path / "cache"), "nonsense", 60)


def test_foreign_files_are_refused(short_tmp: Path, tmp_path: Path) -> None:
    """A directory that others may enter is not used for sockets."""
    files = private.private_files(str(tmp_path / "cache"))
    os.mkdir(files.directory)
    os.chmod(files.directory, 0o777)
    with pytest.raises(ConfigError, match="this user alone"):
        private.start_private_daemon(str(tmp_path / "cache"), "1GB", 5)


def test_one_daemon_for_all_and_none_after_the_last(
    short_tmp: Path, tmp_path: Path, seaweedfs: S3Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes share the daemon of a cache; when the last has ended, however, it ends too."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    cache = str(tmp_path / "cache")
    code = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from stager.client.private import start_private_daemon\n"
        "print(start_private_daemon(sys.argv[2], '1GB', 60), flush=True); sys.stdin.read()"
    )
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(short_tmp), cache],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        sockets = {other.stdout.readline().strip() for other in others if other.stdout}
        sockets.add(private.start_private_daemon(cache, "1GB", 60))
        assert len(sockets) == 1
        client = Client(sockets.pop())
        process = client.status()["process"]
        others[0].kill()
        private.release_private_daemons()
        assert client.status()["process"] == process
    finally:
        for other in others:
            other.kill()
            other.communicate()
    wait_until(lambda: not client.live())
    wait_until(lambda: not os.path.exists(f"/proc/{process}"))
