"""The daemon, put together: the only place that builds concrete objects."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TypeVar

from stager import __version__
from stager.budget import ByteBudget, RateLimit
from stager.cache.layout import CacheLayout
from stager.cache.shards import ShardCache
from stager.clock import Clock, SystemClock
from stager.config import Config
from stager.disk import Disk, LocalDisk
from stager.errors import ConfigError, StagerError
from stager.journal import Journal
from stager.logs import event
from stager.offload import ThreadOffload
from stager.prefetch.service import StagingOptions, StagingService
from stager.service import Supervisor
from stager.sidecar.access import AccessService, entrances
from stager.sidecar.control import ControlRoutes, ControlService
from stager.sidecar.daemon import CheckpointService, Daemon, Sealing
from stager.sidecar.heartbeat import HeartbeatService
from stager.sidecar.metrics import make_metrics
from stager.sidecar.runs import make_checkpoint_services
from stager.sidecar.signals import Stop, install
from stager.sidecar.status import StatusSources
from stager.sidecar.stores import Stores
from stager.transfer.download import DownloadOptions
from stager.transfer.tools import Tools

log = logging.getLogger("stager.sidecar")

R = TypeVar("R")


def run_daemon(config: Config) -> int:
    """`serve` on a loop of its own, uvloop's where it is there."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(serve(config))


async def serve(config: Config) -> int:
    """Run the daemon of ``config`` in this process, until a signal; returns the exit code.

    Raises:
        LockHeld: Another daemon owns the cache or the socket.
        StagerError: A service failed for good.
    """
    stop = Stop()
    install(stop)
    disk, clock, chance = LocalDisk(), SystemClock(), random.Random()
    async with AsyncExitStack() as stack:
        _make_directories(config, disk)
        holder = f"stager daemon, process {os.getpid()} on {socket.gethostname()}"
        stack.enter_context(disk.lock(CacheLayout(config.node.cache).lock, holder))
        journal = Journal(f"{config.node.cache}/journal.sqlite", disk)
        stack.callback(journal.close)
        offload = ThreadOffload()
        stack.callback(offload.close)
        tools = Tools(disk, offload, memory=ByteBudget(config.node.memory_bytes), random=chance)
        limits = config.limits
        upload, download = RateLimit(limits.upload), RateLimit(limits.download)
        stores = Stores(config.store, disk, offload, chance, upload=upload, download=download)
        stack.push_async_callback(stores.aclose)
        event(
            log,
            logging.INFO,
            "daemon.started",
            version=__version__,
            cache=config.node.cache,
            process=os.getpid(),
        )
        try:
            checkpoints = await _unless(stop, make_checkpoint_services(config, stores, tools, journal, clock))
            if checkpoints is None:
                return 0
            return await make_daemon(config, stores, tools, clock, stop, checkpoints).run()
        except BaseExceptionGroup as group:
            raise _first_error(group) from group


def _make_directories(config: Config, disk: Disk) -> None:
    """ConfigError with every directory of the configuration that cannot be made."""
    wanted = {"node.cache": config.node.cache, "node.socket": os.path.dirname(config.node.socket)}
    wanted |= {f"checkpoint[{n}].watch": section.watch for n, section in enumerate(config.checkpoint)}
    problems = []
    for place, path in wanted.items():
        try:
            disk.make_directory(path)
            disk.list_names(path)
        except OSError as error:
            reason = "exists and is no directory" if isinstance(error, FileExistsError) else error.strerror
            problems.append(f"  {place}: `{path}` {reason}")
        except StagerError as error:
            problems.append(f"  {place}: {error.message}")
    if problems:
        raise ConfigError(
            "\n".join(["the directories of the configuration cannot be used:", *problems]),
            subject="configuration",
            hint="name directories that the user of the daemon may write into",
        )


def make_daemon(
    config: Config,
    stores: Stores,
    tools: Tools,
    clock: Clock,
    stop: Stop,
    checkpoints: Sequence[CheckpointService],
) -> Daemon:
    """Services, supervisor and control API of a configuration."""
    node = config.node
    staging = StagingService(
        ShardCache(node.cache, node.cache_bytes, tools),
        stores.open,
        sources=[section.source for section in config.dataset],
        options=StagingOptions(node.concurrent_shards, DownloadOptions(concurrency=node.concurrent_parts)),
    )
    access = AccessService(entrances(config), stores.open, tools.random)
    heartbeat = HeartbeatService()
    supervisor = Supervisor([heartbeat, access, staging, *checkpoints])
    facts = StatusSources(
        node=node,
        clock=clock,
        started_ns=clock.wall_ns(),
        stop=stop,
        supervisor=supervisor,
        staging=staging,
        checkpoints=checkpoints,
        access=access,
        heartbeat=heartbeat,
        meter=stores.meter,
    )
    routes = ControlRoutes(
        staging, Sealing(checkpoints), facts.document, facts.waiting_for, make_metrics(facts.document)
    )
    supervisor.add(ControlService(node.socket, routes, tools.disk))
    return Daemon(
        supervisor,
        checkpoints,
        stop,
        ends_with_draining=(staging.name, access.name),
        drain_timeout_s=node.drain_timeout_s,
    )


async def _unless(stop: Stop, work: Awaitable[R]) -> R | None:
    """The result of ``work``, or None if told to stop before it is there."""

    async def run() -> R:
        return await work

    async with asyncio.TaskGroup() as group:
        working = group.create_task(run())
        asked = group.create_task(stop.asked.wait())
        await asyncio.wait([working, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        working.cancel()
    return None if working.cancelled() else working.result()


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to tell: the first expected error, else the first of any kind."""
    found = group.subgroup(StagerError)
    error: BaseException = found if found is not None else group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
