"""Batches that stay full and in step although samples are left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stager.errors import UsageError

MASK = "__mask__"
LEFT_OUT: Any = object()
SEARCHED_MAX = 10_000


def fill_batch(samples: list[Any], following: Iterable[Any], *, repeats: int = 0) -> list[Any]:
    """The samples with every `LEFT_OUT` replaced by the next one that is there, around the end of the batch.

    Dicts get an entry ``__mask__``: True for a sample at its own place, False for one that stands in or is repeated. So
    a batch has as many samples as ever, ranks make equal steps of equal shapes, and a position still counts the same.

    Args:
        samples: Of one rank's batch.
        repeats: How many of them, at the end, are repeated to keep ranks equal.
        following: What is read further on, `LEFT_OUT` or not; asked only where nothing of the batch is left.

    Raises:
        UsageError: Nothing is left among `SEARCHED_MAX` samples.
    """
    if all(sample is LEFT_OUT for sample in samples):
        stand_in = _first(following)
        return [_masked(stand_in, real=False) for _ in samples]
    filled: list[Any] = [None] * len(samples)
    stand_in = LEFT_OUT
    for place in reversed(range(-len(samples), len(samples))):
        # Twice round from the back: on the way each place learns what comes next after it.
        sample = samples[place]
        if sample is not LEFT_OUT:
            stand_in = sample
        if place < 0 and stand_in is not LEFT_OUT:
            own = sample is not LEFT_OUT and place < -repeats
            filled[place] = _masked(stand_in, real=own)
    return filled


def _first(following: Iterable[Any]) -> Any:
    for number, sample in enumerate(following):
        if sample is not LEFT_OUT:
            return sample
        if number == SEARCHED_MAX:
            break
    raise UsageError(
        f"select leaves out every sample of a batch and of the {SEARCHED_MAX} behind it, or to the end",
        subject="select",
        hint="it gets a decoded sample, a dict, and keeps it by returning something true",
    )


def _masked(sample: Any, *, real: bool) -> Any:
    return {**sample, MASK: real} if isinstance(sample, dict) else sample
