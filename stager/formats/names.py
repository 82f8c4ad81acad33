"""Names from outside, checked once: object keys, relative paths, checkpoint and run names."""

from __future__ import annotations

import re

from stager.errors import FormatError

KEY_BYTES_MAX = 1024
STAGER_FOLDER = ".stager"
MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest.json"

_NODE_PART = re.compile(r"node-(0|[1-9][0-9]{0,5})\.json")


def check_relative_path(path: object, *, of: str = "path") -> str:
    """``path`` if it is a relative path with ``/`` that stays below its root.

    Raises:
        FormatError: Empty, absolute, not valid Unicode, longer than a key may be, or with a control character or an
            empty, ``.`` or ``..`` part.
    """
    if not isinstance(path, str):
        raise FormatError(f"{of} must be text, not {type(path).__name__}", subject=str(path)[:80])
    problem = _problem(path)
    if problem:
        raise FormatError(
            f"{of} {path[:120]!r} is refused: {problem}",
            subject=path[:120],
            hint="names are relative, with `/` between parts, without `.`, `..`, empty parts or control characters",
        )
    return path


def check_key(key: object) -> str:
    """``key`` if a store may be asked for it: what `check_relative_path` accepts."""
    return check_relative_path(key, of="key")


def join_key(*parts: str) -> str:
    """Parts of a key with one ``/`` between them; empty parts are left out."""
    return "/".join(part.strip("/") for part in parts if part.strip("/"))


def manifest_key(checkpoint: str) -> str:
    """Where a run keeps a checkpoint's commit, relative to the run."""
    return join_key(STAGER_FOLDER, checkpoint, MANIFEST_NAME)


def node_part_key(checkpoint: str, node: int) -> str:
    """Where a run keeps one node's part of a checkpoint, relative to the run."""
    return join_key(STAGER_FOLDER, checkpoint, f"node-{node}.json")


def latest_key() -> str:
    """Where a run keeps its hint at the newest checkpoint, relative to the run."""
    return join_key(STAGER_FOLDER, LATEST_NAME)


def node_of_part(name: str) -> int | None:
    """The node number in ``node-<k>.json``, or None if the name is another."""
    match = _NODE_PART.fullmatch(name)
    return int(match[1]) if match else None


def _problem(path: str) -> str:
    if not path:
        return "it is empty"
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if len(encoded) > KEY_BYTES_MAX:
        return f"it has {len(encoded)} bytes; a key may have {KEY_BYTES_MAX}"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "it has a control character"
    if path.startswith("/"):
        return "it is absolute"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it has an empty, `.` or `..` part"
    return ""
