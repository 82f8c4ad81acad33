"""Samples to batches: a column for every field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from stager.errors import UsageError

_INT64 = range(-(1 << 63), 1 << 63)


class Batch(dict[str, Any]):
    """A collated batch: field name to a tensor, or to a list where the values do not stack.

    A dict in every way. It has a type of its own so that a plain ``DataLoader(dataset)``, which by default takes one item
    at a time and collates it, hands the batch on as it is.
    """

    __slots__ = ()


def collate_samples(samples: Sequence[dict[str, Any]]) -> Batch | list[Any]:
    """One column per field over all samples.

    Numbers, arrays and tensors of one type and shape become a tensor with the batch first, as torch's `default_collate`
    makes it. Everything else, and what differs in type or shape, becomes a list in the order of the samples, with None where
    a sample has no such field. Samples that are not dicts, as a ``map`` may return them, stay a list.
    """
    if not all(isinstance(sample, dict) for sample in samples):
        return list(samples)
    names = dict.fromkeys(name for sample in samples for name in sample)
    return Batch((name, _column([sample.get(name) for sample in samples])) for name in names)


def _column(values: list[Any]) -> Any:
    return default_collate(values) if _stacks(values) else values


def _stacks(values: list[Any]) -> bool:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return False
    if isinstance(first, torch.Tensor):
        return all(value.shape == first.shape and value.dtype == first.dtype for value in values)
    if isinstance(first, numpy.ndarray | numpy.generic):
        plain = first.dtype.kind in "biufc" and first.dtype.itemsize <= (16 if first.dtype.kind == "c" else 8)
        return plain and all(value.shape == first.shape and value.dtype == first.dtype for value in values)
    if isinstance(first, int):
        return all(value in _INT64 for value in values)
    return isinstance(first, float)


def _handed_on(batch: list[Batch], *, collate_fn_map: object = None) -> Batch:
    if len(batch) != 1:
        raise UsageError(
            f"the DataLoader makes batches of {len(batch)} batches",
            subject="batch_size",
            hint="give batch_size to the StagedDataset only: DataLoader(dataset, batch_size=None), or a StagedLoader",
        )
    return batch[0]


# The place that torch documents (`torch.utils.data._utils.collate.collate`) for teaching default_collate a type.
default_collate_fn_map[Batch] = _handed_on
