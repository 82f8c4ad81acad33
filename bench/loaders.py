"""Loaders side by side in one run: webdataset, mosaicml-streaming, litdata and stager over the same samples.

    make bench-loaders                     # with the peers in an environment of their own
    python bench/loaders.py [--samples 10000] [--rounds 5] [--out docs/bench]

Every measurement is a process of its own that reads all samples twice: the first pass opens and indexes, the second finds
things open. Rounds alternate between the loaders. Files are in the page cache, so that what is compared is the loaders.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loader_peers import BATCH, READERS, WORKERS, WRITERS
from report import machine, spread, table, write_bars

WAYS = {
    "process": "one process, one pass after another",
    "workers": f"DataLoader, {WORKERS} workers, batches of {BATCH}",
}
PEERS = Path(__file__).with_name("loader_peers.py")


def child(*arguments: str) -> str:
    """What one measurement printed last."""
    ran = subprocess.run(
        [sys.executable, str(PEERS), *arguments], capture_output=True, text=True, timeout=600
    )
    if ran.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{ran.stderr}")
    return ran.stdout.strip().rpartition("\n")[2]


def run(folder: str, rounds: int, expected: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The measurements of every reader in every way."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {way: defaultdict(list) for way in WAYS}
    for number in range(-1, rounds):
        for way in WAYS:
            for reader in READERS:
                one = json.loads(child(folder, reader, way))
                for done in one["passes"]:
                    if done["samples"] != expected:
                        sys.exit(f"{reader} gave {done['samples']} of {expected} samples")
                # The first round warms the page cache and compiles what Python imports.
                if number >= 0:
                    found[way][reader].append(one)
                rates = " ".join(f"{done['samples'] / done['seconds']:9,.0f}" for done in one["passes"])
                print(f"round {number + 1}/{rounds}  {way:8} {reader:20} {rates} samples/s", file=sys.stderr)
    return found


def figures(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spreads of one reader."""
    rates = [[one["passes"][at] for one in measured] for at in (0, 1)]
    size = measured[0]["passes"][0]["bytes"] / measured[0]["passes"][0]["samples"]
    first, second = (spread([done["samples"] / done["seconds"] for done in passes]) for passes in rates)
    samples = sum(done["samples"] for done in measured[0]["passes"])
    return {
        "first_pass_samples_per_s": first,
        "second_pass_samples_per_s": second,
        "second_pass_mb_per_s": second["median"] * size / 1e6,
        "cpu_s_per_100k_samples": statistics.median(one["cpu_s"] for one in measured) / samples * 1e5,
        "memory_mib": statistics.median(one["memory_mib"] for one in measured),
    }


def write_report(results: dict[str, dict[str, dict[str, Any]]], about: dict[str, Any], out: Path) -> str:
    """JSON, table and chart below ``out``; the table is returned."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "loaders.json").write_text(
        json.dumps({"about": about, "results": results}, indent=1, sort_keys=True) + "\n"
    )
    text = ""
    for way, readers in results.items():
        base = readers["webdataset"]
        rows = [
            [
                name,
                *(
                    f"{one[which]['median']:,.0f} ({one[which]['least']:,.0f} to {one[which]['most']:,.0f})"
                    for which in ("first_pass_samples_per_s", "second_pass_samples_per_s")
                ),
                *(
                    f"{one[which]['median'] / base[which]['median']:.1f}"
                    for which in ("first_pass_samples_per_s", "second_pass_samples_per_s")
                ),
                f"{one['second_pass_mb_per_s']:,.0f}",
                f"{one['cpu_s_per_100k_samples']:.1f}",
                f"{one['memory_mib']:,.0f}",
            ]
            for name, one in readers.items()
        ]
        head = [
            WAYS[way],
            "first pass, samples/s",
            "second pass, samples/s",
            "first / webdataset",
            "second / webdataset",
            "MB/s",
            "CPU s for 100,000",
            "memory, MiB",
        ]
        text += table(head, rows) + "\n"
    text += (
        f"{about['samples']} samples of a 40 KB member and a small JSON, not decoded, in the page cache; medians of "
        f"{about['rounds']} alternating rounds (least to most); memory without files; {about['machine']}; {about['date']}; "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        + ".\n"
    )
    (out / "loaders.md").write_text(text)
    groups = {
        f"{WAYS[way]}: {which.partition('_')[0]} pass": {
            name: one[which]["median"] for name, one in readers.items()
        }
        for way, readers in results.items()
        for which in ("first_pass_samples_per_s", "second_pass_samples_per_s")
    }
    write_bars(
        out / "loaders.svg",
        "Samples a second, 40 KB each, from local shards",
        groups,
        ours="stager",
        note=f"medians of {about['rounds']} alternating rounds; each group has a scale of its own; {about['machine']}",
    )
    return text


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("webdataset", "mosaicml-streaming", "litdata", "torch")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/bench"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for format_name in WRITERS:
            child(folder, f"{format_name}:{options.samples}", "write")
        found = run(folder, options.rounds, options.samples)
    results = {
        way: {name: figures(measured) for name, measured in readers.items()} for way, readers in found.items()
    }
    about = {
        "samples": options.samples,
        "rounds": options.rounds,
        "machine": machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
    }
    print(write_report(results, about, options.out))


if __name__ == "__main__":
    main()
