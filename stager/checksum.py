"""Checksums: SHA-256 to name content, CRC-64/NVME to check parts that arrive in any order.

CRCs of neighbouring parts combine into the CRC of the whole, so a parallel download is verified without a second pass
over the bytes. Both run in hardware and free the GIL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from awscrt import checksums as _crt

from stager.formats.digests import Digest

Buffer = bytes | bytearray | memoryview


class Hasher:
    """Both checksums of a stream, in one pass."""

    __slots__ = ("_crc64nvme", "_sha256", "size")

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._crc64nvme = 0
        self.size = 0

    def update(self, data: Buffer) -> None:
        self._sha256.update(data)
        self._crc64nvme = crc64nvme(data, self._crc64nvme)
        self.size += len(data)

    def digest(self) -> Digest:
        return Digest(self._sha256.hexdigest(), self._crc64nvme)


def digest_of(data: Buffer) -> Digest:
    """Both checksums of bytes in memory."""
    return Digest(hashlib.sha256(data).hexdigest(), crc64nvme(data))


def crc64nvme(data: Buffer, previous: int = 0) -> int:
    """CRC-64/NVME of ``data``, going on from ``previous``."""
    return int(_crt.crc64nvme(data, previous))


def combine_crc64nvme(first: int, second: int, second_bytes: int) -> int:
    """The CRC of two neighbouring pieces, from the CRC of each and the length of the second."""
    return int(_crt.combine_crc64nvme(first, second, second_bytes))


def combine_all(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC of a whole from ``(crc, length in bytes)`` of its pieces, in order."""
    whole = 0
    for crc, length in pieces:
        whole = combine_crc64nvme(whole, crc, length)
    return whole
