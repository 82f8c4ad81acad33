"""What an import costs and what it pulls in, seen in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = {
    "cache",
    "checkpoint",
    "cli",
    "pack",
    "prefetch",
    "sidecar",
    "store",
    "transfer",
    "offload",
    "checksum",
}


def modules_after(statement: str) -> set[str]:
    """Names of the modules loaded once ``statement`` ran in a new interpreter."""
    code = f"import json, sys; sys.path.insert(0, {str(ROOT)!r}); {statement}; print(json.dumps(list(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_import_stager_is_lazy() -> None:
    """`import stager` loads nothing but itself."""
    loaded = modules_after("import stager")
    assert not {"torch", "aiobotocore", "aiohttp", "asyncio", "numpy", "pydantic", "pyarrow"} & loaded
    assert {name for name in loaded if name.startswith("stager")} == {"stager"}


def test_dataset_imports_nothing_of_the_engine() -> None:
    """A trainer that imports the dataset does not load the daemon or its clients."""
    loaded = modules_after("import stager.dataset")
    assert not {f"stager.{name}" for name in ENGINE} & loaded
    assert not {"aiobotocore", "botocore", "aiohttp", "pydantic", "watchdog", "uvloop"} & loaded


def test_command_line_starts_without_torch() -> None:
    """`stager --help` and its neighbours pay for no torch."""
    assert "torch" not in modules_after("import stager.cli.main")
