"""The daemon, put together: the only place that builds concrete objects."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Protocol

from stager import __version__
from stager.budget import ByteBudget, RateLimit
from stager.cache.layout import CacheLayout
from stager.cache.shards import ShardCache
from stager.clock import Clock, SystemClock, iso_utc
from stager.config import Config
from stager.disk import LocalDisk
from stager.errors import NotFound, StagerError
from stager.formats.wire import SealReply, SealRequest
from stager.journal import Journal
from stager.logs import event
from stager.offload import ThreadOffload
from stager.prefetch.service import StagingOptions, StagingService
from stager.service import Service, Supervisor
from stager.sidecar.control import ControlRoutes, ControlService
from stager.sidecar.metrics import make_metrics
from stager.sidecar.runs import make_checkpoint_services
from stager.sidecar.signals import Stop, install
from stager.sidecar.stores import Stores
from stager.transfer.download import DownloadOptions
from stager.transfer.tools import Tools

log = logging.getLogger("stager.sidecar")

DRAIN_REPORT_S = 5.0


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
        """Checkpoints that are sealed or uploading."""
        ...


class Daemon:
    """One node's daemon over a configuration."""

    def __init__(
        self,
        config: Config,
        stores: Stores,
        tools: Tools,
        clock: Clock,
        checkpoints: Sequence[CheckpointService],
    ) -> None:
        self._config = config
        self._clock = clock
        self._started_ns = clock.wall_ns()
        self._state = "running"
        self.staging = StagingService(
            ShardCache(config.node.cache, config.node.cache_bytes, tools),
            stores.open,
            sources=[section.source for section in config.dataset],
            options=StagingOptions(
                config.node.concurrent_shards, DownloadOptions(concurrency=config.node.concurrent_parts)
            ),
        )
        self.checkpoints = checkpoints
        routes = ControlRoutes(
            self.staging, _Sealing(self.checkpoints), self.status, self._waiting_for, make_metrics(self.status)
        )
        control = ControlService(config.node.socket, routes, tools.disk)
        self.supervisor = Supervisor([control, self.staging, *self.checkpoints])

    def status(self) -> Mapping[str, Any]:
        """The document that `stager status --json` prints."""
        return {
            "version": __version__,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "state": self._state,
            "ready": not self._waiting_for(),
            "waiting_for": self._waiting_for(),
            "started": iso_utc(self._started_ns),
            "uptime_s": (self._clock.wall_ns() - self._started_ns) / 1e9,
            "node": {"index": self._config.node.node_index, "count": self._config.node.node_count},
            "degraded": dict(self.supervisor.degraded),
            "staging": self.staging.status(),
            "checkpoints": [service.status() for service in self.checkpoints],
        }

    async def run(self, stop: Stop) -> int:
        """Until told to stop, then drained. Returns the exit code: 0 if everything complete is published, else 3."""
        async with asyncio.TaskGroup() as group:
            supervision = group.create_task(self.supervisor.run())
            asked = group.create_task(stop.asked.wait())
            await asyncio.wait([supervision, asked], return_when=asyncio.FIRST_COMPLETED)
            if supervision.done():
                asked.cancel()
                supervision.result()
            code = await self._drain(stop)
            supervision.cancel()
        return code

    def _waiting_for(self) -> list[str]:
        waiting = sorted(self.supervisor.waiting_for)
        return waiting if self._state == "running" else [self._state, *waiting]

    async def _drain(self, stop: Stop) -> int:
        self._state = "draining"
        self.supervisor.stop(self.staging.name)
        try:
            async with asyncio.timeout(self._config.node.drain_timeout_s), asyncio.TaskGroup() as group:
                aborting = group.create_task(_raise_when(stop.abort))
                reporting = group.create_task(self._report_drain())
                draining = [group.create_task(service.drain()) for service in self.checkpoints]
                if draining:
                    await asyncio.wait(draining)
                aborting.cancel()
                reporting.cancel()
        except (TimeoutError, BaseExceptionGroup) as error:
            if isinstance(error, BaseExceptionGroup) and error.subgroup(_Aborted) is None:
                raise
            reason = "time is up" if isinstance(error, TimeoutError) else "told to abort"
            event(log, logging.WARNING, "drain.cut_short", reason=reason)
        left = [name for service in self.checkpoints for name in service.unpublished()]
        event(log, logging.INFO if not left else logging.WARNING, "drain.ended", unpublished=",".join(left) or "none")
        return 3 if left else 0

    async def _report_drain(self) -> None:
        while True:
            left = [name for service in self.checkpoints for name in service.unpublished()]
            if left:
                event(log, logging.INFO, "drain.waiting", unpublished=",".join(left))
            await asyncio.sleep(DRAIN_REPORT_S)


class _Aborted(Exception):
    """The second signal came."""


class _Sealing:
    """Finds the run that watches a directory."""

    def __init__(self, services: Sequence[CheckpointService]) -> None:
        self._services = services

    async def seal(self, request: SealRequest) -> SealReply:
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


async def _raise_when(abort: asyncio.Event) -> None:
    await abort.wait()
    raise _Aborted


async def serve(config: Config) -> int:
    """Run the daemon of ``config`` in this process, until a signal; returns the exit code.

    Raises:
        LockHeld: Another daemon owns the cache or the socket.
        StagerError: A service failed for good.
    """
    disk, clock = LocalDisk(), SystemClock()
    chance = random.Random()
    stop = Stop()
    install(stop)
    async with AsyncExitStack() as stack:
        disk.make_directory(config.node.cache)
        holder = f"stager daemon, process {os.getpid()} on {socket.gethostname()}"
        stack.enter_context(disk.lock(CacheLayout(config.node.cache).lock, holder))
        offload = ThreadOffload()
        stack.callback(offload.close)
        journal = Journal(f"{config.node.cache}/journal.sqlite", disk)
        stack.callback(journal.close)
        tools = Tools(
            disk,
            offload,
            memory=ByteBudget(config.node.memory_bytes),
            random=chance,
        )
        stores = Stores(
            config.store,
            disk,
            offload,
            chance,
            upload=RateLimit(config.limits.upload),
            download=RateLimit(config.limits.download),
        )
        stack.push_async_callback(stores.aclose)
        event(log, logging.INFO, "daemon.started", version=__version__, cache=config.node.cache, process=os.getpid())
        try:
            checkpoints = await make_checkpoint_services(config, stores, tools, journal, clock)
            return await Daemon(config, stores, tools, clock, checkpoints).run(stop)
        except BaseExceptionGroup as group:
            raise _first_error(group) from group


def run_daemon(config: Config) -> int:
    """`serve` on a loop of its own, uvloop's where it is there."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(serve(config))


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to tell: the first expected error, else the first of any kind."""
    found = group.subgroup(StagerError)
    error: BaseException = found if found is not None else group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


