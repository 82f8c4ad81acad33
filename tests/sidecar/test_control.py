"""The control API in this process: sockets that are claimed, bugs that do not end it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stager.disk import LocalDisk
from stager.errors import ConfigError, LockHeld, OutOfSpace
from stager.formats import wire
from stager.sidecar.control import ControlRoutes, ControlService, claim_socket

OPEN = json.dumps({"source": "s3://b/d", "deadline_s": 1.0}).encode()


class Failing:
    """Fails in the given way, whatever it is asked."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def open(self, request: wire.OpenRequest) -> wire.OpenReply:
        raise self.error

    async def announce(self, request: wire.AnnounceRequest) -> wire.AnnounceReply:
        raise self.error

    async def want(self, request: wire.WantRequest) -> wire.WantReply:
        await asyncio.get_running_loop().create_future()
        raise self.error

    async def seal(self, request: wire.SealRequest) -> wire.SealReply:
        raise self.error


@asynccontextmanager
async def serving(path: Path, error: Exception) -> AsyncIterator[aiohttp.ClientSession]:
    failing = Failing(error)
    routes = ControlRoutes(failing, failing, dict, lambda: ["staging"], lambda: b"metric 1\n")
    service = ControlService(str(path), routes, LocalDisk())
    async with asyncio.TaskGroup() as group:
        ready = asyncio.Event()
        task = group.create_task(service.run(ready.set))
        async with asyncio.timeout(10):
            await ready.wait()
        async with aiohttp.ClientSession(
            "http://stager", connector=aiohttp.UnixConnector(str(path))
        ) as session:
            yield session
        task.cancel()


async def call(session: aiohttp.ClientSession, path: str, body: bytes | None = None) -> tuple[int, Any]:
    async with session.request("GET" if body is None else "POST", path, data=body) as reply:
        return reply.status, json.loads(await reply.read())


async def test_a_bug_is_told_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets an error without our insides, the log the traceback, the next caller an answer."""
    async with serving(tmp_path / "s", ZeroDivisionError("inner secret")) as session:
        status, body = await call(session, "/v1/open", OPEN)
        assert status == 500 and body["error"]["kind"] == "StagerError" and "secret" not in str(body)
        assert await call(session, "/v1/live") == (200, {"live": True})
        assert await call(session, "/v1/ready") == (503, {"ready": False, "waiting_for": ["staging"]})
    assert "ZeroDivisionError: inner secret" in caplog.text and "control.bug" in caplog.text


async def test_errors_arrive_as_they_were_raised(tmp_path: Path) -> None:
    """Class, message, subject and hint cross the socket."""
    raised = OutOfSpace("no room", subject="shard", hint="make some")
    async with serving(tmp_path / "s", raised) as session, session.post("/v1/open", data=OPEN) as reply:
        arrived = wire.decode_error(await reply.read(), status=reply.status)
    assert reply.status == 507 and type(arrived) is OutOfSpace
    assert (arrived.message, arrived.subject, arrived.hint) == ("no room", "shard", "make some")


async def test_it_ends_while_somebody_waits(tmp_path: Path) -> None:
    """A caller that stands waiting does not keep the daemon from ending; its socket is gone afterwards."""
    path = tmp_path / "s"
    request = json.dumps({"dataset": "d", "shard": "s.tar", "deadline_s": 600.0, "damaged": False}).encode()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        async with serving(path, ValueError()) as session:
            waiting = group.create_task(wait_for_ever(str(path), request))
            while not path.exists() or (await call(session, "/v1/live"))[0] != 200:
                pass
        assert await waiting
    assert not path.exists()


async def wait_for_ever(path: str, request: bytes) -> bool:
    """Whether the connection was closed on us."""
    async with aiohttp.ClientSession("http://stager", connector=aiohttp.UnixConnector(path)) as session:
        try:
            async with session.post("/v1/want", data=request) as reply:
                return reply.status >= 500
        except aiohttp.ClientError:
            return True


def test_a_dead_daemons_socket_is_replaced(tmp_path: Path) -> None:
    """Bound once, owner gone, nobody listening: taken over, with the mode of a private thing."""
    path = str(tmp_path / "made" / "s")
    os.mkdir(tmp_path / "made")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with claim_socket(path, LocalDisk()):
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
        with pytest.raises(LockHeld, match=path):
            claim_socket(path, LocalDisk())


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_stays(tmp_path: Path, kind: str) -> None:
    """Files, folders and links, even links to sockets, are not ours to replace."""
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no socket"):
        claim_socket(str(path), LocalDisk())
    assert os.path.lexists(path)
