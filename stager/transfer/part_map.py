"""Part maps: what a download that was killed claims to have, in a small file beside its staging file.

A map is a claim, not a proof: whoever resumes reads every claimed part back and keeps only those that have the CRC they
had on the wire. So neither the staging file nor its map is synced while bytes arrive, and a power failure costs at most what
it tore.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from stager.checksum import crc64nvme
from stager.disk import Disk
from stager.errors import FormatError
from stager.formats.digests import decode_crc64nvme, encode_crc64nvme
from stager.formats.fields import as_object, load_object, take_count, take_text
from stager.store.api import ObjectVersion
from stager.transfer.ranges import Part

PART_MAP_SUFFIX = ".parts"
PART_MAP_BYTES_MAX = 4 << 20
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class PartMap:
    """What a part map claims.

    Attributes:
        key: The object's key.
        version: Which state of it the parts are of.
        parts: CRC of each part that was written, by the part's number.
    """

    key: str
    version: ObjectVersion
    parts: Mapping[int, int]


def encode_part_map(claim: PartMap, *, size: int, parts: list[Part]) -> bytes:
    """The part map of an object of ``size`` bytes, cut into ``parts``, as JSON."""
    return json.dumps(
        {
            "key": claim.key,
            "etag": claim.version.etag,
            "bytes": size,
            "part_bytes": parts[0].size if parts else 0,
            "parts": {str(number): encode_crc64nvme(crc) for number, crc in sorted(claim.parts.items())},
        }
    ).encode()


def decode_part_map(raw: bytes, *, size: int, parts: list[Part], of: str) -> PartMap:
    """A part map that fits an object of ``size`` bytes and these cuts; ``of`` names it in messages.

    Raises:
        FormatError: It is damaged, or of another object or other cuts.
    """
    value = load_object(raw, of=of)
    fits = (size, parts[0].size if parts else 0)
    if (take_count(value, "bytes", at=of), take_count(value, "part_bytes", at=of)) != fits:
        raise FormatError(f"`{of}` is of another object or other parts", subject=of)
    claimed = {}
    for number, crc in as_object(value.get("parts"), at=of).items():
        known = number.isascii() and number.isdigit() and len(number) < 10 and int(number) < len(parts)
        if not known or not isinstance(crc, str):
            raise FormatError(f"`{of}` claims a part {number[:40]!r}", subject=of)
        claimed[int(number)] = decode_crc64nvme(crc)
    etag = take_text(value, "etag", at=of)
    if not etag:
        raise FormatError(f"`{of}` does not say of which version its parts are", subject=of)
    return PartMap(take_text(value, "key", at=of), ObjectVersion(etag), claimed)


def read_claim(disk: Disk, staged: str, *, key: str, size: int, parts: list[Part]) -> PartMap | None:
    """What the map beside the staging file ``staged`` claims of ``key``; None if there is nothing to go on from."""
    path = staged + PART_MAP_SUFFIX
    try:
        if disk.stat(staged).size != size:
            return None
        claim = decode_part_map(disk.read_at(path, 0, PART_MAP_BYTES_MAX), size=size, parts=parts, of=path)
    except (FileNotFoundError, FormatError):
        return None
    return claim if claim.key == key else None


def write_claim(disk: Disk, staged: str, raw: bytes) -> None:
    """Replace the map beside ``staged``."""
    disk.write_file(staged + PART_MAP_SUFFIX, raw, durable=False)


def drop_staged(disk: Disk, staged: str) -> None:
    """Remove a staging file and its map."""
    # The map first: a map without its file claims nothing, a file without its map is swept at the next start.
    disk.remove(staged + PART_MAP_SUFFIX)
    disk.remove(staged)


def crc_of_part(disk: Disk, path: str, part: Part) -> int:
    """The CRC that a part's bytes have on disk; of what there is, if the file is shorter."""
    crc, offset = 0, part.span.start
    while offset < part.span.stop:
        piece = disk.read_at(path, offset, min(_READ_BYTES, part.span.stop - offset))
        if not piece:
            break
        crc = crc64nvme(piece, crc)
        offset += len(piece)
    return crc
