"""What every transfer works with, put together once by the composition root."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from stager.backoff import backoff_s as backoff_s
from stager.budget import ByteBudget, RateLimit
from stager.disk import Disk
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
