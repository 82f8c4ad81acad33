"""`StagedDataset`: a torch dataset over WebDataset shards whose order is exact, elastic and resumable."""

from __future__ import annotations

import itertools
import os
import socket as sockets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from stager.client import find_socket
from stager.dataset.announcing import Announcer
from stager.dataset.collating import collate_samples
from stager.dataset.decoding import Decode, FieldDecoder
from stager.dataset.handed import HandedPlaces
from stager.dataset.index_cache import IndexCache
from stager.dataset.mixed import WeightedSource
from stager.dataset.ranks import check_ranks, find_ranks
from stager.dataset.reading import SampleReader, SampleRecipe
from stager.dataset.selecting import fill_batch
from stager.dataset.sources import Source, open_source
from stager.dataset.stream import open_stream
from stager.dataset.tokens import TokenBlocks
from stager.dataset.turns import Place, Turns
from stager.errors import UsageError
from stager.formats.batches import GLOBAL_BATCH_MAX, BatchGeometry, EpochBatches, count_steps
from stager.formats.cursor import Cursor, decode_cursor, encode_cursor
from stager.formats.fields import take_count
from stager.formats.mixing import CHANGES_MAX, decode_history, encode_history, whole_weights
from stager.formats.order import OrderPlan, check_whole_number, lanes_of_rank

SHARDS_OPEN_MAX = 256
WAIT_MAX_S = 7 * 86400.0
_SKIPPED = "skipped"
_serial = itertools.count()


class StagedDataset(IterableDataset[Any]):
    """Samples of WebDataset shards, from a local directory or through the node's cache.

    The stream of global batches is the same for any number of workers and for any world size that divides the batch; it is
    another one in every epoch; and a state of a few hundred bytes resumes it exactly. Iterate it directly, through a
    `StagedLoader`, or through a plain ``DataLoader``; see ``docs/adr/0031-batches-and-loaders.md`` for what each gives.

    A sample is a dict: ``__key__``, ``__url__``, then the fields by their names. With ``batch_size``, an item is a
    `Batch`: a dict of columns.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[WeightedSource],
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        window: int = 8,
        lanes: int | None = None,
        epoch_samples: int | None = None,
        drop_last: bool = False,
        fields: Sequence[str] | None = None,
        decode: Decode = True,
        copy: bool = True,
        allow_pickle: bool = False,
        select: Callable[[dict[str, Any]], Any] | None = None,
        map: Callable[[dict[str, Any]], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        tokens: TokenBlocks | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        socket: str | None = None,
        on_daemon_loss: Literal["wait", "fail"] = "wait",
        wait_timeout_s: float = 600.0,
    ) -> None:
        """Open the dataset: read its manifest, or the shards' headers where there is none.

        Args:
            source: A directory of shards, which is read in place, or the URL of a dataset in a bucket, which the node's
                daemon stages; or a list of ``(source, weight)``, which are mixed: see `stager.formats.mixing`.
            batch_size: Samples of this rank in a step; None gives single samples.
            global_batch_size: Samples of all ranks in a step, instead of ``batch_size``.
            shuffle: False gives the dataset's own order.
            seed: Chooses the order, with the epoch.
            window: Among how many consecutive shards samples are mixed; so many are open, and in the cache, at once.
            lanes: Streams that advance together, so that nodes read different shards; None takes the number of nodes.
            epoch_samples: Length of a mix's epochs, in samples; None takes all sources' samples together. Sources are read
                on over these epochs, each through its own.
            drop_last: Drop what is left for less than a whole global batch. Otherwise the last batch is shorter, of equal
                size on all ranks; with several ranks, fewer samples than ranks may then come twice.
            fields: Read only these.
            decode: True decodes fields as webdataset does; an image specification (``"pil"``, ``"torchrgb8"``), a handler or
                a list of these comes first; False gives bytes.
            copy: False gives fields that are not decoded as read-only memoryviews of the shard's file in place of bytes,
                where it lies on a local disk: nothing is copied until it is used. They are valid for as long as they are
                held. What ``map`` and ``collate`` return from a worker must not hold any; a plain DataLoader's workers
                give bytes.
            allow_pickle: Decode fields that are pickles, which may run any code.
            select: Says of a decoded sample whether it is kept. One that is not is replaced, at its place, by the next kept
                one of its batch; ``__mask__`` is True for samples at their own place. So ranks stay in step.
            map: Called with each sample that is kept, in the worker.
            collate: Makes a batch of a list of samples, instead of `collate_samples`.
            tokens: Cut the ids of one field into blocks: stands for ``fields``, ``decode`` and ``collate``.
            rank: Of this process; with ``world_size``, instead of torch.distributed's or the launcher's.
            world_size: Number of ranks.
            cache: Directory for the cache of a private daemon, which is started where no socket is known and ends with
                its last client.
            cache_bytes: Bound of that cache, e.g. ``"500GB"``; None takes four fifths of what is free there.
            socket: The daemon's; None takes ``STAGER_SOCKET`` or the default place.
            on_daemon_loss: Whether a missing shard waits for a daemon that is away to come back.
            wait_timeout_s: Longest wait for a shard, a manifest or the daemon, seconds.

        Raises:
            UsageError: Arguments that cannot be meant; sizes that do not divide, with those that would.
            ConfigError, Unavailable, DeadlineExceeded, FormatError: As the source is opened.
        """
        super().__init__()
        _check_wait(on_daemon_loss, wait_timeout_s)
        self._ranks = find_ranks(rank, world_size)
        self._ranks_given = rank is not None
        self._geometry = _geometry(batch_size, global_batch_size, self._ranks.world, drop_last)
        self._batched = batch_size is not None or global_batch_size is not None
        if tokens is not None:
            _check_alone(tokens, fields=fields, decode=decode, collate=collate, batch_size=self._batched)
            fields, decode, collate = [tokens.field], tokens.decode, tokens.collate
        self._collate = collate or collate_samples
        if collate is not None and not self._batched:
            raise UsageError("collate without batch_size has nothing to collate", subject="collate")
        decoder = None if decode is False else FieldDecoder(decode, allow_pickle=allow_pickle)
        only = None if fields is None else tuple(dict.fromkeys(fields))
        # webdataset's handlers take bytes; blocks of ids are cut from views.
        copied = copy if decoder is None else tokens is None
        self._recipe = SampleRecipe(only, decoder, copied, select, map)
        self._indices = IndexCache()
        self._wait_s = wait_timeout_s
        self._stream = open_stream(
            source,
            epoch_samples,
            lambda one: open_source(
                one,
                find_socket=lambda: (
                    find_socket(socket) or _private_socket(cache, cache_bytes, wait_timeout_s)
                ),
                patience_s=wait_timeout_s if on_daemon_loss == "wait" else 0.0,
                wait_s=wait_timeout_s,
                indices=self._indices,
            ),
        )
        self._source = self._stream.source
        _check_fields(self._source, self._recipe.fields)
        self._lanes_given = lanes is not None
        plan = OrderPlan(self._source.fingerprint, seed, 0, lanes or self._ranks.nodes, window, shuffle)
        self._begin = self._from = Cursor(plan, mix=self._stream.mix)
        self._delivered = 0
        self._check_sizes(self._begin)
        self._reader = f"{sockets.gethostname()}/{os.getpid()}-{next(_serial)}/{self._ranks.rank}"
        self._turns = Turns(_changes_max(self._begin))
        self._recorded = False
        self._tell_workers(self._begin, counting=True)
        # Used in workers alone, by torchdata's StatefulDataLoader: where this worker is to begin, and its batches so far.
        self._worker_begin: tuple[Cursor, int] | None = None
        self._worker_batches = 0
        self._hands_places = False

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is in."""
        return self._begin.plan.epoch

    @property
    def samples(self) -> int:
        """Samples of an epoch: of the whole dataset, or as long as a mix's epochs are."""
        return self._stream.samples

    @property
    def fingerprint(self) -> str:
        """Changes with the content of the dataset; a state is only good for the same one."""
        return self._source.fingerprint

    @property
    def begin(self) -> Cursor:
        """Where the next iteration begins."""
        return self._begin

    def __len__(self) -> int:
        """Items of this rank in a whole epoch: batches, or samples without ``batch_size``."""
        return count_steps(self.samples, self._begin.plan.lanes, self._geometry)

    def __iter__(self) -> Iterator[Any]:
        """Items from `begin` to the end of its epoch; in a DataLoader worker, the worker's share of them.

        An iteration that was broken off begins again at the same place. One whose items all came is followed by the
        next epoch; among the workers of a plain DataLoader, which cannot know, any iteration is.
        """
        worker = get_worker_info()
        if worker is None:
            if not self._ranks_given:
                check_ranks(self._ranks)
            self._finish_delivered()
            return self._iterate_here(self._begin)
        begin, skipped = self._worker_turn(worker.id, worker.num_workers)
        return self._iterate_in_worker(begin, worker.id, worker.num_workers, skipped)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of ``epoch``; at its loaded place if that is where the cursor stands."""
        self._finish_delivered()
        if epoch != self.epoch:
            self.seek(self._begin.at_epoch(epoch))

    def set_weights(self, weights: Sequence[float]) -> None:
        """Mix with other weights from the place on where the stream stands, even in the middle of an iteration.

        The place is recorded in the state, so that a resumed run changes there too. With `StagedLoader` or without a
        loader, the next item is the first of the new weights. All ranks must do it at the same step.

        Raises:
            UsageError: Not a mix, weights that cannot be meant, or nobody knows the place: see `state_dict`.
        """
        self._check_known("set_weights")
        cursor = self._cursor
        if cursor.mix is None:
            raise UsageError("set_weights is for a mix, a list of (source, weight)", subject="weights")
        mix = cursor.mix.changed(cursor.plan.epoch, cursor.position, whole_weights(weights))
        self.seek(replace(cursor, mix=mix))

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: JSON-able, a few hundred bytes, the same on every rank.

        Raises:
            UsageError: The workers of a plain DataLoader hold the place, and nobody knows what was delivered.
        """
        if get_worker_info() is not None:
            return {**encode_cursor(self._cursor), _SKIPPED: self._worker_batches}
        self._check_known("state_dict")
        return encode_cursor(self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state`` in the next iteration, with any world size, number of workers and batch size.

        Raises:
            UsageError: The state is of another dataset or order, or its lanes do not divide this batch.
            FormatError: It is not a state.
        """
        cursor = decode_cursor(state)
        mine = self._begin
        if not self._lanes_given:
            mine = replace(mine, plan=replace(mine.plan, lanes=cursor.plan.lanes))
        cursor.check_matches(mine, of=self._source.name)
        self._check_sizes(cursor)
        EpochBatches.check_position(cursor.position, self.samples, cursor.plan.lanes)
        if get_worker_info() is None:
            self.seek(cursor)
        else:
            self._worker_begin = cursor, take_count(state, _SKIPPED, at="dataset state")

    def seek(self, cursor: Cursor) -> None:
        """Begin the next iteration at ``cursor``, in this process and in its DataLoader workers."""
        self._begin = self._from = cursor
        self._delivered = 0
        self._recorded = False
        self._tell_workers(cursor, counting=True)

    def begin_recording(self) -> Cursor:
        """`begin`, for a loader that counts what its workers deliver and tells by `record`."""
        if not self._ranks_given:
            check_ranks(self._ranks)
        self._finish_delivered()
        begin = self._from = self._begin
        self._delivered = 0
        self._recorded = True
        self._tell_workers(begin, counting=False)
        return begin

    def record(self, begin: Cursor, delivered: int) -> None:
        """Take ``delivered`` items as consumed since ``begin``, unless the dataset was sent elsewhere meanwhile."""
        if begin is self._begin or begin == self._begin:
            self._from, self._delivered = begin, delivered

    def finish_epoch(self, begin: Cursor) -> None:
        """After all items since ``begin``, begin the next iteration at the start of the next epoch."""
        if begin == self._begin:
            self.seek(begin.at_epoch(begin.plan.epoch + 1))

    def _finish_delivered(self) -> None:
        """Whoever knows the length, as Lightning does, never asks for the item after the last."""
        at = self._cursor
        if self._delivered and not count_steps(self.samples, at.plan.lanes, self._geometry, at.position):
            self.finish_epoch(self._from)

    def is_reweighted(self, begin: Cursor) -> bool:
        """Whether `set_weights` was called since an iteration began at ``begin``."""
        return self._begin is not begin and self._begin.mix != begin.mix

    def hand_places(self) -> None:
        """In a worker: give `HandedPlaces` where the loader's process may read in place; it gives them to `take_handed`."""
        self._hands_places = self._collate is collate_samples

    @contextmanager
    def taking_handed(self, begin: Cursor) -> Iterator[Callable[[Any], Any]]:
        """What makes items of that which workers hand on, for an iteration from ``begin``."""
        reader = self._open_reader(begin)

        def take(item: Any) -> Any:
            return self._made(reader.read(item)) if isinstance(item, HandedPlaces) else item

        try:
            yield take
        finally:
            reader.close()

    @property
    def _cursor(self) -> Cursor:
        """Where the stream stands, as far as this process knows."""
        position = self._from.position + self._delivered * self._geometry.global_batch
        return replace(self._from, position=min(position, self.samples)) if self._delivered else self._from

    def _tell_workers(self, cursor: Cursor, *, counting: bool) -> None:
        self._turns.set(_place(cursor), counting=counting)

    def _worker_turn(self, worker: int, workers: int) -> tuple[Cursor, int]:
        if self._worker_begin is not None:
            begin, self._worker_begin = self._worker_begin, None
            self._turns.resume(_place(begin[0]), worker, workers)
            return begin
        place = self._turns.begin(worker, workers)
        plan = replace(self._begin.plan, epoch=place.epoch, lanes=place.lanes)
        mix = self._begin.mix
        if mix is not None:
            width = 2 + len(mix.sources)
            entries = [place.changes[at : at + width] for at in range(0, len(place.changes), width)]
            mix = replace(mix, history=decode_history(entries, len(mix.sources), at="weights"))
        return Cursor(plan, place.position, mix), 0

    def _iterate_here(self, begin: Cursor) -> Iterator[Any]:
        while True:
            self.record(begin, 0)
            for number, item in enumerate(self._items(begin, 0, 1, 0)):
                self.record(begin, number + 1)
                yield item
                if self.is_reweighted(begin):
                    begin = self._begin
                    break
            else:
                self.finish_epoch(begin)
                return

    def _iterate_in_worker(self, begin: Cursor, worker: int, workers: int, skipped: int) -> Iterator[Any]:
        self._from, self._worker_batches = begin, skipped
        for item in self._items(begin, worker, workers, skipped):
            self._worker_batches += 1
            yield item

    def _items(self, begin: Cursor, worker: int, workers: int, skipped: int) -> Iterator[Any]:
        """The items of one worker from ``begin`` on, without the first ``skipped`` of them."""
        order = self._stream.order(begin)
        batches = EpochBatches(order, self._geometry, begin.position)
        reader = self._open_reader(begin)
        announcer = Announcer(self._source, self._reader, self._ranks) if worker == 0 else None
        announcement = partial(self._stream.announcement, order, self._geometry, lanes=self._lanes(begin))
        steps = range(worker + skipped * workers, batches.steps, workers)
        try:
            for step, batch in zip(steps, batches.iter_rank_batches(steps, self._ranks.rank), strict=True):
                if announcer is not None:
                    announcer.announce(announcement, batches.position_after(step - 1))
                if self._hands_places and reader.prepare(batch.places):
                    yield HandedPlaces(batch.places)
                    continue
                samples = reader.read(batch.places)
                if self._recipe.select is not None:
                    following = self._following(reader, batches, step)
                    samples = fill_batch(samples, following, repeats=batch.padding)
                yield self._made(samples)
        finally:
            reader.close()

    def _following(self, reader: SampleReader, batches: EpochBatches, step: int) -> Iterator[Any]:
        """This rank's samples behind those of a step, then those from the epoch's start to it."""
        whole = EpochBatches(batches.order, self._geometry)
        for part, first in ((batches, step + 1), (whole, 0)):
            for batch in part.iter_rank_batches(range(first, part.steps), self._ranks.rank):
                for place in batch.places:
                    yield from reader.read([place])

    def _made(self, samples: list[Any]) -> Any:
        """The item of a step's samples."""
        return self._collate(samples) if self._batched else samples[0]

    def _open_reader(self, begin: Cursor) -> SampleReader:
        shards_open = self._stream.parallel * (begin.plan.window + 1) * len(self._lanes(begin)) + 1
        recipe = self._recipe
        if get_worker_info() is not None and recipe.map is None and self._collate is collate_samples:
            recipe = replace(
                recipe, copy=True
            )  # views cannot be pickled, and nobody makes anything of them here
        return SampleReader(
            self._source,
            recipe,
            wait_s=self._wait_s,
            shards_open_max=min(SHARDS_OPEN_MAX, shards_open),
            indices=self._indices,
        )

    def _lanes(self, begin: Cursor) -> range:
        return lanes_of_rank(self._ranks.rank, self._ranks.world, begin.plan.lanes)

    def _check_known(self, subject: str) -> None:
        """UsageError if workers hold the place that is asked for."""
        if self._turns.begun() and not self._recorded:
            raise UsageError(
                "the place in the data is known to the DataLoader's workers, not to the dataset",
                subject=subject,
                hint="use StagedLoader in place of DataLoader, or torchdata's StatefulDataLoader, and its state_dict()",
            )

    def _check_sizes(self, cursor: Cursor) -> None:
        lanes = cursor.plan.lanes
        self._geometry.check_lanes(lanes)
        samples = self.samples
        if not samples:
            raise UsageError(f"`{self._source.name}` has no samples", subject=self._source.name)
        self._stream.check(cursor)
        if not count_steps(samples, lanes, self._geometry):
            raise UsageError(
                f"`{self._source.name}` has {samples} samples, less than a global batch of {self._geometry.global_batch}",
                subject="batch_size",
                hint="with drop_last nothing would be left: use a smaller batch, or drop_last=False",
            )


def _check_alone(
    tokens: TokenBlocks, *, fields: object, decode: Decode, collate: object, batch_size: bool
) -> None:
    if fields is not None or decode is not True or collate is not None:
        raise UsageError("tokens stands for fields, decode and collate: give it alone", subject="tokens")
    if not batch_size:
        raise UsageError("tokens without batch_size: blocks are gathered into batches", subject="tokens")


def _place(cursor: Cursor) -> Place:
    changes = () if cursor.mix is None else itertools.chain.from_iterable(encode_history(cursor.mix))
    return Place(cursor.plan.epoch, cursor.position, cursor.plan.lanes, tuple(changes))


def _changes_max(cursor: Cursor) -> int:
    """How many numbers tell of the changes of a mix's weights."""
    return 0 if cursor.mix is None else CHANGES_MAX * (2 + len(cursor.mix.sources))


def _geometry(
    batch_size: int | None, global_batch_size: int | None, world: int, drop_last: bool
) -> BatchGeometry:
    if batch_size is not None and global_batch_size is not None:
        raise UsageError(
            "batch_size and global_batch_size are both given",
            subject="batch_size",
            hint="batch_size is of one rank, global_batch_size of all ranks together",
        )
    if global_batch_size is None:
        size = 1 if batch_size is None else batch_size
        check_whole_number("batch_size", size, 1, GLOBAL_BATCH_MAX)
        global_batch_size = size * world
    check_whole_number("global_batch_size", global_batch_size, 1, GLOBAL_BATCH_MAX)
    return BatchGeometry(global_batch_size, world, drop_last)


def _private_socket(
    cache: str | os.PathLike[str] | None, cache_bytes: int | str | None, wait_s: float
) -> str | None:
    if cache is None:
        return None
    from stager.client.private import start_private_daemon

    return start_private_daemon(os.fspath(cache), cache_bytes, wait_s)


def _check_wait(on_daemon_loss: str, wait_timeout_s: float) -> None:
    if on_daemon_loss not in ("wait", "fail"):
        raise UsageError(
            f"on_daemon_loss is `wait` or `fail`, not {on_daemon_loss!r}", subject="on_daemon_loss"
        )
    if not 0 < wait_timeout_s <= WAIT_MAX_S:
        raise UsageError(
            f"wait_timeout_s must be more than 0 and at most {WAIT_MAX_S:.0f} s, not {wait_timeout_s!r}",
            subject="wait_timeout_s",
        )


def _check_fields(source: Source, fields: tuple[str, ...] | None) -> None:
    unknown = sorted(set(fields or ()) - set(source.fields)) if source.fields else []
    if unknown:
        raise UsageError(
            f"`{source.name}` has no field `{unknown[0]}`",
            subject="fields",
            hint=f"it has {', '.join(source.fields)}",
        )
