"""The servers themselves: they answer, and nothing of them outlives whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from s3_server import S3Endpoint, ServerProcess
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
