"""`StagedLoader`: a DataLoader that knows what it has delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from stager.dataset.staged import StagedDataset
from stager.errors import UsageError
from stager.formats.cursor import Cursor


class StagedLoader(DataLoader[Any]):
    """A torch ``DataLoader`` over a `StagedDataset`, with an exact state.

    It hands on the dataset's items, and counts them as it delivers them: what workers have prefetched is not counted, so
    ``state_dict()`` in the training loop is the place after the batch that the loop has in hand. Each finished iteration is
    followed by the next epoch.
    """

    def __init__(
        self,
        dataset: StagedDataset,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        """Arguments are those of ``torch.utils.data.DataLoader``; batching and order belong to the dataset.

        Raises:
            UsageError: Not a `StagedDataset`.
        """
        if not isinstance(dataset, StagedDataset):
            raise UsageError(
                f"StagedLoader takes a StagedDataset, not {type(dataset).__name__}",
                subject="dataset",
                hint="other datasets work with torch's DataLoader",
            )
        super().__init__(
            dataset,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout=timeout if num_workers else 0,
            worker_init_fn=partial(_begin_worker, worker_init_fn),
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self._staged = dataset

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator is all that callers use of it
        begin = self._staged.begin_recording()
        return self._counted(super().__iter__(), begin)

    def __len__(self) -> int:
        """Items of this rank in a whole epoch, whatever the place is."""
        return len(self._staged)

    def set_epoch(self, epoch: int) -> None:
        """As `StagedDataset.set_epoch`."""
        self._staged.set_epoch(epoch)

    def set_weights(self, weights: Sequence[float]) -> None:
        """As `StagedDataset.set_weights`: the next item is the first of the new weights."""
        self._staged.set_weights(weights)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last delivered item: JSON-able, a few hundred bytes, the same on every rank."""
        return self._staged.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `StagedDataset.load_state_dict`."""
        self._staged.load_state_dict(state)

    def _counted(self, items: Iterator[Any], begin: Cursor) -> Iterator[Any]:
        while True:
            with self._staged.taking_handed(begin) as take:
                for number, item in enumerate(items):
                    taken = take(item)
                    self._staged.record(begin, number + 1)
                    yield taken
                    if self._staged.is_reweighted(begin):
                        break
                else:
                    self._staged.finish_epoch(begin)
                    return
            # What workers have prefetched is of the old weights: begin anew where the change was recorded.
            begin = self._staged.begin_recording()
            items = super().__iter__()


def _begin_worker(then: Callable[[int], None] | None, worker: int) -> None:
    about = get_worker_info()
    assert about is not None and isinstance(about.dataset, StagedDataset)
    about.dataset.hand_places()
    if then is not None:
        then(worker)


def _as_it_is(item: Any) -> Any:
    return item
