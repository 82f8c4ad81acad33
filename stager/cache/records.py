"""What a cache remembers of the shards that it verified: a line for each, beside the dataset's manifest. Pure.

A shard whose file still has the size and time of its record is taken up at the next start without reading it; any other is
read and compared with the manifest first. Records are appended and never synced: a lost or torn line costs one reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stager.errors import FormatError
from stager.formats.fields import load_object, take_count, take_text

RECORDS_BYTES_MAX = 64 << 20
RECORDS_BYTES_COMPACT = 16 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """A verified shard's file: bytes, and modification time in nanoseconds since the epoch."""

    size: int
    mtime_ns: int


def encode_record(name: str, record: Record) -> bytes:
    """One line."""
    fields = {"name": name, "bytes": record.size, "mtime_ns": record.mtime_ns}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def encode_records(records: Iterable[tuple[str, Record]]) -> bytes:
    """Lines, sorted by name."""
    return b"".join(encode_record(name, record) for name, record in sorted(records, key=lambda item: item[0]))


def decode_records(raw: bytes) -> Mapping[str, Record]:
    """The last record of every shard; what a crash left between the lines is passed over."""
    records = {}
    for line in raw.split(b"\n"):
        try:
            value = load_object(line.strip(b"\0"), of="record")
            name = take_text(value, "name", at="record")
            records[name] = Record(
                take_count(value, "bytes", at="record"), take_count(value, "mtime_ns", at="record")
            )
        except FormatError:
            continue
    return records
