"""The wheel: one top-level name, and everything in it imports where only the wheel is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
site = sys.argv[1]
sys.path.insert(0, site)
import stager
names = ["stager", *(m.name for m in pkgutil.walk_packages(stager.__path__, "stager."))]
strangers = []
for name in names:
    if name.endswith("__main__"):
        continue
    module = importlib.import_module(name)
    if not module.__file__.startswith(site):
        strangers.append(module.__file__)
print(json.dumps({"names": names, "strangers": strangers}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("stager", "formats", "sidecar", "pyproject.toml", "README.md", "LICENSE"):
        origin = ROOT / name
        if origin.is_symlink():
            (source / name).symlink_to(origin.readlink())
        elif origin.is_dir():
            shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, source / name)
    result = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_wheel_has_one_top_level_name(wheel: Path) -> None:
    """Installing stager puts nothing else beside it: `formats` and `sidecar` belong to others."""
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"stager"}


def test_wheel_holds_every_source(wheel: Path) -> None:
    """No package is left out in silence."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("stager/")}
    present = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "stager").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert present == packed


def test_every_module_imports_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """In a fresh isolated interpreter that sees the wheel first, every module imports, from the wheel."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    result = subprocess.run(
        [sys.executable, "-I", "-c", IMPORT_EVERYTHING, str(site)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    assert not seen["strangers"]
    assert {"stager.formats", "stager.sidecar", "stager.store.api"} <= set(seen["names"])


def test_base_install_has_no_torch() -> None:
    """The daemon's image stays small: torch is an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith(("torch", "webdataset"))]


def test_constraints_pin_torch() -> None:
    """CI runs exactly this torch, named without a build label."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in pins
    assert not [pin for pin in pins if not pin.startswith("#") and ("/" in pin or "@" in pin)]
