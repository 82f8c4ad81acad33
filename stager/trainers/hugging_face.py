"""A callback for the Hugging Face Trainer: each checkpoint is committed as soon as every rank has written its files.

    from stager.trainers.hugging_face import StagerCallback
    Trainer(..., callbacks=[StagerCallback()])

Without it checkpoints are found all the same, later: nothing in them says that the last rank has finished.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from stager.client.commit import HasState, commit

_NO_METRICS = ("step", "epoch")


class StagerCallback(TrainerCallback):
    """Calls `stager.commit` when a checkpoint is saved, with the step and with what was logged at it."""

    def __init__(self, *, loader: HasState | None = None, socket: str | None = None) -> None:
        """As `stager.commit`: ``loader`` gives the place in the data, ``socket`` is the daemon's."""
        self._loader = loader
        self._socket = socket

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Every rank writes its own random state, and the Trainer does not wait for them.
            torch.distributed.barrier()
        directory = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        # A search over hyperparameters saves elsewhere; its checkpoints are found without this.
        if args.should_save and os.path.isdir(directory):
            commit(
                directory,
                step=state.global_step,
                metrics=_metrics_at(state.log_history, state.global_step),
                loader=self._loader,
                socket=self._socket,
            )


def _metrics_at(history: Iterable[Mapping[str, Any]], step: int) -> dict[str, float]:
    return {
        name: value
        for entry in history
        if entry.get("step") == step
        for name, value in entry.items()
        if name not in _NO_METRICS and isinstance(value, int | float)
    }
