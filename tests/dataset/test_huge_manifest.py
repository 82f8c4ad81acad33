"""A billion samples in a million shards, at full size, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "huge_manifest.py"


def test_a_billion_samples_open_in_bounded_memory() -> None:
    """Opened, ordered and sought 200 times below 500 MiB, imports of torch included."""
    child = [sys.executable, str(BENCH), "--json"]
    result = subprocess.run(child, check=True, capture_output=True, text=True, cwd=BENCH.parents[1])
    measured = json.loads(result.stdout)
    assert measured["peak_mib"] < 500, measured
