"""A daemon in a thread: the control API over a unix socket, staging from a directory at the test's word."""

from __future__ import annotations

import shutil
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stager.errors import DeadlineExceeded, StagerError
from stager.formats import wire
from stager.formats.manifest import MANIFEST_NAME, decode_dataset_manifest


class ThreadDaemon:
    """Answers at ``socket``; puts shards of ``origin`` into ``cache`` when they are wanted.

    Attributes:
        calls: ``(path, request)`` of every call, in order.
        released: While this event is not set, wanted shards do not come.
    """

    def __init__(self, socket: Path, origin: Path, cache: Path) -> None:
        self.socket, self.origin, self.cache = socket, origin, cache
        self.cache.mkdir(parents=True, exist_ok=True)
        self.calls: list[tuple[str, Any]] = []
        self.released = threading.Event()
        self.released.set()
        self.cache_bytes = 1 << 40

    def __enter__(self) -> Self:
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, b'{"live": true}')

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    self._reply(200, wire.encode(daemon.answer(self.path, raw)))
                except StagerError as error:
                    self._reply(503, wire.encode_error(error))

            def _reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

            def address_string(self) -> str:
                return "unix"

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self._server = Server(str(self.socket), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.socket.unlink()

    def wanted(self) -> list[str]:
        """Names of wanted shards, in order."""
        return [request.shard for path, request in self.calls if path == "/v1/want"]

    def answer(self, path: str, raw: bytes) -> object:
        if path == "/v1/open":
            opened = wire.decode_open_request(raw)
            self.calls.append((path, opened))
            manifest = decode_dataset_manifest((self.origin / MANIFEST_NAME).read_bytes())
            return wire.OpenReply(
                "data", manifest.fingerprint, str(self.origin / MANIFEST_NAME), str(self.cache)
            )
        if path == "/v1/announce":
            self.calls.append((path, wire.decode_announce_request(raw)))
            return wire.AnnounceReply(1000, self.cache_bytes)
        if path == "/v1/want":
            return self._want(wire.decode_want_request(raw))
        if path == "/v1/seal":
            self.calls.append((path, wire.decode_seal_request(raw)))
            return wire.SealReply("step-1", "sealed")
        raise StagerError(f"no {path}")

    def _want(self, request: wire.WantRequest) -> wire.WantReply:
        self.calls.append(("/v1/want", request))
        if not self.released.wait(request.deadline_s):
            raise DeadlineExceeded(f"`{request.shard}` did not come", subject=request.shard)
        target = self.cache / request.shard
        staged = target.with_suffix(f".{threading.get_ident()}")
        shutil.copy(self.origin / request.shard, staged)
        staged.rename(target)
        return wire.WantReply(str(target))
