"""torchsnapshot: ``<rank>/...``, ``replicated/``, ``sharded/``, and ``.snapshot_metadata``, which rank 0 writes last.

The manifest, YAML or JSON, names every file by its ``location``; of its text only these lines are read. It survives when
the same path is written again, so it must not be older than what it names. Source: torchsnapshot ``snapshot.py``,
``manifest.py``.
"""

from __future__ import annotations

import json
import re

from stager.errors import FormatError
from stager.formats.layouts.api import SETTLE_MARKED_S, Candidate, Unfinished, read_whole
from stager.formats.layouts.rules import Found, Rules, check_not_younger, check_there
from stager.formats.layouts.steps import is_directory_name
from stager.formats.names import check_relative_path

_MARKER = ".snapshot_metadata"
_BYTES_MAX = 256 << 20
_WORLD = re.compile(r"world_size: ([0-9]{1,8})")


def _claims(candidate: Candidate) -> bool:
    if candidate.is_file or not is_directory_name(candidate.name):
        return False
    return _MARKER in candidate.listing


def _check(candidate: Candidate) -> Found:
    try:
        text = read_whole(candidate, _MARKER, bytes_max=_BYTES_MAX).decode()
    except UnicodeDecodeError:
        raise FormatError(f"`{_MARKER}` is no text", subject=_MARKER) from None
    world, named = _parse(text)
    if world is None:
        raise Unfinished(f"`{_MARKER}` is not whole")
    check_there(candidate, named, named_by=_MARKER)
    here = named & candidate.listing.keys()
    check_not_younger(candidate, _MARKER, here)
    empty = min((path for path in here if candidate.listing[path].size == 0), default=None)
    if empty is not None:
        raise Unfinished(f"`{empty}` is empty")
    return Found(SETTLE_MARKED_S, world, files=[*sorted(here), _MARKER])


def _parse(text: str) -> tuple[int | None, set[str]]:
    """World size, None if the text is a piece of a manifest, and the files that it names."""
    if text.startswith("{"):
        return _parse_json(text)
    world, named, manifest = None, set(), False
    for line in text.splitlines():
        field = line.strip().removeprefix("- ")
        if match := _WORLD.fullmatch(field):
            world = int(match[1])
        elif field.startswith("location: "):
            named.add(_checked(_unquoted(field.removeprefix("location: "))))
        manifest = manifest or line.startswith("manifest:")
    # It is written in place in one go: YAML ends with a line break, and a piece of it need not.
    return (world if manifest and text.endswith("\n") else None), named


def _parse_json(text: str) -> tuple[int | None, set[str]]:
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return None, set()
    named, pending = set(), [root]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(value.get("location"), str):
                named.add(_checked(value["location"]))
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    world = root.get("world_size")
    return (world if isinstance(world, int) and "manifest" in root else None), named


def _unquoted(text: str) -> str:
    if text.startswith("'"):
        return text[1:-1].replace("''", "'")
    if text.startswith('"'):
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    return text


def _checked(path: str) -> str:
    return check_relative_path(path, of=f"{_MARKER}: location")


LAYOUT = Rules("torchsnapshot", _claims, _check, (re.compile(re.escape(_MARKER)),))
