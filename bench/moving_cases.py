"""What is moved in `bench/moving.py`, as values that every contender reads from one JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

MIB = 1 << 20
BUCKET = "stager-bench"


@dataclass(frozen=True, slots=True)
class Work:
    """One round of one contender.

    Attributes:
        direction: ``download`` or ``upload``.
        endpoint: The S3 endpoint.
        provider: stager's profile for it.
        prefix: Of the keys in `BUCKET`, with a slash at its end.
        names: Files, and keys below the prefix.
        size: Bytes of each.
        crcs: CRC-64/NVME of each, as a manifest has them; only stager takes notice.
        folder: Local directory.
    """

    direction: str
    endpoint: str
    provider: str
    prefix: str
    names: tuple[str, ...]
    size: int
    crcs: tuple[int, ...]
    folder: str

    @property
    def total_bytes(self) -> int:
        return self.size * len(self.names)

    def encode(self) -> str:
        return json.dumps(asdict(self))


def decode_work(text: str) -> Work:
    value = json.loads(text)
    return Work(**{**value, "names": tuple(value["names"]), "crcs": tuple(value["crcs"])})
