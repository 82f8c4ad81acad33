"""How digests are written down: the value and its text forms. Computing them is `stager.checksum`'s business."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from stager.errors import FormatError


@dataclass(frozen=True, slots=True)
class Digest:
    """What a manifest knows of an object's bytes.

    Attributes:
        sha256: 64 lower-case hexadecimal digits.
        crc64nvme: The CRC as an unsigned 64-bit integer.
    """

    sha256: str
    crc64nvme: int


def encode_crc64nvme(crc: int) -> str:
    """The form of S3's ``x-amz-checksum-crc64nvme`` header and of our manifests: base64 of 8 bytes, big end first."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode("ascii")


def decode_crc64nvme(text: str) -> int:
    """The inverse of `encode_crc64nvme`.

    Raises:
        FormatError: The text is not base64 of exactly 8 bytes.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 8:
        raise FormatError(f"`{text[:40]}` is not a CRC-64/NVME in base64", subject="crc64nvme")
    return int.from_bytes(raw, "big")


def check_sha256(text: object) -> str:
    """``text`` if it is 64 lower-case hexadecimal digits.

    Raises:
        FormatError: It is anything else.
    """
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-f]{64}", text):
        raise FormatError(f"`{str(text)[:80]}` is not a SHA-256 in hexadecimal", subject="sha256")
    return text
