"""The whole loop on real files and a real S3 server: pack, stage, train, save, lose everything, restore, resume, compare.

    make demo

Small files are the running interpreter's own standard library. Trainer and daemon are killed with SIGKILL in the middle of
the run, the node's cache and its checkpoints are deleted, and the resumed run must see the same samples and compute the same
losses, to the last bit, as a run that was never interrupted. Every command is printed as it can be repeated by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from s3_server import ACCESS_KEY, SECRET_KEY, S3Endpoint, SeaweedServer

HERE = Path(__file__).resolve().parent
PLACE = Path.cwd() / ".demo"
BUCKET = "demo"
DATASET = f"s3://{BUCKET}/python-sources"
RUN = f"s3://{BUCKET}/runs/bytes"
SAVE_EVERY = 25
STEPS_AFTER_RESTORE = 60
WAIT_S = 180.0

out = Console(highlight=False, soft_wrap=True)


class DemoFailed(Exception):
    """A step did not do what it should; the message says which and what was seen."""


class Demo:
    """The demo's folder, server and processes."""

    def __init__(self, server: S3Endpoint) -> None:
        # A socket's path may have 107 bytes, and a checkout may lie deep.
        self.socket_folder = tempfile.mkdtemp(prefix="stager-demo-")
        self.socket = f"{self.socket_folder}/stager.sock"
        self.config = PLACE / "stager.toml"
        self.environment = {**os.environ, **server.environment(), "STAGER_SOCKET": self.socket}
        self.started: list[subprocess.Popen[bytes]] = []

    def stager(self, *arguments: str, quiet: bool = False) -> str:
        """Run a stager command to its end; returns its standard output."""
        if not quiet:
            show("stager", *arguments)
        done = subprocess.run(
            [sys.executable, "-m", "stager", *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
        )
        if not quiet and done.stdout:
            out.print(done.stdout.rstrip(), markup=False)
        if done.returncode:
            raise DemoFailed(f"stager {shlex.join(arguments)} ended with {done.returncode}")
        return done.stdout

    def start(
        self, shown: Sequence[str], command: Sequence[str], log: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process of our own; its standard error goes to a file or to ours."""
        show(*shown, "&" if log else "")
        with contextlib.ExitStack() as stack:
            errors = stack.enter_context(open(PLACE / log, "ab")) if log else None
            process = subprocess.Popen(command, env=self.environment, stderr=errors, start_new_session=True)
        self.started.append(process)
        return process

    def daemon(self) -> subprocess.Popen[bytes]:
        """The daemon, ready."""
        arguments = ["run", "--config", str(self.config)]
        process = self.start(
            ["stager", *arguments], [sys.executable, "-m", "stager", *arguments], "daemon.log"
        )
        for _ in waiting("the daemon to be ready"):
            if process.poll() is not None:
                raise DemoFailed(f"the daemon ended with {process.returncode}:\n{tail('daemon.log')}")
            probe = [sys.executable, "-m", "stager", "status", "--ready"]
            if (
                subprocess.run(probe, env=self.environment, capture_output=True, timeout=WAIT_S).returncode
                == 0
            ):
                return process
        raise AssertionError("unreachable")

    def trainer(self, folder: str, steps: int, log: str, *more: str) -> subprocess.Popen[bytes]:
        """The training script, started."""
        script = "examples/train_bytes.py"
        arguments = [
            DATASET,
            relative(PLACE / folder),
            "--steps",
            str(steps),
            "--save-every",
            str(SAVE_EVERY),
        ]
        arguments += ["--log", relative(PLACE / log), *more]
        command = [sys.executable, str(HERE / "train_bytes.py"), *arguments]
        return self.start(["python", script, *arguments], command)

    def end_all(self) -> None:
        """Whatever still runs ends with us: the group of each process that was started, by its id."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.socket_folder, ignore_errors=True)


def main() -> None:
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    began = time.monotonic()
    heading("1. A real S3 server on this machine")
    server = SeaweedServer(PLACE / "s3", buckets=[BUCKET])
    show("source", relative(Path(sys.executable).parent / "activate"))
    port = server.endpoint.endpoint.rpartition(":")[2]
    data = relative(PLACE / "s3")
    show("python", "examples/s3_server.py", "--bucket", BUCKET, "--port", port, "--data", data, "&")
    try:
        demo = Demo(server.endpoint)
        out.print(
            f"  {server.endpoint.endpoint}, access key {ACCESS_KEY}, secret key {SECRET_KEY}", markup=False
        )
        for name in (
            "AWS_ENDPOINT_URL",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_DEFAULT_REGION",
            "STAGER_SOCKET",
        ):
            if name in demo.environment:
                show(f"export {name}={demo.environment[name]}", quote=False)
        try:
            play(demo)
        finally:
            demo.end_all()
    except DemoFailed as error:
        out.print(f"[bold red]the demo failed:[/] {error}")
        sys.exit(1)
    finally:
        server.kill()
    out.print(
        f"\nDone in {time.monotonic() - began:.0f} s. What it left is in {relative(PLACE)}: with the commands"
        " of 1 and 3 server and daemon run again on it, for `stager status`, `stager ls`, ...",
        markup=False,
    )


def play(demo: Demo) -> None:
    pack(demo)
    heading("3. The daemon stages the shards into this node's cache")
    write_config(demo)
    daemon = demo.daemon()
    heading("4. Training, with checkpoints by torch's own DCP; then SIGKILL for trainer and daemon")
    steps_done = train_until_killed(demo, daemon)
    heading("5. The node is lost: its cache and its checkpoints are gone")
    for name in ("cache", "checkpoints"):
        show("rm", "-rf", relative(PLACE / name))
        shutil.rmtree(PLACE / name)
    heading("6. Restore the newest checkpoint that was committed, and resume on a fresh node")
    demo.stager("ls", RUN)
    demo.stager("restore", RUN, relative(PLACE / "restored"))
    (PLACE / "checkpoints").mkdir()
    daemon = demo.daemon()
    resumed_from = json.loads((PLACE / "restored" / ".stager-commit.json").read_text())["step"]
    last = resumed_from + STEPS_AFTER_RESTORE
    finish(demo.trainer("checkpoints", last, "resumed.jsonl", "--resume", relative(PLACE / "restored")))
    heading("7. The same run, never interrupted, to compare with")
    finish(demo.trainer("reference", last, "reference.jsonl"))
    compare(steps_done, resumed_from, last)
    heading("8. SIGTERM drains the daemon: the last checkpoint is in the bucket when it ends")
    demo.stager("status")
    show(f"kill {daemon.pid}", quote=False)
    daemon.terminate()
    if code := daemon.wait(WAIT_S):
        raise DemoFailed(f"the daemon ended with {code}:\n{tail('daemon.log')}")
    demo.stager("ls", RUN)
    committed = [
        entry["step"] for entry in json.loads(demo.stager("ls", RUN, "--json", quiet=True))["checkpoints"]
    ]
    if committed[-1] != last:
        raise DemoFailed(f"the last checkpoint, step {last}, is not in the bucket: {committed}")


def pack(demo: Demo) -> None:
    heading("2. Pack the standard library's sources into shards, straight into the bucket")
    arguments = ["pack", sysconfig.get_path("stdlib"), DATASET, "--max-bytes", "4MB", "--include", "*.py"]
    for name in ("site-packages", "dist-packages", "__pycache__", "__phello__"):
        arguments += ["--exclude", name]
    demo.stager(*arguments)


def write_config(demo: Demo) -> None:
    (PLACE / "checkpoints").mkdir()
    demo.config.write_text(
        f"""[node]
cache = "{PLACE}/cache"
cache_bytes = "200MB"
socket = "{demo.socket}"

[[dataset]]
source = "{DATASET}"

[[checkpoint]]
watch = "{PLACE}/checkpoints"
run = "{RUN}"
tiers = [{{url = "{RUN}", keep = {{last = 3}}}}]
"""
    )
    show("cat", relative(demo.config))
    out.print(demo.config.read_text().rstrip(), markup=False)


def train_until_killed(demo: Demo, daemon: subprocess.Popen[bytes]) -> dict[int, Any]:
    """Train without an end; kill both once two checkpoints are committed and training has gone on past them."""
    trainer = demo.trainer("checkpoints", 1_000_000, "killed.jsonl")
    committed = 0
    for _ in waiting("two checkpoints in the bucket"):
        if trainer.poll() is not None or daemon.poll() is not None:
            raise DemoFailed(f"trainer or daemon ended by itself:\n{tail('daemon.log')}")
        found = json.loads(demo.stager("ls", RUN, "--json", quiet=True))["checkpoints"]
        committed = max((entry["step"] for entry in found), default=0)
        if committed >= 2 * SAVE_EVERY and max(read_log("killed.jsonl"), default=0) > committed:
            break
    show(f"kill -9 {trainer.pid} {daemon.pid}", quote=False)
    for process in (trainer, daemon):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = read_log("killed.jsonl")
    out.print(f"  killed after step {max(done)}; committed in the bucket: step {committed}", markup=False)
    return done


def compare(killed: Mapping[int, Any], resumed_from: int, last: int) -> None:
    """The interrupted run, put together, against the uninterrupted one: samples and losses of every step."""
    reference, resumed = read_log("reference.jsonl"), read_log("resumed.jsonl")
    if sorted(resumed) != list(range(resumed_from + 1, last + 1)):
        raise DemoFailed(f"the resumed run made steps {sorted(resumed)}")
    for step in range(1, last + 1):
        seen = killed[step] if step <= resumed_from else resumed[step]
        for fact in ("keys", "loss"):
            if seen[fact] != reference[step][fact]:
                raise DemoFailed(f"step {step}: {fact} {seen[fact]}, uninterrupted {reference[step][fact]}")
    first, end = (float.fromhex(reference[step]["loss"]) for step in (1, last))
    out.print(
        f"  [bold green]the same:[/] samples and losses of all {last} steps, interrupted after {max(killed)},"
        f" resumed from {resumed_from}; loss {first:.3f} to {end:.3f}"
    )


def read_log(name: str) -> dict[int, Any]:
    """The trainer's log by step; a line that a kill cut short is not there."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (PLACE / name).read_text().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                found[entry["step"]] = entry
    return found


def waiting(purpose: str) -> Iterator[None]:
    """Turns of a wait that ends in an error."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        yield
        time.sleep(0.2)
    raise DemoFailed(f"waited {WAIT_S:.0f} s for {purpose}:\n{tail('daemon.log')}")


def finish(process: subprocess.Popen[bytes]) -> None:
    if code := process.wait(WAIT_S):
        raise DemoFailed(f"the trainer ended with {code}")


def tail(name: str) -> str:
    path = PLACE / name
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""


def relative(path: Path) -> str:
    return os.path.relpath(path)


def heading(text: str) -> None:
    out.print(f"\n[bold]{text}[/]")


def show(*words: str, quote: bool = True) -> None:
    """A command as a user would type it."""
    kept = [word for word in words if word]
    line = " ".join(word if word == "&" or not quote else shlex.quote(word) for word in kept)
    out.print("$ " + line, style="cyan", markup=False)


if __name__ == "__main__":
    main()
