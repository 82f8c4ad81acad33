"""Reading fields out of JSON that came from outside: types, bounds and unknown versions are errors with a place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from stager.errors import FormatError

JsonObject = Mapping[str, Any]


def canonical_json(value: object) -> bytes:
    """One spelling for equal values: sorted keys, two spaces, UTF-8, a final newline."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def load_object(raw: bytes, *, of: str) -> JsonObject:
    """The JSON object in ``raw``.

    Raises:
        FormatError: Not JSON, not an object, doubled keys, too deep, or with a number or text that could not be written
            as JSON again; names ``of``.
    """

    def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return found

    try:
        value = json.loads(
            raw, object_pairs_hook=without_doubles, parse_float=_finite, parse_constant=_finite
        )
        if b"\\ud" in raw.lower():
            # Half of a surrogate pair is text to Python, and nothing that UTF-8 could say.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"`{of}` is not valid JSON: {error}", subject=of) from None
    return as_object(value, at=of)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def as_object(value: object, *, at: str) -> JsonObject:
    if not isinstance(value, dict):
        raise FormatError(f"`{at}` must be an object, not {type(value).__name__}", subject=at)
    return value


def take_text(value: JsonObject, name: str, *, at: str, length_max: int = 4096) -> str:
    found = value.get(name)
    if not isinstance(found, str) or len(found) > length_max:
        raise FormatError(f"`{at}`: `{name}` must be text of at most {length_max} characters", subject=at)
    return found


def take_count(value: JsonObject, name: str, *, at: str, most: int = 1 << 62) -> int:
    found = value.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
        raise FormatError(f"`{at}`: `{name}` must be a whole number from 0 to {most}", subject=at)
    return found


def take_list(value: JsonObject, name: str, *, at: str, length_max: int = 10_000_000) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or len(found) > length_max:
        raise FormatError(f"`{at}`: `{name}` must be a list of at most {length_max} entries", subject=at)
    return found


def take_version(value: JsonObject, *, at: str, known: int) -> int:
    """The document's format version, at most the newest that this code reads."""
    version = take_count(value, "version", at=at)
    if not 1 <= version <= known:
        raise FormatError(
            f"`{at}` is of format version {version}; this stager reads up to {known}",
            subject=at,
            hint="a newer stager wrote it: upgrade this one",
        )
    return version
