"""Telling that a checkpoint is finished, from the training loop: a marker in its directory, then a word to the daemon."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any, Protocol

from stager.client.api import Client
from stager.client.sockets import find_socket
from stager.disk import LocalDisk
from stager.errors import NotFound, StagerError, UsageError
from stager.formats.commits import COMMIT_MARKER_NAME, CommitMarker, decode_marker, encode_marker
from stager.formats.order import check_whole_number
from stager.logs import event

PING_S = 5.0
STEP_MAX = 1 << 62
MARKER_BYTES_MAX = 16 << 20
_LOGGER = logging.getLogger("stager.client")


class HasState(Protocol):
    """A loader or dataset whose place in the data goes into the checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...


def commit(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    loader: HasState | None = None,
    socket: str | None = None,
) -> None:
    """Declare the checkpoint in directory ``path`` finished.

    The marker ``.stager-commit.json`` appears in the directory whole and durable; the daemon is then told, so that it need
    not wait for its next look. A daemon that does not answer is logged and changes nothing: it finds the marker itself. Call
    it on one rank of a node, after all its ranks have written.

    Args:
        path: The checkpoint's directory; all its files are there.
        step: The training step.
        metrics: Numbers by name, for keeping the best.
        loader: Its ``state_dict()`` is kept as the dataset's cursor, and `stager restore` hands it back.
        socket: The daemon's socket; None takes ``STAGER_SOCKET`` or the default place.

    Raises:
        UsageError: No such directory, or a step, metric or state that cannot be written down.
        OutOfSpace, PermissionDenied: The marker cannot be written.
    """
    directory = os.path.abspath(os.fspath(path))
    if not os.path.isdir(directory):
        raise UsageError(
            f"`{directory}` is not a directory",
            subject=directory,
            hint="commit() takes a checkpoint's directory after it was written; a single file is taken without it",
        )
    marker = CommitMarker(
        _checked_step(step), _checked_metrics(metrics or {}), loader.state_dict() if loader else None
    )
    try:
        raw = encode_marker(marker)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the loader's state cannot be written as JSON: {error}", subject=directory
        ) from error
    LocalDisk().write_file(os.path.join(directory, COMMIT_MARKER_NAME), raw)
    tell_daemon(directory, socket=socket)


def read_commit(path: str | os.PathLike[str]) -> CommitMarker | None:
    """What `commit` left in the checkpoint directory ``path``: step, metrics, cursor. None if it was never called.

    Raises:
        FormatError: The marker is damaged.
    """
    marker = os.path.join(os.fspath(path), COMMIT_MARKER_NAME)
    try:
        raw = LocalDisk().read_at(marker, 0, MARKER_BYTES_MAX)
    except FileNotFoundError:
        return None
    return decode_marker(raw, of=marker)


def tell_daemon(path: str, *, socket: str | None = None) -> None:
    """Have the daemon take the directory or file ``path`` as complete now, if there is a daemon; its refusal is logged."""
    found = find_socket(socket)
    if found is None:
        return
    try:
        Client(found).seal(path, deadline_s=PING_S)
    except StagerError as error:
        # A directory that the daemon does not watch is no mishap: whoever saves there knows it.
        level = logging.INFO if isinstance(error, NotFound) else logging.WARNING
        event(
            _LOGGER,
            level,
            "commit.ping_failed",
            directory=path,
            socket=found,
            reason=error.message,
        )


def _checked_step(step: int | None) -> int | None:
    if step is not None:
        check_whole_number("step", step, 0, STEP_MAX)
    return step


def _checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    checked = {}
    for name, value in metrics.items():
        try:
            number = float(value)  # tensors and numpy numbers of one element as well
        except (TypeError, ValueError) as error:
            raise UsageError(f"metric `{name}` is not a number: {value!r}", subject=name) from error
        if not math.isfinite(number):
            event(_LOGGER, logging.WARNING, "commit.metric_left_out", metric=name, value=str(number))
            continue
        checked[str(name)] = number
    return checked
