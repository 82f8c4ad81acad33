"""From a place in the order to a sample: shards opened when needed, waited for when missing, few kept open."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stager.dataset.decoding import FieldDecoder
from stager.dataset.shard_files import OpenShard, open_shard
from stager.dataset.sources import Shard, Source
from stager.errors import DeadlineExceeded, FormatError, UsageError
from stager.formats.index import FieldPlace
from stager.logs import event

_LOGGER = logging.getLogger("stager.dataset")


@dataclass(frozen=True, slots=True)
class SampleRecipe:
    """What becomes of a sample's bytes.

    Attributes:
        fields: Names of the fields to read, or None for all.
        decoder: Makes values of them, or None for bytes.
        map: Called with the sample last, or None.
    """

    fields: tuple[str, ...] | None = None
    decoder: FieldDecoder | None = None
    map: Callable[[dict[str, Any]], Any] | None = None


class SampleReader:
    """Reads samples of a source. One iteration has one; it is not shared between threads or processes."""

    def __init__(self, source: Source, recipe: SampleRecipe, *, wait_s: float, shards_open_max: int) -> None:
        """Read nothing yet.

        Args:
            source: Where the shards are.
            recipe: What to make of a sample.
            wait_s: How long to wait for a shard that is not there.
            shards_open_max: How many shards to keep open: at least what one batch alternates between.
        """
        self._source = source
        self._recipe = recipe
        self._wait_s = wait_s
        self._shards_open_max = shards_open_max
        self._open: OrderedDict[int, OpenShard] = OrderedDict()

    def read(self, shard: int, sample: int) -> Any:
        """The sample: a dict of ``__key__``, ``__url__`` and its fields, or what the recipe's map makes of it.

        Raises:
            FormatError: The shard, or a field that should be decoded, is damaged; names shard, member and offset.
            DeadlineExceeded, Unavailable: The shard did not come, or nobody is there to bring it.
        """
        opened = self._opened(shard)
        index = opened.index
        key = index.key(sample)
        places = index.places(sample)
        if self._recipe.fields is not None:
            places = _chosen(places, self._recipe.fields, f"`{opened.path}`: sample `{key}`")
        content: dict[str, Any] = {place.name: opened.read(place.offset, place.size) for place in places}
        if self._recipe.decoder is not None:
            offsets = {place.name: place.offset for place in places}

            def where(field: str) -> str:
                return f"`{opened.path}`: `{key}.{field}` at byte {offsets[field]}"

            decode = self._recipe.decoder.decode
            content = {field: decode(field, data, where) for field, data in content.items()}
        whole = {"__key__": key, "__url__": self._source.url(self._source.shard(shard)), **content}
        return whole if self._recipe.map is None else self._mapped(whole)

    def close(self) -> None:
        """Close all shards."""
        while self._open:
            self._open.popitem()[1].close()

    def _mapped(self, sample: dict[str, Any]) -> Any:
        assert self._recipe.map is not None
        try:
            return self._recipe.map(sample)
        except Exception as error:
            error.add_note(f"stager: in map, of sample `{sample['__key__']}` of `{sample['__url__']}`")
            raise

    def _opened(self, number: int) -> OpenShard:
        opened = self._open.get(number)
        if opened is not None:
            self._open.move_to_end(number)
            return opened
        opened = self._obtain(self._source.shard(number))
        self._open[number] = opened
        while len(self._open) > self._shards_open_max:
            self._open.popitem(last=False)[1].close()
        return opened

    def _obtain(self, shard: Shard) -> OpenShard:
        """Open the shard: at once if it is there, else when it comes; a damaged copy is asked for once more."""
        end = time.monotonic() + self._wait_s
        path = self._source.path(shard)
        damaged = False
        while True:
            try:
                return open_shard(path, size=shard.size, samples=shard.samples)
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


def _chosen(places: Sequence[FieldPlace], fields: Sequence[str], of: str) -> list[FieldPlace]:
    by_name = {place.name: place for place in places}
    missing = [name for name in fields if name not in by_name]
    if missing:
        raise UsageError(
            f"{of} has no field `{missing[0]}`, only {', '.join(by_name)}",
            subject=of,
            hint="leave the field out of fields=[...], or fields away and choose in map",
        )
    return [by_name[name] for name in fields]
