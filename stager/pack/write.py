"""One shard from its files to its destination: read, hash and write in one pass, with a bounded number of buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from stager.checksum import Hasher
from stager.errors import StagerError
from stager.formats.manifest import ShardEntry
from stager.offload import Offload
from stager.pack.destination import Destination
from stager.pack.findings import Policies, shown_path
from stager.pack.plan import ShardPlan
from stager.pack.records import ShardRecord
from stager.pack.sinks import Sink
from stager.pack.stream import SampleFailed, ShardStream


class Stopped(StagerError):
    """The pack was told to stop; what was not finished is written anew by the next one."""

    exit_code = 130


@dataclass(slots=True)
class Meter:
    """What was written so far, for the progress bar, and whether to go on.

    Attributes:
        samples: Given whole to a sink.
        bytes: Given to a sink.
        stop: Set when the pack is to end early.
    """

    samples: int = 0
    bytes: int = 0
    stop: bool = False

    def add(self, samples: int, size: int) -> None:
        self.samples += samples
        self.bytes += size

    @property
    def stopped(self) -> bool:
        return self.stop


@dataclass(frozen=True, slots=True)
class Tools:
    """What writing a shard needs besides the shard."""

    destination: Destination
    offload: Offload
    policies: Policies
    add: Callable[[int, int], None]
    stopped: Callable[[], bool]
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


async def write_shard(plan: ShardPlan, tools: Tools) -> ShardRecord:
    """Write a shard and return its record; the record itself is not written.

    A sample that fails is left out, and the shard begun anew, if the policy is to skip; so is every later failure.

    Raises:
        SampleFailed: A file is not what was planned or cannot be read, and the policy is to fail, or no sample is left.
    """
    skipped: list[str] = []
    failed: frozenset[str] = frozenset()
    while True:
        attempt = plan.without(failed) if failed else plan
        try:
            entry = await _attempt(attempt, tools)
        except SampleFailed as error:
            failed |= {error.key}
            if tools.policies.on_error == "fail" or len(failed) >= len(plan.samples):
                raise
            skipped.append(f"{shown_path(error.path)}: {error.reason}")
            continue
        return ShardRecord(plan.fingerprint, entry, tuple(sorted(attempt.fields)), tuple(skipped))


async def _attempt(plan: ShardPlan, tools: Tools) -> ShardEntry:
    sink = tools.destination.sink(plan)
    stream = ShardStream(plan)
    hasher = Hasher()
    progress = _Progress(tools.add)
    try:
        await sink.begin(plan.size)
        # One shard is read at a time, and another is synced meanwhile: two readers would only wait for each other.
        async with tools.reading:
            await _pour(stream, sink, hasher, plan.size, progress, tools)
        if hasher.size != plan.size:
            raise StagerError(f"`{plan.name}` has {hasher.size} bytes where {plan.size} were planned")
        digest = hasher.digest()
        await sink.commit(plan.size, digest)
    except BaseException:
        progress.take_back()
        stream.close()
        await sink.abandon()
        raise
    return ShardEntry(plan.name, plan.size, len(plan.samples), digest)


class _Progress:
    """What one attempt added to the meter, so that a failed one can be taken back."""

    def __init__(self, add: Callable[[int, int], None]) -> None:
        self._add = add
        self._samples = 0
        self._bytes = 0

    def reached(self, samples: int, size: int) -> None:
        self._add(samples - self._samples, size - self._bytes)
        self._samples, self._bytes = samples, size

    def take_back(self) -> None:
        self.reached(0, 0)


async def _pour(
    stream: ShardStream, sink: Sink, hasher: Hasher, size: int, progress: _Progress, tools: Tools
) -> None:
    """Move the stream into the sink: one buffer is filled, another hashed, and others are written at the same time."""
    chunk_bytes = min(sink.chunk_bytes, size)
    free: asyncio.Queue[bytearray] = asyncio.Queue()
    for _ in range(min(sink.chunks_in_flight + 2, -(-size // chunk_bytes))):
        free.put_nowait(bytearray(chunk_bytes))
    failures: list[Exception] = []

    async def put(number: int, buffer: bytearray, count: int, hashing: asyncio.Task[None]) -> None:
        try:
            await sink.put(number, memoryview(buffer)[:count])
        except Exception as error:  # handed to the loop below, which raises it
            failures.append(error)
        await hashing
        free.put_nowait(buffer)

    async with asyncio.TaskGroup() as group:
        number, count = 0, chunk_bytes
        hashing: asyncio.Task[None] | None = None
        while count == chunk_bytes and not failures:
            buffer = await free.get()
            if tools.stopped():
                failures.append(Stopped("the pack was stopped", hint="run the same command again to go on"))
                break
            try:
                count = await tools.offload.run("disk", stream.fill, memoryview(buffer))
            except SampleFailed as error:
                failures.append(error)
                break
            if hashing is not None:
                await hashing
            if count and not failures:
                filled = memoryview(buffer)[:count]
                hashing = group.create_task(tools.offload.run("hash", hasher.update, filled))
                group.create_task(put(number, buffer, count, hashing))
            progress.reached(stream.samples_done, number * chunk_bytes + count)
            number += 1
    if failures:
        raise failures[0]
