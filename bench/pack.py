"""Packing a tree of small files: stager beside webdataset.ShardWriter and GNU tar, in turn, in one run; medians and ratios.

    python bench/pack.py [--samples 20000] [--bytes 30000] [--rounds 5] [--folder DIR] [--json]

A sample is a file of 30 KB and a small JSON, from the page cache of the same disk that is written to. Every contender is a
process of its own that times the work without the start of its interpreter; stager's worker processes are started within
that time. `tar` is GNU tar, which neither hashes nor syncs; `tar+sync` waits, as stager does, until the bytes are on the
disk. stager walks the tree, checks every name, hashes every shard twice (SHA-256, CRC-64/NVME), and syncs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STAGER = """
import asyncio, sys, time
from stager.cli import pack as command
from stager.pack.opening import DestinationOpener
from stager.pack.survey import take_input
from stager.store.registry import parse_url
from stager.cli import progress
source, target, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
began = time.perf_counter()
given = take_input([source], target)
opener = DestinationOpener(parse_url(target, base="/"))
done = asyncio.run(command._pack(given, opener, workers, resume=True, overwrite=False))
print(time.perf_counter() - began)
"""

WEBDATASET = """
import sys, time
from pathlib import Path
import webdataset
source, target = Path(sys.argv[1]), Path(sys.argv[2])
target.mkdir()
began = time.perf_counter()
with webdataset.ShardWriter(f"{target}/shard-%06d.tar", maxsize=256e6, verbose=0) as writer:
    for path in sorted(source.rglob("*.bin")):
        writer.write({"__key__": path.stem, "bin": path.read_bytes(), "json": path.with_suffix(".json").read_bytes()})
print(time.perf_counter() - began)
"""

TAR = "mkdir {target} && tar --format=ustar --sort=name -C {source} -cf {target}/all.tar ."


def make_tree(folder: Path, samples: int, size: int) -> None:
    chance = random.Random(1)
    for number in range(samples):
        below = folder / f"{number // 1000:03d}"
        below.mkdir(parents=True, exist_ok=True)
        (below / f"{number:08d}.bin").write_bytes(chance.randbytes(size))
        (below / f"{number:08d}.json").write_text(json.dumps({"number": number, "label": number % 10}))


def in_python(code: str, *arguments: object) -> float:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    return float(done.stdout.split()[-1])


def in_shell(line: str) -> float:
    began = time.perf_counter()
    subprocess.run(line, shell=True, check=True)
    return time.perf_counter() - began


def measure(name: str, source: Path, target: Path) -> float:
    """Seconds of one run."""
    tar = TAR.format(source=source, target=target)
    match name:
        case "webdataset":
            return in_python(WEBDATASET, source, target)
        case "tar":
            return in_shell(tar)
        case "tar+sync":
            return in_shell(f"{tar} && sync {target}/all.tar")
        case _:
            return in_python(STAGER, source, target, name.removeprefix("stager-"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to work; its file system is what is measured")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.only or ["webdataset", "tar", "tar+sync", "stager-1", "stager-2"]
    found: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        source, target = Path(work) / "source", Path(work) / "target"
        make_tree(source, options.samples, options.bytes)
        subprocess.run(["sync", "-f", work], check=True)
        for _ in range(options.rounds):
            for name in names:
                found[name].append(options.samples / measure(name, source, target))
                shutil.rmtree(target)
                # What the one left to be written back must not slow the next.
                subprocess.run(["sync", "-f", work], check=True)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    if options.json:
        print(json.dumps({"samples": options.samples, "samples_per_s": found, "medians": medians}, indent=1))
        return
    for name, rates in found.items():
        ratios = ", ".join(
            f"{medians[name] / medians[other]:.2f} x {other}"
            for other in ("webdataset", "tar", "tar+sync")
            if other in medians and other != name
        )
        print(f"{name}: {medians[name]:.0f} samples/s ({min(rates):.0f} to {max(rates):.0f}); {ratios}")


if __name__ == "__main__":
    main()
