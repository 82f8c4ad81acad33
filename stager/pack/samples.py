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
_FIELDS_KNOWN_MAX = 10_000


class SourceFile(NamedTuple):
    """One file to be packed, or what stands for one: a member of an archive, a line, a cell of a table.

    Attributes:
        name: Its member's name, with ``/`` between parts.
        path: Where it lies.
        size: Bytes.
        mtime_ns: When ``path`` was last changed.
        place: Where in ``path``, in the words of `stager.pack.pieces`; empty for a whole file.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    place: str = ""


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
    # Of a few fields there are millions of names: what was found of a field once need not be looked at again.
    known: dict[str, str] = {}
    for file in files:
        name = file[0]
        # `split_name`, written out: this loop runs once for every file there is.
        start = name.rfind("/") + 1
        dot = name.find(".", start)
        field = known.get(name[dot + 1 :]) if dot > start else None
        if field is None or name[0] == "_" or not name.isprintable() or len(name) * 4 > KEY_BYTES_MAX:
            split = split_name(name)
            reason = unkeyable(name, split)
            if reason or split is None:
                findings.add(Kind.UNKEYABLE, file.path, reason)
                continue
            field = split[1]
            if not _USUAL_FIELD.fullmatch(field):
                findings.add(Kind.DOTTED, file.path, f"key `{split[0]}`, field `{field}`")
            elif len(known) < _FIELDS_KNOWN_MAX:
                known[name[dot + 1 :]] = field
        if name[:dot] != key:
            if key is not None:
                yield _sample(key, fields)
            key, fields = name[:dot], {}
        if field in fields:
            findings.add(Kind.DOUBLE, file.path, f"`{fields[field].path}` is `{field}` of `{key}` as well")
            continue
        fields[field] = file
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
    names = sorted(fields)
    return PackSample(key, tuple(names), tuple([fields[name] for name in names]))
