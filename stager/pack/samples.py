"""Files grouped into samples, by the rules of `stager.formats.samples`; what readers would lose or mix is refused here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stager.formats.names import KEY_BYTES_MAX
from stager.formats.samples import is_metadata, split_name
from stager.pack.findings import Findings, Kind

# A field that starts otherwise is rather the rest of a stem with a dot: `photo 1.5 v2.png`.
_USUAL_FIELD = re.compile(r"[a-z_][a-z0-9_+-]*(\.[a-z0-9_+-]+)*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class SourceFile(NamedTuple):
    """One file to be packed.

    Attributes:
        name: Its member's name, with ``/`` between parts.
        path: Where it lies.
        size: Bytes.
        mtime_ns: When it was last changed.
    """

    name: str
    path: str
    size: int
    mtime_ns: int


class PackSample(NamedTuple):
    """The files of one sample, in the order of their fields.

    Attributes:
        key: As readers see it.
        fields: Names of the fields, sorted.
        files: One a field.
    """

    key: str
    fields: tuple[str, ...]
    files: tuple[SourceFile, ...]


def group_files(files: Iterable[SourceFile], findings: Findings) -> Iterator[PackSample]:
    """Samples of files that come with those of one sample next to each other."""
    key: str | None = None
    fields: dict[str, SourceFile] = {}
    for file in files:
        split = split_name(file.name)
        reason = unkeyable(file.name, split)
        if reason or split is None:
            findings.add(Kind.UNKEYABLE, file.path, reason)
            continue
        if split[0] != key:
            if key is not None:
                yield _sample(key, fields)
            key, fields = split[0], {}
        if split[1] in fields:
            findings.add(
                Kind.DOUBLE, file.path, f"`{fields[split[1]].path}` is `{split[1]}` of `{key}` as well"
            )
            continue
        if not _USUAL_FIELD.fullmatch(split[1]):
            findings.add(Kind.DOTTED, file.path, f"key `{key}`, field `{split[1]}`")
        fields[split[1]] = file
    if key is not None:
        yield _sample(key, fields)


def unkeyable(name: str, split: tuple[str, str] | None) -> str:
    """Why no reader makes a sample of a member of this name, or makes a wrong one; empty if it is fine.

    ``split`` is what `split_name` makes of the name.
    """
    if split is None:
        return "it has no dot that divides key and field"
    field = split[1]
    if not field or field.startswith("."):
        return f"its field would be `{field}`"
    if field.startswith("__"):
        return f"its field `{field}` is reserved"
    if is_metadata(name):
        return "readers skip what lies in a first folder of the form `__x__` as metadata"
    if _CONTROL.search(name):
        return "it has a control character"
    if len(name) * 4 > KEY_BYTES_MAX and len(name.encode()) > KEY_BYTES_MAX:
        return f"it is longer than {KEY_BYTES_MAX} bytes"
    return ""


def _sample(key: str, fields: dict[str, SourceFile]) -> PackSample:
    names = tuple(sorted(fields))
    return PackSample(key, names, tuple(fields[name] for name in names))
