"""The trainer's and the command line's way to the daemon: blocking calls over its unix socket.

A `Client` is a path and a patience. Every call opens a connection of its own and closes it, so a client may be shared by
threads, inherited over fork, pickled to a spawned worker, and outlives any daemon. Every wait ends at a deadline.
"""

from __future__ import annotations

import http.client
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stager.errors import ConfigError, DeadlineExceeded, FormatError, StagerError, Unavailable
from stager.formats import wire
from stager.formats.fields import load_object
from stager.logs import event

_LOGGER = logging.getLogger("stager.client")

CALL_S = 10.0
REPLY_MARGIN_S = 5.0
BACKOFF_FIRST_S = 0.02
BACKOFF_MOST_S = 0.5
AWAY_TOLD_S = 3.0
REPLY_BYTES_MAX = 64 << 20
_SOCKET_PATH_BYTES_MAX = 107


@dataclass(frozen=True, slots=True)
class Client:
    """Calls to the daemon behind one unix socket.

    Attributes:
        socket_path: Where the daemon listens.
        patience_s: How long a call goes on trying to reach a daemon that is not there, such as one that restarts.
            No call goes on beyond its own deadline.
    """

    socket_path: str
    patience_s: float = 0.0

    def live(self) -> bool:
        """Whether a daemon answers now."""
        try:
            self._call("GET", "/v1/live", answer_s=CALL_S, patience_s=0.0)
        except StagerError:
            return False
        return True

    def ready(self) -> tuple[bool, tuple[str, ...]]:
        """Whether the daemon is ready, and what it waits for if not."""
        status, raw = self._reach("GET", "/v1/ready", None, CALL_S, self.patience_s)
        waiting_for = load_object(raw, of="/v1/ready").get("waiting_for")
        names = waiting_for if isinstance(waiting_for, list) else []
        return status == 200, tuple(str(name) for name in names)

    def status(self) -> Mapping[str, Any]:
        """Everything that ``stager status`` shows."""
        return load_object(self._call("GET", "/v1/status", answer_s=CALL_S), of="/v1/status")

    def open(self, source: str, deadline_s: float) -> wire.OpenReply:
        """Make a dataset known, and wait until its manifest is on this node.

        Raises:
            Unavailable: No daemon answered in time.
            DeadlineExceeded: A daemon did, but not with the manifest.
        """
        raw = self._call(
            "POST",
            "/v1/open",
            lambda left: wire.OpenRequest(source, left),
            answer_s=deadline_s,
            waiting_for=source,
        )
        return wire.decode_open_reply(raw)

    def announce(self, request: wire.AnnounceRequest) -> wire.AnnounceReply:
        """Tell a reader's order and place. It is a hint: the caller may go on when it fails."""
        return wire.decode_announce_reply(
            self._call("POST", "/v1/announce", lambda _: request, answer_s=CALL_S, patience_s=0.0)
        )

    def want(self, dataset: str, shard: str, deadline_s: float, *, damaged: bool = False) -> wire.WantReply:
        """Wait until a shard is in the cache.

        Args:
            dataset: As `open` named it.
            shard: Its name in the manifest.
            deadline_s: How long to wait at most; a daemon that goes away and comes back is asked again.
            damaged: Say that the copy which is there is damaged.

        Raises:
            Unavailable: No daemon answered in time.
            DeadlineExceeded: A daemon did, but not with the shard.
        """
        raw = self._call(
            "POST",
            "/v1/want",
            lambda left: wire.WantRequest(dataset, shard, left, damaged),
            answer_s=deadline_s,
            waiting_for=f"{dataset}/{shard}",
        )
        return wire.decode_want_reply(raw)

    def seal(self, directory: str, *, wait: bool = False, deadline_s: float = 600.0) -> wire.SealReply:
        """Have a directory taken as a complete checkpoint; with ``wait``, until it is committed in the bucket."""
        raw = self._call(
            "POST",
            "/v1/seal",
            lambda left: wire.SealRequest(directory, wait, left),
            answer_s=deadline_s,
            waiting_for=directory,
        )
        return wire.decode_seal_reply(raw)

    def _call(
        self,
        method: str,
        path: str,
        message: Callable[[float], object] | None = None,
        *,
        answer_s: float,
        patience_s: float | None = None,
        waiting_for: str = "",
    ) -> bytes:
        patience_s = self.patience_s if patience_s is None else patience_s
        status, raw = self._reach(method, path, message, answer_s, patience_s, waiting_for)
        if status >= 400:
            raise wire.decode_error(raw, status=status)
        return raw

    def _reach(
        self,
        method: str,
        path: str,
        message: Callable[[float], object] | None,
        answer_s: float,
        patience_s: float,
        waiting_for: str = "",
    ) -> tuple[int, bytes]:
        """Ask until somebody answers, for ``patience_s`` without anybody there and for ``answer_s`` in all."""
        end = time.monotonic() + answer_s
        away_since = time.monotonic()
        backoff_s = BACKOFF_FIRST_S
        told = False
        while True:
            left = max(end - time.monotonic(), 0.001)
            try:
                return self._exchange(method, path, message(left) if message else None, left + REPLY_MARGIN_S)
            except TimeoutError:
                raise self._unanswered(path, answer_s, waiting_for) from None
            except _Away as away:
                now = time.monotonic()
                if away.was_there:
                    away_since, backoff_s = now, BACKOFF_FIRST_S
                give_up = end if away.busy else min(end, away_since + patience_s)
                if now + backoff_s > give_up:
                    raise self._nobody(path, away) from away.__cause__
                if not told and now - away_since >= AWAY_TOLD_S:
                    # A trainer that stands still for minutes must say what it stands still for.
                    told = True
                    nobody = self._nobody(path, away)
                    facts = {"socket": self.socket_path, "reason": nobody.message, "hint": nobody.hint}
                    event(
                        _LOGGER, logging.WARNING, "daemon.awaited", seconds_left=round(give_up - now), **facts
                    )
                time.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MOST_S)

    def _exchange(self, method: str, path: str, message: object, timeout_s: float) -> tuple[int, bytes]:
        if len(self.socket_path.encode()) > _SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"`{self.socket_path}` is too long for a unix socket: {_SOCKET_PATH_BYTES_MAX} bytes at most",
                subject=self.socket_path,
                hint="choose a shorter path, such as /run/stager/stager.sock",
            )
        connection = _UnixConnection(self.socket_path, timeout_s)
        connected = False
        try:
            connection.connect()
            connected = True
            body = None if message is None else wire.encode(message)
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            reply = connection.getresponse()
            raw = reply.read(REPLY_BYTES_MAX + 1)
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as error:
            # A full backlog of a unix socket is no wait but EAGAIN: somebody is there, and busy.
            raise _Away(connected, busy=isinstance(error, BlockingIOError) and not connected) from error
        finally:
            connection.close()
        if len(raw) > REPLY_BYTES_MAX:
            raise FormatError(
                f"the daemon's answer to {path} has more than {REPLY_BYTES_MAX} bytes", subject=path
            )
        return reply.status, raw

    def _nobody(self, path: str, away: _Away) -> Unavailable:
        cause = away.__cause__
        told = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        verb = "went away while it was asked" if away.was_there else "does not answer"
        return Unavailable(
            f"the daemon at `{self.socket_path}` {verb} ({path}): {told}",
            subject=self.socket_path,
            hint="start it with `stager run --config stager.toml`, or name its socket: socket=... or STAGER_SOCKET",
        )

    def _unanswered(self, path: str, answer_s: float, waiting_for: str) -> StagerError:
        if waiting_for:
            return DeadlineExceeded(
                f"`{waiting_for}` did not come from the daemon at `{self.socket_path}` within {answer_s:.1f} s",
                subject=waiting_for,
                hint="see with `stager status` what the daemon is doing, or wait longer",
            )
        return Unavailable(
            f"the daemon at `{self.socket_path}` did not answer {path} within {answer_s:.1f} s",
            subject=self.socket_path,
            hint="it may be stopped or overloaded: see its log",
        )


class _Away(Exception):
    """No daemon could be reached, or it went away (``was_there``) before it had answered, or it has no time to take the
    call (``busy``); the cause says why."""

    def __init__(self, was_there: bool, *, busy: bool) -> None:
        super().__init__()
        self.was_there = was_there
        self.busy = busy


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("stager", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
