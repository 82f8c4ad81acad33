"""How a batch's bytes get from a worker to the loader's process: in a memory file that both map, not through a pipe.

A memory file has no name, so that a killed process leaves nothing behind, and counts as memory of the process, not of the mount
``/dev/shm``, which is small in containers.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from itertools import accumulate
from multiprocessing import reduction
from typing import Any

# Below, a pipe is faster than handing a descriptor over.
PARCEL_BYTES_MIN = 1 << 18

_Buffer = bytes | memoryview


def send_columns(columns: Mapping[str, Any]) -> tuple[Any, ...]:
    """What `receive_columns` takes, to be pickled on the way to another process of this node.

    Args:
        columns: Name to anything. Lists of bytes and memoryviews, and no other values, go into the memory file.
    """
    rest: dict[str, Any] = {}
    packed: dict[str, list[_Buffer]] = {}
    for name, column in columns.items():
        if isinstance(column, list) and column and all(isinstance(value, _Buffer) for value in column):
            packed[name] = column
            rest[name] = None  # keeps its place
        else:
            rest[name] = column
    buffers = [value for column in packed.values() for value in column]
    total = sum(map(len, buffers))
    if total < PARCEL_BYTES_MIN:
        return ({name: _plain(column) for name, column in columns.items()}, {}, None, 0)
    shapes = {
        name: [(len(value), isinstance(value, bytes)) for value in column] for name, column in packed.items()
    }
    descriptor = os.memfd_create("stager-batch", os.MFD_CLOEXEC)
    try:
        place = 0
        os.ftruncate(descriptor, total)
        with mmap.mmap(descriptor, total) as room:
            for value in buffers:
                room[place : place + len(value)] = value
                place += len(value)
        return rest, shapes, reduction.DupFd(descriptor), total
    finally:
        os.close(descriptor)


def receive_columns(
    rest: dict[str, Any], shapes: Mapping[str, list[tuple[int, bool]]], sent: Any, total: int
) -> dict[str, Any]:
    """The columns that were sent: bytes as bytes, views as views of the memory file, which they keep."""
    if sent is None:
        return rest
    descriptor = sent.detach()
    try:
        room = memoryview(mmap.mmap(descriptor, total, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)
    place = 0
    for name, shape in shapes.items():
        column: list[_Buffer] = []
        for size, as_bytes in shape:
            view = room[place : place + size]
            column.append(bytes(view) if as_bytes else view)
            place += size
        rest[name] = column
    return rest


def _plain(column: Any) -> Any:
    """``column`` with bytes in place of views, which cannot be pickled."""
    if not isinstance(column, list):
        return column
    return [bytes(value) if isinstance(value, memoryview) else value for value in column]
