"""Every layout by its framework's documented rules (`tests.checkpoint.made`): recognised whole, and never in pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stager.formats.layouts.api import Complete
from stager.formats.layouts.detection import LAYOUTS
from tests.checkpoint.made import MADE, Made, verdict_on

EACH = pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())


def is_complete(made: Made, **how: object) -> bool:
    return isinstance(verdict_on(made, **how), Complete)  # type: ignore[arg-type]  # passed through


def test_every_layout_is_made() -> None:
    """A new adapter needs a checkpoint in the list; three take what another writes, or anything."""
    covered = {made.layout for made in MADE.values()} | {"torchtitan", "generic", "commit"}
    assert covered == set(LAYOUTS)


@EACH
def test_whole(made: Made) -> None:
    """All files, by the right adapter, with step and markers; the framework's documented rules made them."""
    verdict = verdict_on(made)
    assert isinstance(verdict, Complete), verdict
    assert (verdict.layout, verdict.step, verdict.markers) == (made.layout, made.step, made.markers)
    assert verdict.files == tuple(sorted(made.files))
    assert verdict.settle_s > 0, "only a commit marker is believed at once"


@EACH
def test_each_file_missing(made: Made) -> None:
    """Without any one file that belongs to it, it is not complete."""
    for path in made.needed:
        if not made.is_file:
            assert not is_complete(made.without(path)), path


@EACH
def test_each_file_truncated(made: Made) -> None:
    """With any one file cut at its beginning, its middle or its last byte, it is not complete; 0 bytes never are."""
    for path in made.needed:
        body = made.files[path]
        cuts = (0,) if path in made.unchecked else (0, 1, len(body) // 2, len(body) - 1)
        for cut in cuts:
            assert not is_complete(made.having(path, body[:cut])), f"{path} with {cut} bytes"


@EACH
def test_written_in_order(made: Made) -> None:
    """File after file, each growing: complete is not said before the last byte of the last file that is needed."""
    if not made.needed:
        return
    there: dict[str, bytes] = {}
    last = [path for path in made.files if path in made.needed][-1]
    for path, body in made.files.items():
        for cut in (0,) if path in made.unchecked else (0, len(body) // 2, len(body) - 1):
            grown = replace(made, files={**there, path: body[:cut]})
            assert not is_complete(grown), f"{path} with {cut} bytes"
        there[path] = body
        if path == last:
            break
        assert not is_complete(replace(made, files=there)), f"after {path}"


@EACH
def test_marker_of_an_earlier_save(made: Made) -> None:
    """A marker counts only if it is not older than what it covers: saving again leaves the old one in place."""
    if made.layout in ("orbax", "torch_checkpointing") or not made.markers:
        return  # renamed whole: their markers are never old
    covered = [path for path in made.needed if path.endswith((".distcp", ".safetensors", "optimizer.pt"))]
    for path in covered:
        if not path.startswith("sharded/"):
            assert not is_complete(made, late=path), path
