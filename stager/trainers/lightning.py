"""A callback for Lightning: each checkpoint is committed as soon as the strategy has written it.

    from stager.trainers.lightning import StagerCallback
    Trainer(..., callbacks=[ModelCheckpoint(...), StagerCallback()])

A checkpoint that is a directory is committed with step and metrics. One that is a file has no room for them; the daemon is
told of it. Whichever callback saves, and whoever calls `save_checkpoint`, is covered.
"""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from stager.client.commit import HasState, commit, tell_daemon


class StagerCallback(Callback):
    """Follows the trainer's `save_checkpoint`, which returns when all ranks have saved."""

    def __init__(self, *, loader: HasState | None = None, socket: str | None = None) -> None:
        """As `stager.commit`: ``loader`` gives the place in the data, ``socket`` is the daemon's."""
        self._loader = loader
        self._socket = socket

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning has no hook after a save: those of callbacks come before or at its beginning.
        save = trainer.save_checkpoint

        def save_and_commit(filepath: Any, *arguments: Any, **named: Any) -> None:
            save(filepath, *arguments, **named)
            if trainer.is_global_zero and not isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
                self._commit(trainer, os.fspath(filepath))

        trainer.save_checkpoint = save_and_commit  # type: ignore[method-assign]

    def _commit(self, trainer: Trainer, path: str) -> None:
        if os.path.isdir(path):
            metrics = {
                name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1
            }
            commit(path, step=trainer.global_step, metrics=metrics, loader=self._loader, socket=self._socket)
        elif os.path.isfile(path):
            tell_daemon(path, socket=self._socket)
