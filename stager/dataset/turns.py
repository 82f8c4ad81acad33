"""Where the next iteration of a dataset begins, shared by the trainer's process and its DataLoader workers."""

from __future__ import annotations

import torch

from stager.errors import UsageError

WORKERS_MAX = 256
_EPOCH, _POSITION, _COUNTING, _HEADER = 0, 1, 2, 3


class Turns:
    """The place at which an iteration begins, and how often each worker has begun one since it was set.

    The numbers lie in memory that workers share with the trainer, because persistent workers keep a dataset of their own
    and would never hear of `set_epoch`. The trainer writes the place. A `StagedLoader` does so before every iteration. Under
    a plain DataLoader each worker counts its own iterations: the first after the place was set begins there, the next ones
    at the epochs that follow. Workers are counted apart for every number of workers, so that loaders of different sizes
    over one dataset never disagree among their own.
    """

    def __init__(self) -> None:
        self._numbers = torch.zeros(_HEADER + _counters(WORKERS_MAX), dtype=torch.int64)
        self._share()
        self.set(0, 0, counting=True)

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        # A copy that did not go to a worker is no longer shared: share it anew.
        self._numbers = state["_numbers"]
        self._share()

    def set(self, epoch: int, position: int, *, counting: bool) -> None:
        """Begin the next iteration at ``position`` of ``epoch``; with ``counting``, later ones at the next epochs.

        Without, a worker that is late to begin an iteration which was broken off already makes no difference.
        """
        self._numbers.zero_()
        self._numbers[_COUNTING] = counting
        self._numbers[_EPOCH] = epoch
        self._numbers[_POSITION] = position

    def begin(self, worker: int, workers: int) -> tuple[int, int]:
        """``(epoch, position)`` of the iteration that a worker begins now."""
        if workers > WORKERS_MAX:
            raise UsageError(f"{workers} workers; at most {WORKERS_MAX} are possible", subject="num_workers")
        numbers = self._numbers
        place = _HEADER + _counters(workers - 1) + worker
        begun = int(numbers[place])
        numbers[place] = begun + 1
        epoch = int(numbers[_EPOCH])
        if begun and numbers[_COUNTING]:
            return epoch + begun, 0
        return epoch, int(numbers[_POSITION])

    def _share(self) -> None:
        self._numbers.share_memory_()  # type: ignore[no-untyped-call]  # torch gives it no types

    def begun(self) -> bool:
        """Whether any worker has begun an iteration since the place was set."""
        return bool(self._numbers[_HEADER:].any())


def _counters(workers: int) -> int:
    return workers * (workers + 1) // 2
