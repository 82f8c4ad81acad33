"""Orbax: a real manager writes while the watcher looks on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.watched import run_ranks, watched

pytestmark = pytest.mark.timeout(300)


async def test_manager(tmp_path: Path) -> None:
    """Steps written in the background and renamed; a manager over the restored directory finds and restores the step."""
    found = await watched(tmp_path, "orbax_save")
    assert [(m.layout, m.step) for m in found.manifests.values()] == [("orbax", 1), ("orbax", 2)]
    await run_ranks("orbax_resume", (await found.restored("2")).parent)
