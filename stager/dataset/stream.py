"""What a dataset reads, in which order: one source, or a mix of several, behind one set of questions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stager.dataset.mixed import MixedSource, WeightedSource, begin_mix
from stager.dataset.sources import Source
from stager.errors import UsageError
from stager.formats.batches import BatchGeometry, LaneOrder, encode_order
from stager.formats.cursor import Cursor
from stager.formats.mixing import Mix, MixOrder, encode_mix_orders
from stager.formats.order import EpochOrder

SourceName = str | os.PathLike[str]


class Stream:
    """The samples of one source or of a mix.

    Attributes:
        source: Where the shards are.
        mix: How it began, if it is of several sources.
        samples: In an epoch.
    """

    def __init__(self, source: Source, mix: Mix | None = None) -> None:
        self.source = source
        self.mix = mix
        self.samples = sum(source.shard_samples) if mix is None else mix.epoch_samples

    @property
    def parallel(self) -> int:
        """How many sources are read side by side."""
        return 1 if self.mix is None else len(self.mix.sources)

    def order(self, cursor: Cursor) -> LaneOrder:
        """The order of the cursor's epoch."""
        if cursor.mix is None or not isinstance(self.source, MixedSource):
            return EpochOrder(cursor.plan, self.source.shard_samples)
        return MixOrder(cursor.plan, cursor.mix, self.source.parts)

    def check(self, cursor: Cursor) -> None:
        """UsageError if the stream has no such order."""
        if cursor.mix is not None:
            self.order(cursor)

    def announcement(
        self, order: LaneOrder, geometry: BatchGeometry, position: int, lanes: Iterable[int]
    ) -> dict[str, Any]:
        """What `Source.announce` takes of a reader of ``lanes``."""
        if isinstance(order, MixOrder):
            return {"mix": encode_mix_orders(order, geometry, position, lanes)}
        return encode_order(order.plan, geometry)


def open_stream(
    source: SourceName | Sequence[WeightedSource],
    epoch_samples: int | None,
    open_one: Callable[[SourceName], Source],
) -> Stream:
    """The stream of a source, or of a mix of ``(source, weight)``.

    Raises:
        UsageError: What is given is neither; weights or lengths that cannot be meant.
    """
    if isinstance(source, str | os.PathLike):
        if epoch_samples is not None:
            raise UsageError(
                "epoch_samples is the length of a mix's epochs; those of one dataset have all its samples",
                subject="epoch_samples",
            )
        return Stream(open_one(source))
    pairs: list[WeightedSource] = []
    for pair in source:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(
                f"a mix is a list of (source, weight), without {pair!r}",
                subject="source",
                hint='such as [("s3://bucket/text", 0.7), ("s3://bucket/code", 0.3)]',
            )
        pairs.append((pair[0], pair[1]))
    if not pairs:
        raise UsageError("a mix of no sources", subject="source", hint="give at least one (source, weight)")
    mixed = MixedSource(tuple(open_one(name) for name, _ in pairs))
    return Stream(mixed, begin_mix(mixed, [weight for _, weight in pairs], epoch_samples))
