"""Which sample goes into which shard: pure, streamed, and the same for the same input and options.

A shard's exact size is known before it is written, so that space is reserved and parts are cut without surprise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stager.formats.tar import END_OF_ARCHIVE, member_bytes
from stager.pack.samples import PackSample

SHARD_BYTES_MAX = 256_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """When a shard is full.

    Attributes:
        shard_bytes_max: Bytes of its file; one sample that is larger gets a shard to itself.
        shard_samples_max: Samples, or None for any number.
    """

    shard_bytes_max: int = SHARD_BYTES_MAX
    shard_samples_max: int | None = None


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard to be written.

    Attributes:
        name: Of its file, e.g. ``shard-000000.tar``.
        samples: In order.
        size: Bytes of the file.
        fingerprint: Changes with any member's name, size or time of change, and with nothing else.
    """

    name: str
    samples: tuple[PackSample, ...]
    size: int
    fingerprint: str

    @property
    def fields(self) -> frozenset[str]:
        """Names of the fields that its samples have."""
        return frozenset(name for sample in self.samples for name in sample.fields)

    def without(self, keys: frozenset[str]) -> ShardPlan:
        """This shard, less the samples of these keys."""
        return make_shard(self.name, tuple(sample for sample in self.samples if sample.key not in keys))


def plan_shards(
    samples: Iterable[PackSample], limits: Limits, *, prefix: str = "shard"
) -> Iterator[ShardPlan]:
    """Shards filled one after another, named ``<prefix>-000000.tar`` and so on."""
    number, size = 0, len(END_OF_ARCHIVE)
    taken: list[PackSample] = []
    for sample in samples:
        added = sample_bytes(sample)
        full = size + added > limits.shard_bytes_max or len(taken) == limits.shard_samples_max
        if taken and full:
            yield make_shard(shard_name(prefix, number), tuple(taken))
            number, size, taken = number + 1, len(END_OF_ARCHIVE), []
        taken.append(sample)
        size += added
    if taken:
        yield make_shard(shard_name(prefix, number), tuple(taken))


def shuffle_samples(samples: Iterable[PackSample], seed: int) -> list[PackSample]:
    """The samples in an order that is fixed by ``seed`` and their keys; all of them in memory."""
    secret = str(seed).encode()

    def place(sample: PackSample) -> tuple[bytes, str]:
        return hashlib.blake2b(sample.key.encode(), digest_size=8, key=secret).digest(), sample.key

    return sorted(samples, key=place)


def shard_name(prefix: str, number: int) -> str:
    return f"{prefix}-{number:06d}.tar"


def sample_bytes(sample: PackSample) -> int:
    """What a sample takes up in a shard."""
    return sum(member_bytes(file.name, file.size) for file in sample.files)


def make_shard(name: str, samples: tuple[PackSample, ...]) -> ShardPlan:
    whole = hashlib.sha256(b"stager-pack-1\n")
    for sample in samples:
        for file in sample.files:
            whole.update(f"{len(file.name)} {file.name} {file.size} {file.mtime_ns}\n".encode())
    size = len(END_OF_ARCHIVE) + sum(map(sample_bytes, samples))
    return ShardPlan(name, samples, size, whole.hexdigest()[:32])


class PlanHasher:
    """The fingerprint of a whole plan, from its shards as they come."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256(b"stager-pack-plan-1\n")

    def add(self, shard: ShardPlan) -> None:
        self._whole.update(f"{shard.name} {shard.fingerprint} {shard.size}\n".encode())

    def fingerprint(self) -> str:
        return self._whole.hexdigest()[:32]
