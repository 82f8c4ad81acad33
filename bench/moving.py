"""Moving bytes: stager beside its peers, in turn, in one run; medians, spreads, CPU seconds, memory and ratios.

    make bench                                        # everything; writes docs/bench/moving.{json,md,svg}
    make bench BENCH_FLAGS='--rounds 3 --cases shards --peers s5cmd --checkpoint-bytes 1000000000 --output /tmp/moving'

Every contender moves the same bytes between the same server and the same directory. Which one begins changes from round to
round. Interpreters are started and connected before the clock, s5cmd and rclone within it (they take milliseconds). CPU
seconds are those of all processes of a contender; the server's are not counted, though it shares the cores.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from awscrt import checksums
from moving_cases import BUCKET, MIB, Work
from moving_report import write_report
from moving_servers import SERVERS, S3Endpoint, missing

HERE = Path(__file__).resolve().parent
OURS = "stager"
PYTHON_PEERS = ("boto3", "boto3+crt", "obstore", "s3torchconnector", "pyarrow")
PEERS = ("s5cmd", "rclone", *PYTHON_PEERS)
ROUND_TIMEOUT_S = 600
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Case:
    """Files of one size in one direction against one server."""

    name: str
    direction: str
    server: str
    count: int
    size: int


@dataclass(frozen=True, slots=True)
class Round:
    """What one round cost."""

    seconds: float
    cpu_s: float
    rss_bytes: int


def cases(options: argparse.Namespace) -> list[Case]:
    shards = max(1, options.shard_bytes // (64 * MIB))
    size = options.checkpoint_bytes // 8
    small = options.small_objects
    found = []
    for server in options.servers:
        found += [Case("shards", "download", server, shards, 64 * MIB)]
        if server != "nginx":
            found += [Case("checkpoint", "upload", server, 8, size)]
        found += [Case("small", "download", server, small, 4096)]
        if server != "nginx":
            found += [Case("small", "upload", server, small, 4096)]
    return [case for case in found if case.name in options.cases and case.direction in options.directions]


class Bench:
    """The peers' environment, a working directory, and what is measured."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.tools = Path(options.peers_venv) / "bin"
        self.failures: dict[tuple[str, str, str], str] = {}

    def run_case(self, case: Case, endpoint: S3Endpoint, root: Path | None) -> dict[str, Any]:
        work, source = self._prepare(case, endpoint, root)
        contenders = [OURS, *self.options.peers]
        rounds: dict[str, list[Round]] = {name: [] for name in contenders}
        # Not counted: memory that nobody has touched yet is slower than the same memory used again.
        self._one_round("s5cmd", work, source, -1)
        for number in range(self.options.rounds):
            turn = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
            for name in turn:
                if (name, work.prefix, work.endpoint) in self.failures:
                    continue
                done = self._one_round(name, work, source, number)
                if done is not None:
                    rounds[name].append(done)
                    rate = work.total_bytes / done.seconds / 1e6
                    print(
                        f"  {case.server:9} {case.name:10} {case.direction:8} {number} {name:16} {rate:8.1f} MB/s"
                        f" {len(work.names) / done.seconds:8.0f} objects/s {done.cpu_s:6.2f} CPU s"
                        f" {done.rss_bytes / MIB:6.0f} MiB",
                        file=sys.stderr,
                        flush=True,
                    )
        shutil.rmtree(source, ignore_errors=True)
        if root is not None:
            shutil.rmtree(root / BUCKET / work.prefix, ignore_errors=True)
        return summary(case, work, rounds)

    def _prepare(self, case: Case, endpoint: S3Endpoint, root: Path | None) -> tuple[Work, Path]:
        """Local files, and their copies in the store for a download."""
        source = self.folder / "source"
        source.mkdir()
        chance = random.Random(7)
        block = chance.randbytes(min(case.size, 64 * MIB))
        names, crcs = [], []
        for number in range(case.count):
            # Every file is another one: nobody may gain from sending the same bytes twice.
            head = number.to_bytes(8, "little")
            name, left, crc = f"file-{number:06d}.bin", case.size, 0
            with open(source / name, "wb") as file:
                while left:
                    piece = (head + block[8:])[:left]
                    file.write(piece)
                    crc, left = checksums.crc64nvme(piece, crc), left - len(piece)
            names.append(name)
            crcs.append(crc)
        prefix = f"{case.name}-{case.direction}/"
        provider = "generic" if endpoint.name == "nginx" else endpoint.name
        work = Work(
            case.direction,
            endpoint.endpoint,
            provider,
            prefix,
            tuple(names),
            case.size,
            tuple(crcs),
            str(source),
        )
        self.environment = {
            **os.environ,
            **endpoint.environment(),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REGION": "us-east-1",
            "PYTHONPATH": f"{HERE.parent}:{HERE}",
        }
        if case.direction == "download":
            if root is not None:
                shutil.copytree(source, root / BUCKET / prefix)
            else:
                command = self._command("s5cmd", replace(work, direction="upload"))
                subprocess.run(command, check=True, env=self.environment, stdout=subprocess.DEVNULL)
            work = replace(work, folder=str(self.folder / "target"))
        return work, source

    def _one_round(self, name: str, asked: Work, source: Path, number: int) -> Round | None:
        target = self.folder / "target"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        work = asked
        if work.direction == "upload":
            work = replace(work, prefix=f"{work.prefix}{name}-{number}/")
        os.sync()
        try:
            done = measure(self._command(name, work), self.environment, waits=name in (OURS, *PYTHON_PEERS))
            if work.direction == "download":
                check_same(source, target, work)
            return done
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            self.failures[name, asked.prefix, work.endpoint] = str(error)
            print(f"  {name} failed: {error}", file=sys.stderr, flush=True)
            return None

    def _command(self, name: str, work: Work) -> list[str]:
        if name == OURS:
            return [sys.executable, str(HERE / "moving_stager.py"), work.encode()]
        if name in PYTHON_PEERS:
            return [str(self.tools / "python"), str(HERE / "moving_peers.py"), name, work.encode()]
        if name == "s5cmd":
            script = self.folder / "s5cmd.txt"
            remote = [f"s3://{BUCKET}/{work.prefix}{file}" for file in work.names]
            local = [f"{work.folder}/{file}" for file in work.names]
            ends = (remote, local) if work.direction == "download" else (local, remote)
            script.write_text(
                "".join(f"cp {source} {target}\n" for source, target in zip(*ends, strict=True))
            )
            return [
                str(self.tools / "s5cmd"),
                "--endpoint-url",
                work.endpoint,
                "--log",
                "error",
                "run",
                str(script),
            ]
        listed = self.folder / "rclone.txt"
        listed.write_text("".join(f"{file}\n" for file in work.names))
        remote = f":s3,provider=Other,env_auth=true,endpoint='{work.endpoint}':{BUCKET}/{work.prefix}"
        ends = [remote, work.folder] if work.direction == "download" else [work.folder, remote]
        transfers = "8" if work.size >= MIB else "48"
        return [
            str(self.tools / "rclone"), "--config", "/dev/null", "copy", *ends, "--files-from-raw", str(listed),
            "--no-traverse", "--no-check-dest", "--s3-no-check-bucket", "--transfers", transfers, "--checkers", transfers,
        ]  # fmt: skip


def measure(command: Sequence[str], environment: dict[str, str], *, waits: bool) -> Round:
    """Run a command to its end. With ``waits`` it says ``ready``, begins at a line, and says ``done``."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    complaints: list[str] = []
    reading = threading.Thread(target=lambda: complaints.append(process.stderr.read()), daemon=True)
    reading.start()
    watch = _Memory(process.pid)
    guard = threading.Timer(ROUND_TIMEOUT_S, lambda: os.killpg(process.pid, signal.SIGKILL))
    guard.start()
    watch.start()
    try:
        cpu_before = 0.0
        if waits:
            _expect(process, "ready", complaints, reading)
            cpu_before = session_cpu_s(process.pid)
            began = time.perf_counter()
            print(file=process.stdin, flush=True)
            _expect(process, "done", complaints, reading)
            seconds, cpu_s = time.perf_counter() - began, session_cpu_s(process.pid) - cpu_before
            watch.stop()
            process.communicate("\n")
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            seconds = time.perf_counter() - began
            watch.stop()
            cpu_s = session_cpu_s(process.pid)
            process.communicate()
        if process.returncode:
            reading.join()
            raise subprocess.SubprocessError(f"ended with {process.returncode}: {complaints[0][-600:]}")
        return Round(seconds, cpu_s, watch.peak_bytes)
    finally:
        guard.cancel()
        watch.stop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _expect(process: Any, word: str, complaints: list[str], reading: threading.Thread) -> None:
    line = process.stdout.readline().strip()
    if line != word:
        process.kill()
        reading.join()
        raise subprocess.SubprocessError(f"said `{line}` instead of `{word}`: {complaints[0][-600:]}")


def session(pid: int) -> list[list[str]]:
    """``/proc/PID/stat`` of every process in the session that ``pid`` leads, from its state on."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == pid:
                found.append([entry, *fields])
    return found


def session_cpu_s(pid: int) -> float:
    """CPU seconds of a session's processes, and of those children that they have waited for."""
    return sum(sum(map(int, fields[12:16])) for fields in session(pid)) / _TICKS


class _Memory(threading.Thread):
    """Looks every 50 ms how many bytes a session holds (its own, not the shared ones counted twice)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(0.05):
            total = 0
            for position, fields in enumerate(session(self._pid)):
                try:
                    _, resident, shared = Path(f"/proc/{fields[0]}/statm").read_text().split()[:3]
                except OSError:
                    continue
                # Libraries are shared: counted once, with the first process.
                total += (int(resident) - (int(shared) if position else 0)) * _PAGE
            self.peak_bytes = max(self.peak_bytes, total)

    def stop(self) -> None:
        self._ended.set()


def check_same(source: Path, target: Path, work: Work) -> None:
    """ValueError unless the first and the last file came as they are, and all are there in full."""
    sizes = {path.name: path.stat().st_size for path in target.iterdir()}
    if any(sizes.get(name) != work.size for name in work.names):
        raise ValueError("files are missing or short")
    for name in {work.names[0], work.names[-1]}:
        if (source / name).read_bytes() != (target / name).read_bytes():
            raise ValueError(f"{name} is not what it should be")


def summary(case: Case, work: Work, rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Medians, spreads and ratios of one case."""
    contenders = {}
    for name, done in rounds.items():
        if not done:
            continue
        rates = [work.total_bytes / each.seconds / 1e6 for each in done]
        median = statistics.median(rates)
        contenders[name] = {
            "MB_per_s": median,
            "MB_per_s_low": min(rates),
            "MB_per_s_high": max(rates),
            "objects_per_s": median * 1e6 / work.size,
            "cpu_s_per_GB": statistics.median(each.cpu_s for each in done) / work.total_bytes * 1e9,
            "cpu_ms_per_object": statistics.median(each.cpu_s for each in done) / len(work.names) * 1e3,
            "rss_MiB": max(each.rss_bytes for each in done) / MIB,
            "rounds": [[each.seconds, each.cpu_s, each.rss_bytes] for each in done],
        }
    ours = contenders.get(OURS)
    for entry in contenders.values():
        if ours:
            entry["stager_to_it"] = ours["MB_per_s"] / entry["MB_per_s"]
    return {
        "case": case.name, "direction": case.direction, "server": case.server, "count": case.count,
        "bytes_each": case.size, "contenders": contenders,
    }  # fmt: skip


def floors(folder: Path) -> dict[str, float]:
    """What the machine itself gives, in MB/s, one thread each: a file written and synced, loopback, memory."""
    block, count = os.urandom(16 * MIB), 16
    total = len(block) * count / 1e6

    def disk() -> None:
        with open(folder / "floor", "wb", buffering=0) as file:
            for _ in range(count):
                file.write(block)
            os.fsync(file.fileno())

    def page_cache() -> None:
        with open(folder / "floor", "wb", buffering=0) as file:
            for _ in range(count):
                file.write(block)

    def loopback() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:

            def send() -> None:
                with server.accept()[0] as peer:
                    for _ in range(count):
                        peer.sendall(block)

            sending = threading.Thread(target=send)
            sending.start()
            buffer = memoryview(bytearray(MIB))
            with socket.create_connection(server.getsockname()) as client:
                while client.recv_into(buffer):
                    pass
            sending.join()

    def memory() -> None:
        target = ctypes.create_string_buffer(len(block))
        for _ in range(count):
            ctypes.memmove(target, block, len(block))

    def timed(work: Callable[[], None]) -> float:
        began = time.perf_counter()
        work()
        return total / (time.perf_counter() - began)

    named = {"disk, synced": disk, "page cache": page_cache, "loopback": loopback, "memory copy": memory}
    found = {name: statistics.median(timed(work) for _ in range(3)) for name, work in named.items()}
    (folder / "floor").unlink()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", nargs="+", default=["seaweedfs", "nginx", "ceph"], choices=list(SERVERS))
    parser.add_argument("--cases", nargs="+", default=["shards", "checkpoint", "small"])
    parser.add_argument("--directions", nargs="+", default=["download", "upload"])
    parser.add_argument(
        "--peers",
        nargs="*",
        default=[peer for peer in PEERS if peer != "s3torchconnector"],
        choices=PEERS,
        help="s3torchconnector brings a torch of several GB: install it into the peers' environment first",
    )
    parser.add_argument("--shard-bytes", type=int, default=1 << 30, help="of all 64 MiB shards together")
    parser.add_argument("--checkpoint-bytes", type=int, default=5_000_000_000, help="of its 8 files together")
    parser.add_argument("--small-objects", type=int, default=2000)
    parser.add_argument("--peers-venv", default=str(HERE.parent / ".bench-venv"))
    parser.add_argument("--folder", help="where files are written; the system's temporary folder otherwise")
    parser.add_argument(
        "--output", default=str(HERE.parent / "docs/bench/moving"), help="without its endings"
    )
    options = parser.parse_args()
    results = []
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="stager-bench-", dir=options.folder))
        )
        bench = Bench(options, folder)
        floor = floors(folder)
        for name in options.servers:
            if missing(name):
                print(f"  without {name}: {missing(name)}", file=sys.stderr)
                continue
            with SERVERS[name](_made(folder / name)) as endpoint:
                root = folder / name / "root" if name == "nginx" else None
                for case in cases(options):
                    if case.server == name:
                        results.append(bench.run_case(case, endpoint, root))
            shutil.rmtree(folder / name, ignore_errors=True)
    machine = {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    report = {"machine": machine, "floors_MB_per_s": floor, "rounds": options.rounds, "results": results}
    print(write_report(Path(options.output), report))
    return 0


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
