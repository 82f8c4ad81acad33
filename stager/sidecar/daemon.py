"""One node's daemon: its services under one supervisor, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Protocol

from stager.errors import NotFound
from stager.formats.wire import SealReply, SealRequest
from stager.logs import event
from stager.service import Service, Supervisor
from stager.sidecar.signals import Stop

log = logging.getLogger("stager.sidecar")

DRAIN_LOOK_S = 0.5
DRAIN_REPORT_S = 5.0
INCOMPLETE = 3


class CheckpointService(Service, Protocol):
    """What the daemon asks of each watched run."""

    @property
    def watch(self) -> str:
        """The watched directory."""
        ...

    async def seal(self, request: SealRequest) -> SealReply: ...

    async def drain(self) -> None:
        """Look once more, and return when everything that is complete is published."""
        ...

    def unpublished(self) -> list[str]:
        """Checkpoints that are sealed or about to be, and not committed."""
        ...


class Sealing:
    """Finds the run that watches a directory."""

    def __init__(self, services: Sequence[CheckpointService]) -> None:
        self._services = services

    async def seal(self, request: SealRequest) -> SealReply:
        """Pass the request on.

        Raises:
            NotFound: Nobody watches there.
        """
        directory = os.path.normpath(request.directory)
        for service in self._services:
            if directory.startswith(service.watch + os.sep):
                return await service.seal(request)
        raise NotFound(
            f"`{request.directory}` lies in no watched directory",
            subject=request.directory,
            hint="the configuration's [[checkpoint]] sections name what is watched: "
            + (", ".join(service.watch for service in self._services) or "none"),
        )


class Daemon:
    """Runs until it is told to stop, then drains."""

    def __init__(
        self,
        supervisor: Supervisor,
        checkpoints: Sequence[CheckpointService],
        stop: Stop,
        *,
        ends_with_draining: Sequence[str],
        drain_timeout_s: float,
    ) -> None:
        """``ends_with_draining``: services that are stopped before the rest is drained."""
        self._supervisor = supervisor
        self._checkpoints = checkpoints
        self._stop = stop
        self._ends_with_draining = ends_with_draining
        self._drain_timeout_s = drain_timeout_s

    async def run(self) -> int:
        """The exit code: 0 if everything complete is published, else 3.

        Raises:
            BaseExceptionGroup: A service failed for good.
        """
        async with asyncio.TaskGroup() as group:
            supervision = group.create_task(self._supervisor.run())
            asked = group.create_task(self._stop.asked.wait())
            await asyncio.wait([supervision, asked], return_when=asyncio.FIRST_COMPLETED)
            if supervision.done():
                asked.cancel()
                supervision.result()
            code = await self._drain()
            supervision.cancel()
        return code

    async def _drain(self) -> int:
        for name in self._ends_with_draining:
            self._supervisor.stop(name)
        cut_short = await self._wait_for_publication()
        if cut_short:
            event(log, logging.WARNING, "drain.cut_short", reason=cut_short)
        left = self._unpublished()
        level = logging.WARNING if left or cut_short else logging.INFO
        event(log, level, "drain.ended", unpublished=",".join(left) or "none")
        return INCOMPLETE if left or cut_short else 0

    async def _wait_for_publication(self) -> str:
        """Why it ended before everything was published, or nothing. Who was cut off cannot know what was left."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_timeout_s
        async with asyncio.TaskGroup() as group:
            abort = group.create_task(self._stop.abort.wait())
            draining = {group.create_task(service.drain()) for service in self._checkpoints}
            report = _DrainReport()
            while draining and not abort.done() and loop.time() < end:
                report.tell(self._unpublished(), loop.time(), end)
                _, pending = await asyncio.wait(
                    {*draining, abort},
                    timeout=min(DRAIN_LOOK_S, end - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                draining &= pending
            aborted = abort.done()
            for task in (abort, *draining):
                task.cancel()
        if not draining:
            return ""
        return "told to abort" if aborted else f"{self._drain_timeout_s:g} s are over"

    def _unpublished(self) -> list[str]:
        return [name for service in self._checkpoints for name in service.unpublished()]


class _DrainReport:
    """A line when what is waited for changes, and every few seconds."""

    def __init__(self) -> None:
        self._told: list[str] = []
        self._told_at_s = 0.0

    def tell(self, unpublished: list[str], now_s: float, end_s: float) -> None:
        if unpublished and (unpublished != self._told or now_s - self._told_at_s >= DRAIN_REPORT_S):
            left_s = round(end_s - now_s)
            event(log, logging.INFO, "drain.waiting", unpublished=",".join(unpublished), seconds_left=left_s)
            self._told, self._told_at_s = unpublished, now_s
