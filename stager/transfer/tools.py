"""What every transfer works with, put together once by the composition root."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from stager.budget import ByteBudget, RateLimit
from stager.disk import Disk
from stager.errors import Throttled
from stager.offload import Offload

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Tools:
    """Disk, threads, shared bounds and randomness.

    Attributes:
        disk: Where files lie.
        offload: How blocking work leaves the loop.
        memory: Bytes of transfers in flight, shared by all.
        download_rate: Cap on what comes in.
        upload_rate: Cap on what goes out.
        random: For jitter only.
    """

    disk: Disk
    offload: Offload
    memory: ByteBudget = field(default_factory=lambda: ByteBudget(128 * MIB))
    download_rate: RateLimit = field(default_factory=RateLimit)
    upload_rate: RateLimit = field(default_factory=RateLimit)
    random: random.Random = field(default_factory=lambda: random.Random(0))


Sleep = Callable[[float], Awaitable[None]]


def backoff_s(attempt: int, chance: random.Random, error: BaseException | None = None) -> float:
    """How long to wait before attempt number ``attempt`` (from 1 for the first repeat): full jitter, at most 20 s.

    A store that named a time is believed, up to a minute.
    """
    if isinstance(error, Throttled) and error.retry_after_s is not None:
        return min(60.0, error.retry_after_s)
    return chance.uniform(0.05, min(20.0, 0.2 * 2**attempt))
