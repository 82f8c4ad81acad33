"""Blocking client of the control API, standard library only."""

from __future__ import annotations

from stager.client.api import Client
from stager.client.sockets import DEFAULT_SOCKET, SOCKET_VARIABLE, find_socket

__all__ = ["DEFAULT_SOCKET", "SOCKET_VARIABLE", "Client", "find_socket"]
