"""Several sources as one: their shards numbered through, each asked of the source that has it."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from stager.dataset.sources import Shard, Source
from stager.errors import UsageError
from stager.formats import wire
from stager.formats.mixing import (
    EPOCH_SAMPLES_MAX,
    Mix,
    MixSource,
    make_mix,
    mix_fingerprint,
    whole_weights,
)
from stager.formats.order import check_whole_number

WeightedSource = tuple[str | os.PathLike[str], float]


@dataclass(frozen=True)
class MixedSource:
    """A mix of datasets.

    Attributes:
        sources: In the order that shards are numbered in.
    """

    sources: tuple[Source, ...]
    _firsts: array[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        counts = (len(source.shard_samples) for source in self.sources)
        object.__setattr__(self, "_firsts", array("Q", accumulate(counts, initial=0)))

    @property
    def name(self) -> str:
        return " + ".join(source.name for source in self.sources)

    @property
    def fingerprint(self) -> str:
        return mix_fingerprint(source.fingerprint for source in self.sources)

    @property
    def parts(self) -> list[MixSource]:
        """What the order of a mix is computed from."""
        return [MixSource(source.fingerprint, source.shard_samples) for source in self.sources]

    @property
    def shard_samples(self) -> Sequence[int]:
        whole = array("Q")
        for source in self.sources:
            whole.extend(source.shard_samples)
        return whole

    @property
    def fields(self) -> tuple[str, ...]:
        """All that any source has; empty where one does not know."""
        if not all(source.fields for source in self.sources):
            return ()
        return tuple(sorted({name for source in self.sources for name in source.fields}))

    def shard(self, number: int) -> Shard:
        source = bisect_right(self._firsts, number) - 1
        return replace(self.sources[source].shard(number - self._firsts[source]), source=source)

    def url(self, shard: Shard) -> str:
        return self.sources[shard.source].url(shard)

    def path(self, shard: Shard) -> str:
        return self.sources[shard.source].path(shard)

    def fetch(self, shard: Shard, wait_s: float, *, damaged: bool) -> str:
        return self.sources[shard.source].fetch(shard, wait_s, damaged=damaged)

    def announce(
        self, order: Mapping[str, Any], position: int, reader: str, rank: int, world: int
    ) -> wire.AnnounceReply | None:
        """Announce to each source what is read of it: a reader of a mix is a reader of every source.

        ``order`` has an entry ``mix``, as `encode_mix_orders` gives it.
        """
        needed, capacity = 0, 0
        for part in order["mix"]:
            number = part["source"]
            reply = self.sources[number].announce(
                part["order"], part["position"], f"{reader}/{number}", rank, world
            )
            if reply is not None:
                # Two sources of one dataset have one need, which the daemon tells to both.
                needed += reply.cache_bytes_needed
                capacity = reply.cache_bytes
        return wire.AnnounceReply(needed, capacity) if capacity else None


def begin_mix(source: MixedSource, weights: Sequence[float], epoch_samples: int | None) -> Mix:
    """The mix at its beginning.

    Args:
        source: What is mixed.
        weights: Of every source.
        epoch_samples: Length of the mix's epochs; None takes the samples of all sources together.

    Raises:
        UsageError: Weights that are none, or a source without samples.
    """
    whole = whole_weights(weights)
    for part in source.sources:
        if not sum(part.shard_samples):
            raise UsageError(
                f"`{part.name}` has no samples", subject=part.name, hint="leave it out of the mix"
            )
    if epoch_samples is None:
        epoch_samples = sum(source.shard_samples)
    check_whole_number("epoch_samples", epoch_samples, 1, EPOCH_SAMPLES_MAX)
    return make_mix([part.fingerprint for part in source.sources], epoch_samples, whole)
