"""Token data for language models: members that hold ids, cut into blocks of one length."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from stager.dataset.collating import Batch
from stager.dataset.selecting import MASK
from stager.errors import FormatError, UsageError
from stager.formats.order import check_whole_number

Bytes = bytes | memoryview
BLOCK_IDS_MAX = 1 << 30
IDS = "ids"


class TokenBlocks:
    """Blocks of ``length`` ids from every sample's member, for ``StagedDataset(..., tokens=TokenBlocks(...))``.

    An item is a `Batch` with ``ids``, an int64 tensor of blocks by ids, and the samples' ``__key__`` and ``__url__``. Ids
    are looked at where they lie and copied once, into the batch. A batch counts samples, not blocks: pack the same number
    of ids into every sample and say so by ``blocks``, and all ranks have batches of one shape.
    """

    def __init__(
        self,
        length: int,
        *,
        field: str = "npy",
        dtype: str | None = None,
        stride: int | None = None,
        blocks: int | None = None,
        rest: str = "refuse",
    ) -> None:
        """Say what members hold.

        Args:
            length: Ids in a block.
            field: Whose members hold the ids: ``npy`` arrays, or plain numbers of ``dtype`` under any other name.
            dtype: Of plain numbers, such as ``"uint16"`` (little end first); not for ``npy``, which tells it itself.
            stride: From one block's beginning to the next's; None takes ``length``. One less than ``length`` shares the last
                id of a block with the first of the next, as inputs and targets want it.
            blocks: How many every sample must have, or None for any number.
            rest: What becomes of ids that are too few for a block: ``refuse`` is an error, ``drop`` leaves them out.

        Raises:
            UsageError: Arguments that cannot be meant.
        """
        check_whole_number("length", length, 1, BLOCK_IDS_MAX)
        self.length = length
        self.stride = length if stride is None else stride
        check_whole_number("stride", self.stride, 1, length)
        if blocks is not None:
            check_whole_number("blocks", blocks, 1, BLOCK_IDS_MAX)
        if rest not in ("refuse", "drop"):
            raise UsageError(f"rest is `refuse` or `drop`, not {rest!r}", subject="rest")
        self.field = field
        self.blocks = blocks
        self.rest = rest
        self._is_npy = field.rpartition(".")[2] == "npy"
        self._dtype = _dtype(dtype, is_npy=self._is_npy)

    def decode(self, field: str, data: Bytes) -> numpy.ndarray[Any, Any]:
        """The blocks of a member, as a view of ``data``: two dimensions, blocks by ids.

        Raises:
            FormatError: It holds no whole numbers, or not as many as it must.
        """
        ids = _npy_ids(data) if self._is_npy else _plain_ids(data, self._dtype)
        count = max((ids.size - self.length) // self.stride + 1, 0)
        rest = ids.size - ((count - 1) * self.stride + self.length if count else 0)
        if rest and self.rest == "refuse":
            raise FormatError(
                f"{ids.size} ids are {count} blocks of {self.length} and {rest} more",
                subject=field,
                hint="pack whole blocks, or leave the rest out with TokenBlocks(..., rest='drop')",
            )
        if self.blocks is not None and count != self.blocks:
            raise FormatError(f"{count} blocks of {self.length} ids, not {self.blocks}", subject=field)
        if not count:
            return ids[:0].reshape(0, self.length)
        return numpy.lib.stride_tricks.sliding_window_view(ids, self.length)[:: self.stride]

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """One tensor of all samples' blocks."""
        rows = [sample[self.field] for sample in samples]
        ids = numpy.empty((sum(map(len, rows)), self.length), numpy.int64)
        begin = 0
        for row in rows:
            ids[begin : begin + len(row)] = row
            begin += len(row)
        batch = Batch({name: [sample[name] for sample in samples] for name in ("__key__", "__url__")})
        batch[IDS] = torch.from_numpy(ids)
        if MASK in samples[0]:
            real = numpy.repeat([sample[MASK] for sample in samples], list(map(len, rows)))
            batch[MASK] = torch.from_numpy(real)
        return batch


def _dtype(name: str | None, *, is_npy: bool) -> numpy.dtype[Any]:
    if is_npy:
        if name is not None:
            raise UsageError(
                "npy members tell their dtype themselves", subject="dtype", hint="leave dtype out"
            )
        return numpy.dtype("<u2")
    if name is None:
        raise UsageError(
            "plain members do not tell their dtype", subject="dtype", hint='such as dtype="uint16"'
        )
    try:
        dtype = numpy.dtype(name).newbyteorder("<")
    except TypeError:
        raise UsageError(f"{name!r} is no dtype of numpy's", subject="dtype") from None
    if dtype.kind not in "iu":
        raise UsageError(f"ids are whole numbers, not {name}", subject="dtype")
    return dtype


def _plain_ids(data: Bytes, dtype: numpy.dtype[Any]) -> numpy.ndarray[Any, Any]:
    if len(data) % dtype.itemsize:
        raise FormatError(
            f"{len(data)} bytes are no whole number of {dtype.name}", hint="another dtype wrote this member"
        )
    return numpy.frombuffer(data, dtype)


def _npy_ids(data: Bytes) -> numpy.ndarray[Any, Any]:
    """The numbers of an npy member in the order that they lie in."""
    header = io.BytesIO(data[:_NPY_HEADER_BYTES])
    try:
        version = numpy.lib.format.read_magic(header)
        read = {
            (1, 0): numpy.lib.format.read_array_header_1_0,
            (2, 0): numpy.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = read(header)
    except (ValueError, KeyError) as error:
        raise FormatError(f"it is no npy member that can be read: {error}") from None
    if dtype.kind not in "iu":
        raise FormatError(f"ids are whole numbers, not {dtype}")
    count = int(numpy.prod(shape, dtype=object))
    if len(data) - header.tell() != count * dtype.itemsize:
        raise FormatError(
            f"it holds {len(data) - header.tell()} bytes of numbers; {shape} of {dtype} is said"
        )
    return numpy.frombuffer(data, dtype, offset=header.tell())


_NPY_HEADER_BYTES = 1 << 16
