"""From a place in the order to a sample: shards opened when needed, waited for when missing, few kept open."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stager.dataset.decoding import FieldDecoder
from stager.dataset.index_cache import IndexCache
from stager.dataset.selecting import LEFT_OUT
from stager.dataset.shard_files import OpenShard, open_shard
from stager.dataset.sources import Shard, Source
from stager.errors import DeadlineExceeded, FormatError, UsageError
from stager.logs import event

_LOGGER = logging.getLogger("stager.dataset")


@dataclass(frozen=True, slots=True)
class SampleRecipe:
    """What becomes of a sample's bytes.

    Attributes:
        fields: Names of the fields to read, or None for all.
        decoder: Makes values of them, or None for bytes.
        copy: Whether fields are read as bytes; else as views of the mapped shard.
        select: Says of a sample whether it is kept, or None.
        map: Called with the sample last, or None.
    """

    fields: tuple[str, ...] | None = None
    decoder: FieldDecoder | None = None
    copy: bool = True
    select: Callable[[dict[str, Any]], Any] | None = None
    map: Callable[[dict[str, Any]], Any] | None = None


class SampleReader:
    """Reads samples of a source. One iteration has one; it is not shared between threads or processes."""

    def __init__(
        self,
        source: Source,
        recipe: SampleRecipe,
        *,
        wait_s: float,
        shards_open_max: int,
        indices: IndexCache | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            source: Where the shards are.
            recipe: What to make of a sample.
            wait_s: How long to wait for a shard that is not there.
            shards_open_max: How many shards to keep open: at least what one batch alternates between.
            indices: Of shards that were opened before, by this reader or another one.
        """
        self._source = source
        self._recipe = recipe
        self._wait_s = wait_s
        self._shards_open_max = shards_open_max
        self._indices = indices
        self._open: OrderedDict[int, tuple[OpenShard, str]] = OrderedDict()

    def read(self, places: Iterable[tuple[int, int]]) -> list[Any]:
        """The samples at ``(shard, sample in the shard)``.

        Each is a dict of ``__key__``, ``__url__`` and its fields, or what the recipe's map makes of it; `LEFT_OUT` if the
        recipe's select does not keep it.

        Raises:
            FormatError: A shard, or a field that should be decoded, is damaged; names shard, member and offset.
            UsageError: A sample has not got all the recipe's fields.
            DeadlineExceeded, Unavailable: A shard did not come, or nobody is there to bring it.
        """
        recipe = self._recipe
        only, decoder, select, map_sample = recipe.fields, recipe.decoder, recipe.select, recipe.map
        samples: list[Any] = []
        for shard, sample in places:
            opened, url = self._open.get(shard) or self._opened(shard)
            content: dict[str, Any] = opened.fields(sample, only, copy=recipe.copy)
            if only is not None:
                content = _ordered(content, only, opened, sample)
            if decoder is not None:
                content = _decoded(content, decoder, opened, sample)
            whole = {"__key__": opened.index.keys[sample], "__url__": url, **content}
            if select is not None and not _called(select, "select", whole):
                samples.append(LEFT_OUT)
            else:
                samples.append(whole if map_sample is None else _called(map_sample, "map", whole))
        return samples

    def prepare(self, places: Iterable[tuple[int, int]]) -> bool:
        """Wait for the shards of ``places``, and have the kernel read ahead what `read` of them would read.

        Returns:
            Whether another process of this node may read them in place: all are mapped, and nothing is made of their bytes.

        Raises:
            As `read`.
        """
        recipe = self._recipe
        if not (recipe.decoder is None and recipe.select is None and recipe.map is None):
            return False
        here = True
        for shard, sample in places:
            opened, _ = self._open.get(shard) or self._opened(shard)
            here = opened.read_ahead(sample) and here
        return here

    def close(self) -> None:
        """Close all shards."""
        while self._open:
            self._open.popitem()[1][0].close()

    def _opened(self, number: int) -> tuple[OpenShard, str]:
        """Open a shard that is not, and close the one that was opened first if there are too many."""
        shard = self._source.shard(number)
        opened = self._obtain(shard), self._source.url(shard)
        self._open[number] = opened
        if len(self._open) > self._shards_open_max:
            self._open.popitem(last=False)[1][0].close()
        return opened

    def _obtain(self, shard: Shard) -> OpenShard:
        """Open the shard: at once if it is there, else when it comes; a damaged copy is asked for once more."""
        end = time.monotonic() + self._wait_s
        path = self._source.path(shard)
        damaged = False
        while True:
            try:
                return open_shard(path, size=shard.size, samples=shard.samples, indices=self._indices)
            except FileNotFoundError:
                # Not there yet, or evicted between its coming and our opening it.
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"shard `{shard.name}` of `{self._source.name}` did not come within {self._wait_s:.0f} s",
                        subject=shard.name,
                        hint="`stager status` shows what the daemon does; a larger cache, or wait_timeout_s, may help",
                    ) from None
                path = self._source.fetch(shard, left, damaged=False)
            except FormatError as damage:
                if damaged:
                    raise
                damaged = True
                event(
                    _LOGGER,
                    logging.WARNING,
                    "shard.damaged",
                    shard=shard.name,
                    path=path,
                    reason=damage.message,
                )
                try:
                    path = self._source.fetch(shard, max(end - time.monotonic(), 0.001), damaged=True)
                except FormatError:
                    raise damage from None


def _ordered(content: dict[str, Any], only: Sequence[str], opened: OpenShard, sample: int) -> dict[str, Any]:
    """``content`` in the order of ``only``, all of which it must have."""
    if len(content) < len(only):
        missing = next(name for name in only if name not in content)
        names = [place.name for place in opened.index.places(sample)]
        of = f"`{opened.path}`: sample `{opened.index.key(sample)}`"
        raise UsageError(
            f"{of} has no field `{missing}`, only {', '.join(names)}",
            subject=of,
            hint="leave the field out of fields=[...], or fields away and choose in map",
        )
    return {name: content[name] for name in only}


def _decoded(
    content: dict[str, Any], decoder: FieldDecoder, opened: OpenShard, sample: int
) -> dict[str, Any]:
    def where(field: str) -> str:
        offset = next(place.offset for place in opened.index.places(sample) if place.name == field)
        return f"`{opened.path}`: `{opened.index.key(sample)}.{field}` at byte {offset}"

    return {field: decoder.decode(field, data, where) for field, data in content.items()}


def _called(function: Callable[[dict[str, Any]], Any], name: str, sample: dict[str, Any]) -> Any:
    try:
        return function(sample)
    except Exception as error:
        error.add_note(f"stager: in {name}, of sample `{sample['__key__']}` of `{sample['__url__']}`")
        raise
