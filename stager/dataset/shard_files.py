"""Reading members of one shard: mapped where that is safe, by `pread` elsewhere."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection
from contextlib import suppress
from types import TracebackType
from typing import Self

from stager.dataset.index_cache import IndexCache
from stager.dataset.indexing import index_mapped
from stager.dataset.mounts import may_map
from stager.errors import FormatError, StagerError
from stager.formats.index import ShardIndex, index_shard

Bytes = bytes | memoryview


class OpenShard:
    """A shard's open file and its index. The bytes stay readable when the file is evicted.

    Attributes:
        path: What was opened.
        size: Bytes of the file.
        index: Where each sample lies.
    """

    __slots__ = ("_descriptor", "_mapped", "_view", "index", "path", "size")

    def __init__(
        self, path: str, size: int, index: ShardIndex, mapped: mmap.mmap | None, descriptor: int
    ) -> None:
        self.path = path
        self.size = size
        self.index = index
        self._mapped = mapped
        self._view = None if mapped is None else memoryview(mapped)
        self._descriptor = descriptor

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``.

        Raises:
            FormatError: The file has become shorter.
            StagerError: The disk fails.
        """
        if self._mapped is not None:
            return self._mapped[offset : offset + size]
        return _pread(self._descriptor, offset, size, self.path)

    def fields(
        self, sample: int, only: Collection[str] | None = None, *, copy: bool = True
    ) -> dict[str, Bytes]:
        """The fields of sample number ``sample`` and their bytes, in the order of the shard.

        Args:
            sample: Its number in the shard.
            only: The fields to read, as far as the sample has them; None reads all.
            copy: False gives read-only views of the mapping where there is one. They may be held for as long as one
                likes, and keep the mapping, not the descriptor, alive.

        Raises:
            FormatError, StagerError: As `read`; or there is no such sample.
        """
        index = self.index
        first, last = index.starts[index.check(sample)], index.starts[sample + 1]
        names, ids, offsets, sizes = index.field_names, index.field_ids, index.offsets, index.sizes
        mapped: mmap.mmap | memoryview | None = self._mapped if copy else self._view
        found: dict[str, Bytes] = {}
        for at in range(first, last):
            name = names[ids[at]]
            if only is None or name in only:
                offset = offsets[at]
                # `read`, written out: this is what an undecoded sample costs.
                found[name] = (
                    self.read(offset, sizes[at]) if mapped is None else mapped[offset : offset + sizes[at]]
                )
        return found

    def read_ahead(self, sample: int) -> bool:
        """Have the kernel bring sample number ``sample`` into memory, without waiting for it; False if nothing is mapped."""
        index = self.index
        first, end = index.starts[index.check(sample)], index.starts[sample + 1] - 1
        if self._mapped is None:
            return False
        begin = index.offsets[first] & -mmap.PAGESIZE
        self._mapped.madvise(mmap.MADV_WILLNEED, begin, index.offsets[end] + index.sizes[end] - begin)
        return True

    def close(self) -> None:
        """Close the file; views that were given out stay as they are."""
        if self._mapped is not None and self._view is not None:
            self._view.release()
            # While views of it are held, the last of them frees it.
            with suppress(BufferError):
                self._mapped.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._mapped, self._view, self._descriptor = None, None, -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_shard(
    path: str,
    *,
    size: int | None = None,
    samples: int | None = None,
    mapped: bool | None = None,
    indices: IndexCache | None = None,
) -> OpenShard:
    """Open and index a shard.

    Args:
        path: The file.
        size: Bytes that it must have, or None.
        samples: Samples that it must have, or None.
        mapped: Whether to map it into memory; None decides by its file system.
        indices: Where its index may be found, and is put.

    Raises:
        FileNotFoundError: It is not there.
        FormatError: It is no tar, or damaged, or not what ``size`` and ``samples`` say; the message names it.
        StagerError: It cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StagerError(f"cannot open shard `{path}`: {error.strerror}", subject=path) from error
    mapping: mmap.mmap | None = None
    try:
        about = os.fstat(descriptor)
        found = about.st_size
        if size is not None and found != size:
            raise _not_as_said(path, f"{found} bytes", size)
        if found and (may_map(path) if mapped is None else mapped):
            mapping = mmap.mmap(descriptor, found, access=mmap.ACCESS_READ)
        index = None if indices is None else indices.get(about)
        if index is None:
            if mapping is not None:
                index = index_mapped(mapping, of=path)
            else:
                # Indexing reads the headers only, but a network file system brings the blocks between them anyway.
                index = index_shard(_pread(descriptor, 0, found, path), of=path)
            if indices is not None:
                indices.put(about, index)
        if samples is not None and len(index) != samples:
            raise _not_as_said(path, f"{len(index)} samples", samples)
    except BaseException as error:
        if mapping is not None:
            # The frames of the error may still hold views of it; then it is freed with them.
            with suppress(BufferError):
                mapping.close()
        os.close(descriptor)
        if isinstance(error, OSError):
            raise StagerError(f"cannot read shard `{path}`: {error.strerror}", subject=path) from error
        raise
    if mapping is not None:
        # The mapping holds the file by itself; one descriptor less for each open shard.
        os.close(descriptor)
        descriptor = -1
    return OpenShard(path, found, index, mapping, descriptor)


def _not_as_said(path: str, found: str, said: int) -> FormatError:
    return FormatError(
        f"shard `{path}` has {found}; the manifest says {said}",
        subject=path,
        hint="the shard or the manifest was changed: `stager verify`, then copy or pack it again",
    )


def _pread(descriptor: int, offset: int, size: int, path: str) -> bytes:
    pieces = []
    while size > 0:
        try:
            piece = os.pread(descriptor, size, offset)
        except OSError as error:
            raise StagerError(
                f"cannot read shard `{path}` at byte {offset}: {error.strerror}", subject=path
            ) from error
        if not piece:
            raise FormatError(
                f"shard `{path}` ends at byte {offset}, {size} bytes early",
                subject=path,
                hint="it was cut while it was read: copy or pack it again",
            )
        pieces.append(piece)
        offset += len(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
