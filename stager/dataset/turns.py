"""Where the next iteration of a dataset begins, shared by the trainer's process and its DataLoader workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stager.errors import UsageError

WORKERS_MAX = 256
_EPOCH, _POSITION, _LANES, _COUNTING, _LENGTH, _HEADER = 0, 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Place:
    """Where an iteration begins: epoch, position, lanes, and the numbers of the changes of a mix's weights."""

    epoch: int
    position: int
    lanes: int
    changes: tuple[int, ...] = ()


class Turns:
    """The place at which an iteration begins, and how often each worker has begun one since it was set.

    The numbers lie in memory that workers share with the trainer, because persistent workers keep a dataset of their own
    and would never hear of `set_epoch`. The trainer writes the place. A `StagedLoader` does so before every iteration. Under
    a plain DataLoader each worker counts its own iterations: the first after the place was set begins there, the next ones
    at the epochs that follow. Workers are counted apart for every number of workers, so that loaders of different sizes
    over one dataset never disagree among their own.
    """

    def __init__(self, changes_max: int = 0) -> None:
        """Make room for ``changes_max`` numbers of changes."""
        self._numbers = torch.zeros(_HEADER + changes_max + _counters(WORKERS_MAX), dtype=torch.int64)
        self._counters_at = _HEADER + changes_max
        self._share()

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        # A copy that did not go to a worker is no longer shared: share it anew.
        self.__dict__.update(state)
        self._share()

    def set(self, place: Place, *, counting: bool) -> None:
        """Begin the next iteration at ``place``; with ``counting``, later ones at the next epochs.

        Without, a worker that is late to begin an iteration which was broken off already makes no difference.
        """
        self._numbers.zero_()
        self._write(place, counting=counting)

    def resume(self, place: Place, worker: int, workers: int) -> None:
        """In a worker that was told by its own state where to begin: later iterations are at the epochs that follow.

        Every worker of the iteration says the same; none touches the count of another.
        """
        begin = self._counters_at + _counters(workers - 1)
        self._numbers[self._counters_at : begin] = 0
        self._numbers[begin + workers :] = 0
        self._write(place, counting=True)
        self._numbers[begin + worker] = 1

    def _write(self, place: Place, *, counting: bool) -> None:
        numbers, changes = self._numbers, place.changes
        numbers[_COUNTING] = counting
        numbers[_EPOCH] = place.epoch
        numbers[_POSITION] = place.position
        numbers[_LANES] = place.lanes
        numbers[_LENGTH] = len(changes)
        numbers[_HEADER : _HEADER + len(changes)] = torch.tensor(changes, dtype=torch.int64)

    def begin(self, worker: int, workers: int) -> Place:
        """Where the iteration begins that a worker begins now."""
        if workers > WORKERS_MAX:
            raise UsageError(f"{workers} workers; at most {WORKERS_MAX} are possible", subject="num_workers")
        numbers = self._numbers
        counter = self._counters_at + _counters(workers - 1) + worker
        begun = int(numbers[counter])
        numbers[counter] = begun + 1
        later = begun if numbers[_COUNTING] else 0
        changes: Sequence[int] = numbers[_HEADER : _HEADER + int(numbers[_LENGTH])].tolist()
        return Place(
            int(numbers[_EPOCH]) + later,
            0 if later else int(numbers[_POSITION]),
            int(numbers[_LANES]),
            tuple(changes),
        )

    def _share(self) -> None:
        self._numbers.share_memory_()  # type: ignore[no-untyped-call]  # torch gives it no types

    def begun(self) -> bool:
        """Whether any worker has begun an iteration since the place was set."""
        return bool(self._numbers[self._counters_at :].any())


def _counters(workers: int) -> int:
    return workers * (workers + 1) // 2
