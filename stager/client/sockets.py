"""Where the daemon's socket is, from the trainer's side."""

from __future__ import annotations

import os

SOCKET_VARIABLE = "STAGER_SOCKET"
DEFAULT_SOCKET = "/run/stager/stager.sock"


def find_socket(given: str | None) -> str | None:
    """The socket to ask: ``given``, else ``STAGER_SOCKET``, else the default place if something is there, else None."""
    if given:
        return os.path.abspath(given)
    # The trainer has no configuration file of ours; its launcher sets this, as it sets RANK.
    named = os.environ.get(SOCKET_VARIABLE)  # noqa: TID251
    if named:
        return os.path.abspath(named)
    return DEFAULT_SOCKET if os.path.exists(DEFAULT_SOCKET) else None
