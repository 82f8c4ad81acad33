"""The servers themselves: they answer, and nothing of them outlives whoever started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from s3_server import S3Endpoint, SeaweedServer, ServerProcess
from s3_server import main as serve
from tests.servers.choice import BUCKET, make_bucket


def test_server_answers(s3_server: S3Endpoint) -> None:
    """The bucket is there, and making it again is fine."""
    make_bucket(s3_server, BUCKET)


def wait_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_kill_ends_the_child(tmp_path: Path) -> None:
    """`kill` leaves no process, and may be called again."""
    server = ServerProcess(["sleep", "60"], tmp_path / "log")
    server.kill()
    server.kill()
    assert wait_gone(server.pid)


def test_child_dies_with_its_parent(tmp_path: Path) -> None:
    """SIGKILL of the process that started a server ends the server."""
    starter = (
        "import pathlib, sys, time\n"
        "from s3_server import ServerProcess\n"
        "print(ServerProcess(['sleep', '60'], pathlib.Path(sys.argv[1])).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    examples = str(Path(__file__).parents[2] / "examples")
    with subprocess.Popen(
        [sys.executable, "-c", starter, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": examples},
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    assert wait_gone(pid)


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Another server's answers do not pass for ours."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert serve(["--port", str(port)]) == 1
    assert str(port) in capsys.readouterr().err


def test_a_folder_is_served_again(tmp_path: Path) -> None:
    """``--data`` keeps a bucket over a restart."""
    for _ in range(2):
        SeaweedServer(tmp_path, buckets=["kept"]).kill()
