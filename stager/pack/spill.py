"""Lists that do not fit into memory: kept there while they are short, then in a temporary file, sorted if asked for."""

from __future__ import annotations

import heapq
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, BinaryIO, Generic, TypeVar

T = TypeVar("T")

MEMORY_ITEMS_MAX = 50_000
BATCH_ITEMS = 500


class Spill(Generic[T]):
    """Items in the order of ``key``, or in the order they came in; can be gone through any number of times.

    At most `MEMORY_ITEMS_MAX` items are in memory while it is filled, and one batch of each sorted run while it is read.

    Args:
        key: What to sort by, or None. Equal keys keep the order they came in.
        folder: Where the temporary file lies; by default where the system keeps such files. It has no name, so that
            nothing is left of it after a kill -9.
    """

    def __init__(self, key: Callable[[T], Any] | None = None, *, folder: str | None = None) -> None:
        self._key = key
        self._folder = folder
        self._items: list[T] = []
        self._file: BinaryIO | None = None
        self._end = 0
        # Of each run: where its batches lie in the file.
        self._runs: list[list[tuple[int, int]]] = []
        self._sorted = True
        self.count = 0

    def append(self, item: T) -> None:
        self._items.append(item)
        self._sorted = False
        self.count += 1
        if len(self._items) >= MEMORY_ITEMS_MAX:
            self._spill()

    def __iter__(self) -> Iterator[T]:
        self._sort()
        runs = [self._read(run) for run in self._runs]
        if self._key is None:
            for run in runs:
                yield from run
            yield from self._items
        elif runs:
            yield from heapq.merge(*runs, self._items, key=self._key)
        else:
            yield from self._items

    def close(self) -> None:
        """Give the disk space back."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._runs, self._items = [], []

    def _sort(self) -> None:
        if self._key is not None and not self._sorted:
            self._items.sort(key=self._key)
        self._sorted = True

    def _spill(self) -> None:
        self._sort()
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed by close()
        run = []
        items = iter(self._items)
        while batch := list(islice(items, BATCH_ITEMS)):
            raw = pickle.dumps(batch, protocol=5)
            self._file.write(raw)
            run.append((self._end, len(raw)))
            self._end += len(raw)
        self._file.flush()
        self._runs.append(run)
        self._items = []

    def _read(self, run: list[tuple[int, int]]) -> Iterator[T]:
        assert self._file is not None
        for offset, size in run:
            yield from pickle.loads(os.pread(self._file.fileno(), size, offset))
