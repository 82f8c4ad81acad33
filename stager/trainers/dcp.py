"""A storage writer and reader for PyTorch's distributed checkpoints that go through the sidecar.

    from stager.trainers.dcp import StagerReader, StagerWriter
    dcp.save(state, storage_writer=StagerWriter("/mnt/nvme/checkpoints/step-100", step=100))
    dcp.load(state, storage_reader=StagerReader("/mnt/nvme/checkpoints/step-100", run="s3://bucket/runs/llama"))

They write and read where the sidecar watches, at the speed of the local disk; everything else is the sidecar's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from stager.client.commit import HasState, commit
from stager.errors import DeadlineExceeded, LockHeld, NotFound

_LOOK_S = 0.5


class StagerWriter(FileSystemWriter):
    """Writes as `FileSystemWriter` does, and calls `stager.commit` when the coordinator has finished."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        loader: HasState | None = None,
        socket: str | None = None,
        **options: Any,
    ) -> None:
        """As `stager.commit`; ``options`` are those of `FileSystemWriter`."""
        super().__init__(path, **options)
        self._step = step
        self._metrics = metrics
        self._loader = loader
        self._socket = socket

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        commit(self.path, step=self._step, metrics=self._metrics, loader=self._loader, socket=self._socket)


class StagerReader(FileSystemReader):
    """Reads as `FileSystemReader` does. What is not on this disk is restored first, by one rank of a node."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        run: str,
        name: str | None = None,
        config: str | None = None,
        deadline_s: float = 3600.0,
        **options: Any,
    ) -> None:
        """
        Args:
            path: The checkpoint's directory.
            run: Where it was committed, as `stager restore` takes it.
            name: Of the checkpoint there; that of the directory by default.
            config: The configuration file that says how the run's bucket is reached.
            deadline_s: How long to wait for the restore.
            options: Those of `FileSystemReader`.

        Raises:
            NotFound: It could not be restored; the message says why.
            DeadlineExceeded: It was not here in time.
        """
        directory = os.path.abspath(os.fspath(path))
        if not os.path.isdir(directory):
            _restore(run, directory, name or os.path.basename(directory), config, deadline_s)
        super().__init__(directory, **options)


def _restore(run: str, directory: str, name: str, config: str | None, deadline_s: float) -> None:
    command = [sys.executable, "-m", "stager", "restore", run, directory, "--name", name]
    command += [] if config is None else ["--config", config]
    end = time.monotonic() + deadline_s
    while not os.path.isdir(directory):
        left = end - time.monotonic()
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=max(left, 0.1)
            )
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"`{name}` of {run} was not at `{directory}` in {deadline_s:g} s",
                subject=directory,
                hint="the next restore goes on from what is there; wait longer",
            ) from None
        if done.returncode == LockHeld.exit_code:
            time.sleep(_LOOK_S)  # another rank of this node restores it
        elif done.returncode and not os.path.isdir(directory):
            raise NotFound(
                f"`{name}` could not be restored to `{directory}`: {done.stderr.strip()[-1000:]}",
                subject=directory,
                hint="`stager ls` lists what is committed",
            )
