"""Wall-clock time, injected.

Monotonic time, sleeps and timeouts come from the running event loop, so a virtual loop controls them.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What the engine may know of the calendar."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's clock."""

    def wall_ns(self) -> int:
        return time.time_ns()


def iso_utc(wall_ns: int) -> str:
    """A wall time as ``2026-12-01T02:03:04Z``."""
    return datetime.fromtimestamp(wall_ns / 1e9, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
