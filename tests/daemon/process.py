"""A real daemon in a process of its own, over a configuration in a folder of the test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stager.client import Client
from stager.errors import StagerError

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


def interruptible() -> None:
    """In a child before its program: take SIGINT again, which a shell's background job, perhaps ours, ignores."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class DaemonProcess:
    """``stager run``, started and killed as often as the test wants."""

    def __init__(self, folder: Path, environment: Mapping[str, str], config: str) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        # A socket's path may have 107 bytes, and a test's folder is deep.
        self.socket_folder = tempfile.mkdtemp(prefix="stager-test-")
        self.socket = f"{self.socket_folder}/s"
        self.cache = folder / "cache"
        self.config = folder / "stager.toml"
        node = f'[node]\ncache = "{self.cache}"\nsocket = "{self.socket}"\n'
        self.config.write_text(node + config)
        self.client = Client(self.socket)
        self.process: subprocess.Popen[str] | None = None
        self.starts = 0

    def start(self) -> subprocess.Popen[str]:
        """Start it; its log is in the folder."""
        self.starts += 1
        with open(self.folder / f"daemon-{self.starts}.log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stager", "run", "--config", str(self.config)],
                env=self.environment,
                stderr=log,
                stdout=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                preexec_fn=interruptible,
            )
        return self.process

    def start_ready(self) -> None:
        """Start it and wait until it says that it is ready."""
        self.start()
        self.wait_until(lambda: self.client.ready()[0], "ready")

    def wait_until(self, done: Callable[[], bool], purpose: str, *, wait_s: float = WAIT_S) -> None:
        """Ask again until it is so; a daemon that ends meanwhile is a failure with its log."""
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            try:
                if done():
                    return
            except StagerError:
                pass
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.log()}")
            time.sleep(0.05)
        raise AssertionError(f"waited {wait_s:g} s for {purpose}:\n{self.log()}")

    def status(self) -> Mapping[str, Any]:
        return self.client.status()

    def kill(self) -> None:
        """SIGKILL, by process id, for it and whatever it started."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(WAIT_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(WAIT_S)

    def log(self) -> str:
        return (self.folder / f"daemon-{self.starts}.log").read_text()


@contextmanager
def daemon(folder: Path, environment: Mapping[str, str], config: str) -> Iterator[DaemonProcess]:
    """A daemon, not yet started, that is gone after the block."""
    made = DaemonProcess(folder, environment, config)
    try:
        yield made
    finally:
        made.kill()
        shutil.rmtree(made.socket_folder, ignore_errors=True)


def stager(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """A stager command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "stager", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """A command's JSON, with what it said if there is none."""
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise AssertionError(f"exit code {done.returncode}: {done.stdout}{done.stderr}") from None
