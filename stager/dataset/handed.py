"""What a worker hands to its loader in place of bytes that nobody decodes: where they lie, in files that both can map.

The worker has waited for the shards, found them whole, and told the kernel what will be read; the bytes themselves never go
through a pipe or a copy in shared memory. The loader's process reads them where they lie.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator


class HandedPlaces:
    """Places of samples, ``(shard, sample in the shard)``; small when pickled. Loaders hand it on as they find it."""

    __slots__ = ("_numbers",)

    def __init__(self, places: Iterable[tuple[int, int]]) -> None:
        self._numbers = array("Q", (number for place in places for number in place))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        numbers = iter(self._numbers)
        return zip(numbers, numbers, strict=True)
