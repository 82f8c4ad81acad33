"""Reading local shards: StagedDataset beside webdataset, in turn, in one run; medians and the ratio.

    python bench/read_shards.py [--samples 4000] [--rounds 5]

Samples are a member of about 40 KB and a small JSON each, without decoding. ``process`` is one process without a DataLoader;
``loader`` is a DataLoader with two workers and batches of 64.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import webdataset
from torch.utils.data import DataLoader

from stager import StagedDataset, StagedLoader

BATCH = 64
WORKERS = 2


def write_shards(folder: Path, samples: int) -> list[str]:
    """Shards of 500 samples, as webdataset's own writer makes them."""
    chance = random.Random(1)
    with webdataset.ShardWriter(f"{folder}/shard-%06d.tar", maxcount=500, verbose=0) as writer:
        for number in range(samples):
            body = chance.randbytes(chance.randint(35_000, 45_000))
            writer.write(
                {"__key__": f"{number:08d}", "bin": body, "json": json.dumps({"n": number}).encode()}
            )
    return sorted(str(path) for path in folder.glob("*.tar"))


def timed(make: Callable[[], Iterable[Any]], count: Callable[[Any], int]) -> float:
    """Samples a second of one pass."""
    began = time.perf_counter()
    samples = sum(count(item) for item in make())
    return samples / (time.perf_counter() - began)


def contenders(folder: Path, urls: list[str]) -> dict[str, dict[str, Callable[[], float]]]:
    """Each reader, in each way of reading, as a function that gives its samples a second."""

    def plain() -> Any:
        return webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)

    def staged(**more: Any) -> StagedDataset:
        return StagedDataset(folder, shuffle=False, decode=False, **more)

    def listed(items: list[Any]) -> list[Any]:
        return items

    return {
        "process": {
            "webdataset": lambda: timed(plain, lambda _: 1),
            "stager": lambda: timed(staged, lambda _: 1),
        },
        "loader": {
            "webdataset": lambda: timed(
                lambda: DataLoader(
                    plain().batched(BATCH, collation_fn=listed), batch_size=None, num_workers=WORKERS
                ),
                len,
            ),
            "stager": lambda: timed(
                lambda: StagedLoader(staged(batch_size=BATCH, collate=listed), num_workers=WORKERS), len
            ),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        urls = write_shards(Path(folder), options.samples)
        for way, readers in contenders(Path(folder), urls).items():
            rates: dict[str, list[float]] = {name: [] for name in readers}
            for _ in range(options.rounds + 1):
                for name, measure in readers.items():
                    rates[name].append(measure())
            # The first round warms the page cache.
            medians = {name: statistics.median(found[1:]) for name, found in rates.items()}
            told = ", ".join(
                f"{name} {medians[name]:.0f} ({min(found[1:]):.0f} to {max(found[1:]):.0f})"
                for name, found in rates.items()
            )
            print(
                f"{way}: samples/s {told}; stager is {medians['stager'] / medians['webdataset']:.1f} x webdataset"
            )


if __name__ == "__main__":
    main()
