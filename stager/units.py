"""Sizes and rates as people write them, to bytes and back."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")


def parse_size(text: str | int) -> int:
    """``2TB``, ``256MB``, ``1.5GiB`` or plain bytes, as bytes.

    Raises:
        ValueError: It is none of these; the message says what would be.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError("a size is written like 256MB, 1.5GiB or 2TB")
    if isinstance(text, int):
        size = text
    else:
        match = _SIZE.fullmatch(text.strip().lower())
        if match is None or match[2] not in _FACTORS:
            raise ValueError(f"`{text}` is not a size; write it like 256MB, 1.5GiB or 2TB")
        size = int(float(match[1]) * _FACTORS[match[2]])
    if not 0 <= size < 1 << 62:
        raise ValueError(f"`{text}` is out of range")
    return size


def parse_rate(text: str | int) -> int | None:
    """``500MB/s`` as bytes a second; ``off`` as None, no limit."""
    if isinstance(text, str) and text.strip().lower() == "off":
        return None
    plain = re.sub(r"/s(ec)?$", "", text.strip()) if isinstance(text, str) else text
    try:
        rate = parse_size(plain)
    except ValueError:
        raise ValueError(f"`{text}` is not a rate; write it like 500MB/s, or `off`") from None
    if rate == 0:
        raise ValueError("a rate of 0 would never move a byte; write `off` for no limit")
    return rate


def format_size(size: float) -> str:
    """Bytes for people, in powers of a thousand: ``12.3 MB``."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} PB"


def format_duration(seconds: float) -> str:
    """Seconds for people: ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
