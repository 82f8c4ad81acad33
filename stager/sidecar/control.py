"""The control API: HTTP and JSON on a unix socket of mode 0600. Shapes are in `stager.formats.wire`."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stager.disk import Disk
from stager.errors import (
    AlreadyExists,
    ConfigError,
    DeadlineExceeded,
    IntegrityError,
    LockHeld,
    NotFound,
    OutOfSpace,
    PermissionDenied,
    StagerError,
    StoreError,
    UsageError,
)
from stager.formats import wire
from stager.logs import event

log = logging.getLogger("stager.control")
http_log = logging.getLogger("stager.control.http")

SHUTDOWN_S = 2.0
BACKLOG = 1024

_STATUSES: tuple[tuple[type[StagerError], int], ...] = (
    (UsageError, 400),
    (IntegrityError, 422),
    (NotFound, 404),
    (AlreadyExists, 409),
    (LockHeld, 409),
    (PermissionDenied, 403),
    (DeadlineExceeded, 504),
    (OutOfSpace, 507),
    (StoreError, 502),
)


class _OwnFaults(logging.Filter):
    """Leaves out what a client got wrong in HTTP itself: it was told, and a traceback of it helps nobody."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


http_log.addFilter(_OwnFaults())


class Staging(Protocol):
    """What the API asks of staging."""

    async def open(self, request: wire.OpenRequest) -> wire.OpenReply: ...
    def announce(self, request: wire.AnnounceRequest) -> wire.AnnounceReply: ...
    async def want(self, request: wire.WantRequest) -> wire.WantReply: ...


class Sealing(Protocol):
    """What the API asks of the checkpoint services together."""

    async def seal(self, request: wire.SealRequest) -> wire.SealReply: ...


@dataclass(frozen=True, slots=True)
class ControlRoutes:
    """What stands behind the routes.

    Attributes:
        staging: Datasets.
        sealing: Checkpoints.
        status: The status document.
        waiting_for: Names of what is not ready yet; empty means ready.
        metrics: Prometheus text.
    """

    staging: Staging
    sealing: Sealing
    status: Callable[[], Mapping[str, Any]]
    waiting_for: Callable[[], list[str]]
    metrics: Callable[[], bytes]


class ControlService:
    """Serves the API until cancelled."""

    name = "control"

    def __init__(self, path: str, routes: ControlRoutes, disk: Disk) -> None:
        self._path = path
        self._routes = routes
        self._disk = disk
        self._served = 0

    async def run(self, ready: Callable[[], None]) -> None:
        listener = claim_socket(self._path, self._disk)
        runner = web.AppRunner(
            self._application(), access_log=None, logger=http_log, shutdown_timeout=SHUTDOWN_S, handle_signals=False
        )
        try:
            await runner.setup()
            await web.SockSite(runner, listener).start()
            event(log, logging.INFO, "control.listening", socket=self._path)
            ready()
            await asyncio.get_running_loop().create_future()
        finally:
            await runner.cleanup()
            listener.close()
            self._disk.remove(self._path)

    def status(self) -> Mapping[str, Any]:
        return {"socket": self._path, "served": self._served}

    def _application(self) -> web.Application:
        application = web.Application(
            middlewares=[self._errors_as_json], client_max_size=wire.MESSAGE_BYTES_MAX
        )
        application.add_routes(
            [
                web.get("/v1/live", self._live),
                web.get("/v1/ready", self._ready),
                web.get("/v1/status", self._status),
                web.post("/v1/open", self._open),
                web.post("/v1/announce", self._announce),
                web.post("/v1/want", self._want),
                web.post("/v1/seal", self._seal),
                web.get("/metrics", self._metrics),
            ]
        )
        return application

    @web.middleware
    async def _errors_as_json(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._served += 1
        try:
            return await handler(request)
        except StagerError as error:
            return _json(wire.encode_error(error), status=_status_of(error))
        except web.HTTPException as error:
            said = UsageError(f"{request.method} {request.path}: {error.reason}", subject="control API")
            return _json(wire.encode_error(said), status=error.status)
        except Exception:
            # The caller is told, the log has the rest, and the daemon goes on for the others.
            log.exception("control.bug", extra={"fields": {"path": request.path}})
            bug = StagerError(
                f"{request.method} {request.path}: a bug in the daemon",
                subject="control API",
                hint="its log has the traceback; please report it",
            )
            return _json(wire.encode_error(bug), status=500)

    async def _live(self, _: web.Request) -> web.Response:
        return _json(b'{"live": true}')

    async def _ready(self, _: web.Request) -> web.Response:
        waiting_for = self._routes.waiting_for()
        body = json.dumps({"ready": not waiting_for, "waiting_for": waiting_for}).encode()
        return _json(body, status=503 if waiting_for else 200)

    async def _status(self, _: web.Request) -> web.Response:
        return _json(json.dumps(self._routes.status(), ensure_ascii=False).encode("utf-8", "replace"))

    async def _open(self, request: web.Request) -> web.Response:
        return _json(
            wire.encode(await self._routes.staging.open(wire.decode_open_request(await request.read())))
        )

    async def _announce(self, request: web.Request) -> web.Response:
        return _json(
            wire.encode(self._routes.staging.announce(wire.decode_announce_request(await request.read())))
        )

    async def _want(self, request: web.Request) -> web.Response:
        return _json(
            wire.encode(await self._routes.staging.want(wire.decode_want_request(await request.read())))
        )

    async def _seal(self, request: web.Request) -> web.Response:
        return _json(
            wire.encode(await self._routes.sealing.seal(wire.decode_seal_request(await request.read())))
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._routes.metrics(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )


def claim_socket(path: str, disk: Disk) -> socket.socket:
    """A listening socket at ``path``, of mode 0600. A dead daemon's socket is replaced; anything else there is not.

    Raises:
        LockHeld: A living process answers there.
        ConfigError: Something that is no socket is there, or the directory cannot be made.
    """
    disk.make_directory(os.path.dirname(path))
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISSOCK(status.st_mode):
            raise ConfigError(
                f"node.socket `{path}` exists and is no socket",
                subject=path,
                hint="name another path, or remove it",
            )
        if _answers(path):
            raise LockHeld(
                f"another process listens on `{path}`",
                subject=path,
                hint="one daemon a node: stop the other, or give this one another socket and cache",
            )
        disk.remove(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        # Between the two nobody can connect, for nobody listens yet. A umask would be the whole process's.
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on node.socket `{path}`: {error.strerror}",
            subject=path,
            hint="name a path in a directory that the daemon's user may write to",
        ) from error
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
        return True


def _status_of(error: StagerError) -> int:
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def _json(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
