"""Indices of shards that were opened before, so that another epoch does not walk their headers again."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Any

from stager.formats.index import ShardIndex

MEMORY_BYTES_MAX = 256 << 20

_File = tuple[int, int, int, int, int]


class IndexCache:
    """The indices that were used last, up to a bound of memory; safe to be used by several threads.

    An index is bound to the very file that it was made of: one that was written anew, even with the same size, is
    indexed again. A forked worker begins with what its parent has; one that is spawned, with nothing.
    """

    def __init__(self, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._memory_bytes_max = memory_bytes_max
        self._start_empty()

    def _start_empty(self) -> None:
        self._indices: OrderedDict[_File, ShardIndex] = OrderedDict()
        self._memory_bytes = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"memory_bytes_max": self._memory_bytes_max}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._memory_bytes_max = state["memory_bytes_max"]
        self._start_empty()

    def get(self, about: os.stat_result) -> ShardIndex | None:
        """The index of the file that ``about`` is the status of, if it is known."""
        file = _identity(about)
        with self._lock:
            index = self._indices.get(file)
            if index is not None:
                self._indices.move_to_end(file)
            return index

    def put(self, about: os.stat_result, index: ShardIndex) -> None:
        """Keep ``index``, and no more of the others than the bound allows."""
        file = _identity(about)
        with self._lock:
            if file in self._indices:
                return
            self._indices[file] = index
            self._memory_bytes += index.memory_bytes
            while self._memory_bytes > self._memory_bytes_max and len(self._indices) > 1:
                self._memory_bytes -= self._indices.popitem(last=False)[1].memory_bytes


def _identity(about: os.stat_result) -> _File:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
