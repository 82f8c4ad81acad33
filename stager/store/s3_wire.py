"""The bulk bytes of S3 without an event loop under them: blocking sockets in threads, below aiobotocore's client.

Of each request aiobotocore still makes the parameters, the signature and the meaning of the answer. Only how the
bytes of a GET or a put travel is here: whole pieces received by one system call into one buffer, and bodies sent from where
they lie, both without the interpreter's lock. Everything else, and whatever goes through a proxy, travels as aiobotocore
sends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import (
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)

from stager.offload import Offload

R = TypeVar("R")

HEAD_BYTES_MAX = 64 << 10
ERROR_BYTES_MAX = 1 << 20
IDLE_S = 12.0
_RECEIVE_BYTES = 64 << 10
_TIMED_OUT = (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_Address = tuple[str, str, int]


def wire_session(offload: Offload) -> type[AIOHTTPSession]:
    """The class of session for `AioConfig`'s ``http_session_cls``; its threads are those of ``offload``."""

    class WireSession(_WireSession):
        _offload = offload

    return WireSession


class _WireSession(AIOHTTPSession):  # type: ignore[misc]
    """See the module."""

    _offload: Offload

    def __init__(
        self, *args: Any, timeout: Any = None, max_pool_connections: int = 10, **kwargs: Any
    ) -> None:
        super().__init__(*args, timeout=timeout, max_pool_connections=max_pool_connections, **kwargs)
        self._connect_s, self._read_s = timeout if isinstance(timeout, tuple | list) else (timeout, timeout)
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[_Address, deque[tuple[float, _Connection]]] = {}
        self._pool_max = max_pool_connections

    async def __aexit__(self, *exc: object) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop()[1].close()
        await super().__aexit__(*exc)

    async def send(self, request: Any) -> Any:
        """Send a prepared request; its answer, with the body still to come where it streams."""
        body = request.body
        fetches = request.method == "GET" and request.stream_output
        brings = (
            request.method == "PUT"
            and isinstance(body, io.BytesIO)
            and "Transfer-Encoding" not in request.headers
        )
        if not (fetches or brings) or self._proxy_config.proxy_url_for(request.url):
            return await super().send(request)
        head, address = _encode_head(request)
        data = body.getbuffer()[body.tell() :] if brings else memoryview(b"")
        while True:
            connection = self._take(address)
            fresh = connection is None
            if connection is None:
                connection = await self._connect(request.url, address)
            try:
                answer = await self.on_thread(connection, lambda: connection.exchange(head, data))  # noqa: B023
                break
            except _TIMED_OUT as error:
                connection.close()
                raise ReadTimeoutError(endpoint_url=request.url, error=error) from error
            except (OSError, _Broken) as error:
                connection.close()
                # An idle connection may have been closed by the server at any moment. A GET bears repeating; whether a
                # put was done is for the caller to find out.
                if fresh or not fetches:
                    raise ConnectionClosedError(
                        error=error, request=request, endpoint_url=request.url
                    ) from error
        raw = WireBody(self, connection, address, request.url, answer)
        response = AioAWSResponse(request.url, answer.status, answer.headers, raw)
        if not request.stream_output:
            await response.content
        return response

    async def on_thread(self, connection: _Connection, work: Callable[[], R]) -> R:
        """``work`` in a thread; a cancellation ends the connection, and with it the thread's wait."""
        try:
            return await self._offload.run("wire", work)
        except asyncio.CancelledError:
            connection.abort()
            raise

    def give_back(self, connection: _Connection, address: _Address) -> None:
        """A connection whose answer was read whole."""
        idle = self._idle.setdefault(address, deque())
        if self._sessions is None or len(idle) >= self._pool_max:
            connection.close()
            return
        idle.append((asyncio.get_running_loop().time(), connection))

    def _take(self, address: _Address) -> _Connection | None:
        idle = self._idle.get(address)
        oldest = asyncio.get_running_loop().time() - IDLE_S
        while idle:
            since, connection = idle.pop()
            if since >= oldest and connection.is_quiet():
                return connection
            connection.close()
        return None

    async def _connect(self, url: str, address: _Address) -> _Connection:
        scheme, host, port = address
        if scheme == "https" and self._tls is None:
            self._tls, _ = await asyncio.to_thread(self._build_ssl_contexts, None)
        tls = self._tls if scheme == "https" else None
        try:
            return await self._offload.run(
                "wire", _Connection, host, port, tls, connect_s=self._connect_s, read_s=self._read_s
            )
        except ssl.SSLError as error:
            raise SSLError(endpoint_url=url, error=error) from error
        except TimeoutError as error:
            raise ConnectTimeoutError(endpoint_url=url, error=error) from error
        except OSError as error:
            raise EndpointConnectionError(endpoint_url=url, error=error) from error


class WireBody:
    """What `aiobotocore.response.AioStreamingBody` reads from: the body of one answer."""

    def __init__(
        self, session: _WireSession, connection: _Connection, address: _Address, url: str, answer: _Answer
    ) -> None:
        self._session = session
        self._connection = connection
        self._address = address
        self._answer = answer
        self._open = True
        self.url = url
        self._end_if_done()

    @property
    def content(self) -> WireBody:
        return self

    def at_eof(self) -> bool:
        return not self._open

    async def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes; with -1 all, which is for answers that are no object."""
        if not self._open:
            return b""
        answer, connection = self._answer, self._connection
        try:
            if size < 0:
                data = await self._session.on_thread(connection, lambda: connection.rest(answer))
            elif answer.chunked:
                raise _Broken("a body in chunks")
            elif answer.early:
                data = answer.take_early(size)
            else:
                wanted = min(size, answer.left)
                data = await self._session.on_thread(connection, lambda: connection.receive(wanted))
                answer.left -= len(data)
        except _TIMED_OUT as error:
            self.abort()
            raise ReadTimeoutError(endpoint_url=self.url, error=error) from error
        except (OSError, _Broken) as error:
            self.abort()
            raise ResponseStreamingError(error=error) from error
        self._end_if_done()
        return data

    def close(self) -> None:
        """Leave the body; a connection with bytes still to come is of no use."""
        if self._open:
            self.abort()

    def abort(self) -> None:
        self._open = False
        self._connection.abort()

    def _end_if_done(self) -> None:
        answer = self._answer
        if self._open and not answer.left and not answer.early and not answer.chunked:
            self._open = False
            if answer.keeps_alive:
                self._session.give_back(self._connection, self._address)
            else:
                self._connection.close()


class _Broken(Exception):
    """Not HTTP, or less of it than was announced."""


class _Answer:
    """The head of an answer, and the first bytes of its body, which came with it."""

    def __init__(self, raw: bytes, early: bytes) -> None:
        lines = raw.decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        try:
            self.status = int(rest[:3])
        except ValueError:
            raise _Broken(f"no HTTP: {lines[0][:40]!r}") from None
        self.headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            # Of a header that comes twice the last one counts, as with aiobotocore's own session.
            self.headers[name.strip().lower()] = value.strip()
        length = self.headers.get("content-length", "")
        if length and not (length.isascii() and length.isdigit()):
            raise _Broken(f"Content-Length is {length[:40]!r}")
        self.chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        self.has_length = bool(length) and not self.chunked
        without_body = self.status in (204, 304)
        total = 0 if without_body or not self.has_length else int(length)
        if not self.has_length and not without_body and not self.chunked:
            # It ends with the connection; only answers that are no object may.
            total = ERROR_BYTES_MAX
        self.keeps_alive = (
            version == "HTTP/1.1"
            and (self.has_length or self.chunked or without_body)
            and self.headers.get("connection", "").lower() != "close"
        )
        if not self.chunked and len(early) > total:
            # More than was announced: what follows on this connection cannot be trusted.
            self.keeps_alive, early = False, early[:total]
        self.early = early
        self.left = 0 if self.chunked else total - len(early)

    def take_early(self, size: int) -> bytes:
        piece, self.early = self.early[:size], self.early[size:]
        return piece


class _Connection:
    """One connection. All but `abort` and `is_quiet` blocks, each wait bounded by the socket's own timeouts."""

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, *, connect_s: float, read_s: float
    ) -> None:
        plain = socket.create_connection((host, port), timeout=connect_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = tls.wrap_socket(plain, server_hostname=host) if tls else plain
            # The kernel's timeouts instead of Python's, which would ask for readiness before every call.
            self._socket.settimeout(None)
            bound = struct.pack("ll", int(read_s), int(read_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        except BaseException:
            plain.close()
            raise
        # TLS has no such flag: it gives a record at a time.
        self._flags = 0 if tls else socket.MSG_WAITALL
        self._busy = threading.Lock()
        self._aborted = False

    def exchange(self, head: bytes, body: memoryview) -> _Answer:
        """Send a request, and receive the head of its answer."""
        with self._used():
            if len(body) <= _RECEIVE_BYTES:
                self._socket.sendall(head + body)
            else:
                self._socket.sendall(head)
                try:
                    self._socket.sendall(body)
                except (BrokenPipeError, ConnectionResetError):
                    # Whoever refuses a body early often says why.
                    with contextlib.suppress(OSError, _Broken):
                        return self._head()
                    raise
            return self._head()

    def _head(self) -> _Answer:
        raw = b""
        while True:
            piece = self._socket.recv(_RECEIVE_BYTES)
            if not piece:
                raise _Broken("the connection was closed before an answer")
            raw += piece
            head, divider, early = raw.partition(b"\r\n\r\n")
            if divider:
                answer = _Answer(head, early)
                if answer.status >= 200:
                    return answer
                raw = early  # 100 Continue
                if raw:
                    self_contained, divider, early = raw.partition(b"\r\n\r\n")
                    if divider:
                        return _Answer(self_contained, early)
            elif len(raw) > HEAD_BYTES_MAX:
                raise _Broken("the answer's head has no end")

    def receive(self, size: int) -> bytes:
        """Up to ``size`` bytes, in a buffer of their own; empty at the end of the connection."""
        with self._used():
            if self._flags:
                return self._socket.recv(size, self._flags)
            pieces, got = [], 0
            while got < size and (piece := self._socket.recv(min(size - got, _RECEIVE_BYTES))):
                pieces.append(piece)
                got += len(piece)
            return b"".join(pieces)

    def rest(self, answer: _Answer) -> bytes:
        """All of a small body, however it ends."""
        with self._used():
            raw = bytearray(answer.early)
            answer.early = b""
            if not answer.chunked:
                while answer.left and (piece := self._socket.recv(min(answer.left, _RECEIVE_BYTES))):
                    raw += piece
                    answer.left -= len(piece)
                if answer.left and answer.has_length:
                    raise _Broken(f"the answer ended {answer.left} bytes early")
                answer.left = 0
                return bytes(raw)
            body = bytearray()
            while True:
                line = self._line(raw)
                try:
                    size = int(line.split(b";")[0], 16)
                except ValueError:
                    raise _Broken("a chunk without its length") from None
                if len(body) + size > ERROR_BYTES_MAX:
                    raise _Broken("an answer without end")
                while len(raw) < size + 2:
                    raw += self._more()
                body += raw[:size]
                del raw[: size + 2]
                if size == 0:
                    answer.chunked, answer.keeps_alive = False, False
                    return bytes(body)

    def _line(self, raw: bytearray) -> bytes:
        while (end := raw.find(b"\r\n")) < 0:
            if len(raw) > HEAD_BYTES_MAX:
                raise _Broken("a line without end")
            raw += self._more()
        line = bytes(raw[:end])
        del raw[: end + 2]
        return line

    def _more(self) -> bytes:
        piece = self._socket.recv(_RECEIVE_BYTES)
        if not piece:
            raise _Broken("the answer ended early")
        return piece

    def is_quiet(self) -> bool:
        """Whether an idle connection is still open, with nothing said that was not asked."""
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return False

    def abort(self) -> None:
        """End it at once, also for a thread that waits in it; that thread then gives the descriptor back."""
        self._aborted = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Give the descriptor back, unless a thread is in it."""
        if self._busy.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    self._socket.close()
            finally:
                self._busy.release()

    def __del__(self) -> None:
        # Of a connection that stood only after whoever wanted it had given up.
        if hasattr(self, "_socket"):
            self._socket.close()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        try:
            with self._busy:
                yield
        finally:
            if self._aborted:
                self.close()


def _encode_head(request: Any) -> tuple[bytes, _Address]:
    parts = urlsplit(request.url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers: Mapping[str, Any] = request.headers
    lines = [f"{request.method} {target} HTTP/1.1"]
    names = {str(name).lower() for name in headers}
    if "host" not in names:
        lines.append(f"Host: {parts.netloc.rpartition('@')[2]}")
    if "accept-encoding" not in names:
        lines.append("Accept-Encoding: identity")
    for name, value in headers.items():
        text = value.decode("utf-8") if isinstance(value, bytes) else str(value)
        if "\r" in text or "\n" in text:
            raise ValueError(f"a line break in the header {name}")
        lines.append(f"{name}: {text}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8"), (parts.scheme, host, port)
