"""The house rules, kept by tools: style, types, arrows between packages, and the doors that must be used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_DOORS = {"rename", "unlink", "rmdir", "hardlink_to", "symlink_to", "touch"}


def run_tool(*arguments: str) -> None:
    """Run an interpreter with ``arguments`` in the checkout; what it printed is the failure."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if result.returncode:
        pytest.fail(f"{' '.join(arguments)}\n{result.stdout[-8000:]}{result.stderr[-4000:]}", pytrace=False)


def sources() -> Iterator[Path]:
    """Every module of the package."""
    for folder, _, names in os.walk(ROOT / "stager"):
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def test_ruff_finds_nothing() -> None:
    """Style, banned calls and banned imports."""
    run_tool("-m", "ruff", "check", "--no-cache", "--quiet", ".")


def test_sources_are_formatted() -> None:
    """`make format` would change nothing."""
    run_tool("-m", "ruff", "format", "--no-cache", "--quiet", "--check", ".")


@pytest.mark.timeout(600)
def test_types_are_strict() -> None:
    """mypy --strict over the whole package."""
    run_tool("-m", "mypy")


def test_arrows_between_packages() -> None:
    """The contracts of import-linter, which has no module to run."""
    run_tool("-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())")


def test_only_disk_touches_names() -> None:
    """pathlib's doors, which ruff cannot see, are used nowhere but in stager/disk.py."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: .{node.func.attr}()"
        for path in sources()
        if path != ROOT / "stager" / "disk.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FILE_DOORS
    ]
    assert not found, "publish and remove through stager.disk:\n" + "\n".join(found)


def test_modules_say_what_they_are_for() -> None:
    """Every module begins with a docstring."""
    silent = [
        str(path.relative_to(ROOT))
        for path in sources()
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_links_are_relative() -> None:
    """The top-level names that the owner asked for are relative symbolic links into the package."""
    for name in ("formats", "sidecar"):
        assert os.readlink(ROOT / name) == f"stager/{name}"
