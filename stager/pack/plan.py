"""Which sample goes into which shard: pure, streamed, and the same for the same input and options.

A shard's exact size is known before it is written, so that space is reserved and parts are cut without surprise.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

from stager.formats.tar import BLOCK_BYTES, END_OF_ARCHIVE, member_bytes
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
        return frozenset(name for fields in {sample.fields for sample in self.samples} for name in fields)

    def without(self, keys: frozenset[str]) -> ShardPlan:
        """This shard, less the samples of these keys."""
        return make_shard(self.name, tuple(sample for sample in self.samples if sample.key not in keys))


def cut_shards(sizes: Iterable[int], limits: Limits) -> Iterator[int]:
    """How many samples each shard takes, from what each takes up: filled one after another, the last two shared out."""
    size = len(END_OF_ARCHIVE)
    held: array[int] = array("q")
    taken: array[int] = array("q")
    for added in sizes:
        if taken and (size + added > limits.shard_bytes_max or len(taken) == limits.shard_samples_max):
            if held:
                yield len(held)
            held, size, taken = taken, len(END_OF_ARCHIVE), array("q")
        taken.append(added)
        size += added
    if held:
        first = _fairest_cut(held, taken, limits)
        yield first
        yield len(held) + len(taken) - first
    elif taken:
        yield len(taken)


def _fairest_cut(held: array[int], taken: array[int], limits: Limits) -> int:
    """Where to cut what the last two shards hold, so that they are as equal as the limits allow."""
    sums = list(accumulate(held + taken))
    room = limits.shard_bytes_max - len(END_OF_ARCHIVE)
    most = limits.shard_samples_max or len(sums)

    def fits(cut: int) -> bool:
        second = len(sums) - cut
        if max(cut, second) > most:
            return False
        return (cut == 1 or sums[cut - 1] <= room) and (second == 1 or sums[-1] - sums[cut - 1] <= room)

    # The cut that filling gave is always among those that fit.
    return min(filter(fits, range(1, len(sums))), key=lambda cut: (abs(sums[-1] - 2 * sums[cut - 1]), cut))


def fill_shards(
    samples: Iterable[PackSample], counts: Iterable[int], *, prefix: str = "shard"
) -> Iterator[ShardPlan]:
    """Shards of so many samples each, named ``<prefix>-000000.tar`` and so on."""
    rest = iter(samples)
    for number, count in enumerate(counts):
        yield make_shard(shard_name(prefix, number), tuple(islice(rest, count)))


class SeededPlace:
    """Where a sample comes in the shuffle of a seed: fixed by the seed and its key."""

    def __init__(self, seed: int) -> None:
        self._secret = hashlib.blake2b(digest_size=8, key=str(seed).encode())

    def __call__(self, sample: PackSample) -> tuple[bytes, str]:
        place = self._secret.copy()
        place.update(sample[0].encode())
        return place.digest(), sample[0]


def shard_name(prefix: str, number: int) -> str:
    return f"{prefix}-{number:06d}.tar"


def sample_bytes(sample: PackSample) -> int:
    """What a sample takes up in a shard."""
    total = 0
    for file in sample[2]:
        name, size = file[0], file[2]
        # The usual case of `member_bytes`, which is asked millions of times.
        if len(name) <= 100 and size < 1 << 33 and name.isascii():
            total += BLOCK_BYTES + (size + 511 & ~511)
        else:
            total += member_bytes(name, size)
    return total


def make_shard(name: str, samples: tuple[PackSample, ...]) -> ShardPlan:
    whole = hashlib.sha256(b"stager-pack-1\n")
    for sample in samples:
        whole.update(describe_sample(sample))
    size = len(END_OF_ARCHIVE) + sum(map(sample_bytes, samples))
    return ShardPlan(name, samples, size, whole.hexdigest()[:32])


def describe_sample(sample: PackSample) -> bytes:
    """What a change of the input changes."""
    lines = [f"{len(file[0])} {file[0]} {file[2]} {file[3]} {file[4]}\n" for file in sample[2]]
    return "".join(lines).encode("utf-8", "surrogateescape")


class PlanHasher:
    """The fingerprint of a whole plan, from its samples as they come; ``options`` is what else decides the bytes."""

    def __init__(self, options: str) -> None:
        self._whole = hashlib.sha256(f"stager-pack-plan-2\n{options}\n".encode())

    def add(self, sample: PackSample) -> None:
        self._whole.update(describe_sample(sample))

    def fingerprint(self) -> str:
        return self._whole.hexdigest()[:32]
