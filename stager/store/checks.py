"""What every store checks alike before it asks anybody: metadata, part numbers, and bytes against their checksum."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stager.checksum import crc64nvme
from stager.errors import IntegrityError, PreconditionFailed, UsageError
from stager.formats.digests import encode_crc64nvme
from stager.store.api import Buffer

METADATA_BYTES_MAX = 2048
PARTS_MAX = 10_000

_METADATA_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,127}")


def check_metadata(key: str, metadata: Mapping[str, str] | None) -> dict[str, str]:
    """``metadata`` with names in lower case, if every store can keep it.

    Raises:
        UsageError: A name other than letters, digits, ``.``, ``_`` and ``-``; a value that is not printable ASCII; more
            than 2 KiB in all. Values travel as HTTP headers.
    """
    lowered = {name.lower(): value for name, value in (metadata or {}).items()}
    for name, value in lowered.items():
        if not _METADATA_NAME.fullmatch(name):
            raise UsageError(f"`{key}`: metadata name {name[:80]!r} cannot be stored", subject=key)
        if not (value.isascii() and value.isprintable()) or value != value.strip():
            raise UsageError(
                f"`{key}`: the value of metadata `{name}` cannot be stored",
                subject=key,
                hint="values are printable ASCII without spaces around them, since they travel as HTTP headers",
            )
    if sum(len(name) + len(value) for name, value in lowered.items()) > METADATA_BYTES_MAX:
        raise UsageError(f"`{key}`: metadata is larger than {METADATA_BYTES_MAX} bytes", subject=key)
    return lowered


def check_part_number(key: str, number: int) -> int:
    """``number`` if a part may have it."""
    if not 1 <= number <= PARTS_MAX:
        raise UsageError(f"`{key}`: part number {number} is not from 1 to {PARTS_MAX}", subject=key)
    return number


def check_crc64nvme(key: str, body: Buffer, expected: int | None) -> int:
    """The CRC of ``body``, which must be ``expected`` if that is given.

    Raises:
        IntegrityError: It is another.
    """
    actual = crc64nvme(body)
    if expected is not None and actual != expected:
        raise wrong_checksum(key, expected)
    return actual


def wrong_checksum(key: str, expected: int) -> IntegrityError:
    """The bytes do not have the checksum that came with them."""
    return IntegrityError(
        f"`{key}`: the bytes do not have the checksum {encode_crc64nvme(expected)} that was sent with them",
        subject=key,
        hint="they changed in memory or on the way; read them again from their source",
    )


def span_beyond_end(key: str, size: int, start: int, stop: int) -> IntegrityError:
    """More was asked for than there is."""
    return IntegrityError(
        f"`{key}` has {size} bytes; {start} to {stop} were asked for",
        subject=key,
        hint="the object is not the one that its manifest describes; run `stager verify` on its dataset or run",
    )


def other_version(key: str) -> PreconditionFailed:
    """The object is there in another version."""
    return PreconditionFailed(f"`{key}` is not the version that was named", subject=key)
