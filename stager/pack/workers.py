"""Who writes the shards: this process, or several of their own, so that reading and hashing use every core.

A worker process dies with the pack: it watches its parent, so that no orphan goes on writing after a kill -9.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any, Protocol

from stager.errors import StagerError
from stager.offload import Offload, ThreadOffload
from stager.pack.destination import Destination
from stager.pack.findings import Policies
from stager.pack.plan import ShardPlan
from stager.pack.records import ShardRecord
from stager.pack.write import Meter, Tools, write_shard

OpenDestination = Callable[[Offload], Awaitable[Destination]]


class ShardWriter(Protocol):
    """Writes shards, several at a time."""

    @property
    def width(self) -> int:
        """How many shards are worth being asked for at a time."""
        ...

    async def write(self, plan: ShardPlan) -> ShardRecord:
        """As `stager.pack.write.write_shard`."""
        ...

    def done(self) -> tuple[int, int]:
        """Samples and bytes written so far, those of unfinished shards included."""
        ...

    def stop(self) -> None:
        """Make every `write` that still runs fail soon."""
        ...

    async def aclose(self) -> None:
        """Let go of what was started; nothing is being written afterwards."""
        ...


class LocalWriter:
    """This process; one shard is read while another is being synced."""

    width = 2

    def __init__(self, destination: Destination, policies: Policies, *, offload: Offload) -> None:
        self._meter = Meter()
        self._tools = Tools(destination, offload, policies, self._meter.add, lambda: self._meter.stopped)

    async def write(self, plan: ShardPlan) -> ShardRecord:
        return await write_shard(plan, self._tools)

    def done(self) -> tuple[int, int]:
        return self._meter.samples, self._meter.bytes

    def stop(self) -> None:
        self._meter.stop = True

    async def aclose(self) -> None:
        pass


class ProcessWriter:
    """``workers`` processes, one shard each at a time.

    Args:
        open_destination: Called once in each worker; it must survive pickling.
        policies: What is done with files that cannot be read.
        workers: How many processes.
    """

    def __init__(self, open_destination: OpenDestination, policies: Policies, *, workers: int) -> None:
        # A forked copy of a process with threads and an event loop may hang; the fork server is neither.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "stager.pack.opening"])
        _start_fork_server()
        # Samples, bytes, and whether to stop.
        self._meter = context.Array(ctypes.c_int64, 3)
        self.width = workers
        self._pool = ProcessPoolExecutor(
            workers,
            mp_context=context,
            initializer=_start,
            initargs=(open_destination, policies, self._meter),
        )

    async def write(self, plan: ShardPlan) -> ShardRecord:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, _write, plan)
        except BrokenProcessPool as error:
            raise StagerError(
                f"a pack worker died while `{plan.name}` was being written",
                subject=plan.name,
                hint="it may have been killed for want of memory: run the same command again with fewer --workers;"
                " finished shards are kept",
            ) from error

    def done(self) -> tuple[int, int]:
        with self._meter.get_lock():
            return self._meter[0], self._meter[1]

    def stop(self) -> None:
        with self._meter.get_lock():
            self._meter[2] = 1

    async def aclose(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _start_fork_server() -> None:
    """Start it deaf to Ctrl-C, which reaches the whole group: its children are then deaf from their first instruction."""
    if threading.current_thread() is not threading.main_thread():
        multiprocessing.forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


class _Worker:
    """What a worker process keeps between shards."""

    def __init__(
        self, open_destination: OpenDestination, policies: Policies, meter: SynchronizedArray[Any]
    ) -> None:
        self._meter = meter
        self._runner = asyncio.Runner()
        self._offload = ThreadOffload(disk_threads=4, hash_threads=2)
        self._destination = self._runner.run(self._open(open_destination))
        self._tools = Tools(self._destination, self._offload, policies, self._add, lambda: bool(meter[2]))

    def write(self, plan: ShardPlan) -> ShardRecord:
        return self._runner.run(write_shard(plan, self._tools))

    def close(self) -> None:
        with contextlib.suppress(StagerError):
            self._runner.run(self._destination.aclose())
        self._runner.close()

    async def _open(self, open_destination: OpenDestination) -> Destination:
        return await open_destination(self._offload)

    def _add(self, samples: int, size: int) -> None:
        with self._meter.get_lock():
            self._meter[0] += samples
            self._meter[1] += size


_worker: _Worker | None = None


def _start(open_destination: OpenDestination, policies: Policies, meter: SynchronizedArray[Any]) -> None:
    global _worker
    # The parent decides what Ctrl-C means, and says stop. (A fork server that somebody else started is not deaf.)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    _worker = _Worker(open_destination, policies, meter)
    multiprocessing.util.Finalize(None, _worker.close, exitpriority=10)


def _write(plan: ShardPlan) -> ShardRecord:
    assert _worker is not None
    return _worker.write(plan)


def _die_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
