"""A dataset of a billion samples in a million shards: how long it takes to open and to seek, and what memory it takes.

    python bench/huge_manifest.py [--shards 1000000] [--per-shard 1000] [--json]

The manifest is made up; no shard exists. What is measured is what every trainer does before it reads: open the dataset,
compute the order of an epoch, and find the samples of a batch at any place of it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ENTRY = (
    '  {\n   "bytes": %d,\n   "crc64nvme": "AAAAAAAAAAA=",\n   "name": "shard-%07d.tar",\n   "samples": %d,\n'
    '   "sha256": "%s"\n  }'
)
SEEKS = 200


def write_manifest(path: Path, shards: int, per_shard: int) -> None:
    """As `stager pack` would write it, a piece at a time."""
    whole = hashlib.sha256(b"stager-dataset-1\n")
    for size, digest in entries(shards):
        whole.update(f"{digest} {size} {per_shard}\n".encode())
    total = sum(size for size, _ in entries(shards))
    with path.open("w") as file:
        file.write(
            f'{{\n "bytes": {total},\n "fields": [\n  "jpg"\n ],\n "fingerprint": "{whole.hexdigest()[:32]}",\n'
        )
        file.write(
            f' "kind": "stager-dataset",\n "provenance": {{}},\n "samples": {shards * per_shard},\n "shards": [\n'
        )
        for number, (size, digest) in enumerate(entries(shards)):
            file.write(ENTRY % (size, number, per_shard, digest) + (",\n" if number < shards - 1 else "\n"))
        file.write(' ],\n "version": 1\n}\n')


def entries(shards: int) -> Iterator[tuple[int, str]]:
    for number in range(shards):
        yield 250_000_000 + number % 1000, hashlib.sha256(b"%d" % number).hexdigest()


def measure(folder: str) -> dict[str, float]:
    """Seconds and MiB in this process."""
    from stager.dataset import StagedDataset
    from stager.formats.batches import BatchGeometry, EpochBatches

    before_mib = peak_mib()
    started = time.perf_counter()
    dataset = StagedDataset(folder, global_batch_size=4096, lanes=64, shuffle=True)
    opened = time.perf_counter()
    order = dataset._stream.order(dataset.begin)
    ordered = time.perf_counter()
    geometry = BatchGeometry(4096, world=512)
    chance = random.Random(1)
    seeks = []
    gc.collect()  # what imports have left behind is not the seek's
    for _ in range(SEEKS):
        position = chance.randrange(dataset.samples) // 4096 * 4096
        begin = time.perf_counter()
        EpochBatches(order, geometry, position).rank_batch(0, chance.randrange(512))
        seeks.append(time.perf_counter() - begin)
    return {
        "open_s": round(opened - started, 2),
        "order_s": round(ordered - opened, 2),
        "seek_ms_median": round(1000 * sorted(seeks)[SEEKS // 2], 2),
        "seek_ms_worst": round(1000 * max(seeks), 2),
        "imports_mib": before_mib,
        "peak_mib": peak_mib(),
    }


def peak_mib() -> int:
    """Most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--per-shard", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(Path(folder, "manifest.json"), options.shards, options.per_shard)
        # A process of its own: what made the manifest has had more memory than what opens it.
        child = [sys.executable, __file__, "--measure", folder]
        result = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{options.shards} shards, {options.shards * options.per_shard} samples")
    for name, value in result.items():
        print(f"  {name:<16} {value:>10}")


if __name__ == "__main__":
    main()
