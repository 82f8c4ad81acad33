"""A pack from survey to manifest: resumed where a killed one ended, and visible only when it is whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import stager
from stager.errors import FormatError, UsageError
from stager.formats.manifest import (
    MANIFEST_NAME,
    DatasetManifest,
    decode_dataset_manifest,
    encode_dataset_manifest,
)
from stager.logs import event
from stager.offload import Offload
from stager.pack.destination import PLAN_KEY, Destination, record_key
from stager.pack.plan import ShardPlan
from stager.pack.records import (
    PlanRecord,
    ShardRecord,
    decode_plan,
    decode_record,
    encode_plan,
    encode_record,
)
from stager.pack.survey import PackInput, Survey, survey
from stager.pack.workers import ShardWriter

PROGRESS_INTERVAL_S = 0.2

T = TypeVar("T")

logger = logging.getLogger("stager.pack")


@dataclass(frozen=True, slots=True)
class PackProgress:
    """How far a pack is. In the phase ``survey`` totals are what was found so far.

    Attributes:
        phase: What is being done.
        samples, samples_total: Written, and to be written; those of shards kept from an earlier pack count as written.
        bytes, bytes_total: The same, of shards.
        shards, shards_total: The same, whole ones.
        kept_bytes: Of ``bytes``, those of shards that an earlier pack wrote.
    """

    phase: Literal["survey", "pack"]
    samples: int = 0
    samples_total: int = 0
    bytes: int = 0
    bytes_total: int = 0
    shards: int = 0
    shards_total: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PackSummary:
    """What a pack did.

    Attributes:
        manifest: Of the dataset, as it stands in the destination.
        survey: What there was to be packed.
        shards_written: Written by this pack.
        shards_kept: Found finished.
        input_changed: Whether an earlier, unfinished pack had been of other input or options.
        complete_before: Whether there was nothing to do.
        skipped: ``path: reason`` of samples that could not be read and were left out.
    """

    manifest: DatasetManifest
    survey: Survey
    shards_written: int = 0
    shards_kept: int = 0
    input_changed: bool = False
    complete_before: bool = False
    skipped: tuple[str, ...] = ()


@dataclass(slots=True)
class _State:
    """What a running pack has come to know."""

    surveyed: Survey
    recorded: set[str] = field(default_factory=set)
    records: dict[str, ShardRecord] = field(default_factory=dict)
    kept: int = 0
    kept_samples: int = 0
    kept_bytes: int = 0
    failure: Exception | None = None


async def pack(
    given: PackInput,
    destination: Destination,
    make_writer: Callable[[Survey], ShardWriter],
    *,
    offload: Offload,
    holder: str,
    resume: bool = True,
    overwrite: bool = False,
    progress: Callable[[PackProgress], None] = lambda progress: None,
) -> PackSummary:
    """Pack ``given`` into ``destination``.

    Args:
        given: From `take_input`.
        destination: Where shards and manifest go.
        make_writer: Called once it is known what there is to write; gives what writes shards into the same
            destination, and is closed here.
        offload: Where blocking calls run.
        holder: Who this is, for whoever finds the destination locked.
        resume: Whether finished shards of an earlier pack of the same input are kept.
        overwrite: Whether a destination that holds something else may be written to.
        progress: Called several times a second.

    Raises:
        UsageError: The input has problems, or the destination holds something else; nothing was written.
        SampleFailed: A file changed or could not be read on the way. The same call again goes on from there.
        StagerError: The destination failed, likewise.
    """
    surveyed = await _survey(given, offload, progress)
    try:
        return await _pack(
            given,
            surveyed,
            destination,
            make_writer,
            offload=offload,
            holder=holder,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
    finally:
        surveyed.listing.close()


async def _pack(
    given: PackInput,
    surveyed: Survey,
    destination: Destination,
    make_writer: Callable[[Survey], ShardWriter],
    *,
    offload: Offload,
    holder: str,
    resume: bool,
    overwrite: bool,
    progress: Callable[[PackProgress], None],
) -> PackSummary:
    # Looked at before the lock too, so that a refused destination is left without a trace.
    await _look(destination, surveyed, resume=resume, overwrite=overwrite)
    async with destination.held(holder):
        found = await _look(destination, surveyed, resume=resume, overwrite=overwrite)
        if found.complete is not None:
            await destination.clear_leftovers()
            await destination.forget_progress()
            return PackSummary(
                found.complete, surveyed, shards_kept=len(found.complete.shards), complete_before=True
            )
        record = await _begin(given, destination, found, surveyed, resume=resume)
        state = _State(surveyed)
        if resume:
            state.recorded = await destination.recorded()
        writer = make_writer(surveyed)
        try:
            work = _write_shards(given, state, destination, writer, offload)
            await _with_reports(work, lambda: progress(_progress(state, writer)))
            progress(_progress(state, writer))
        finally:
            await writer.aclose()
        manifest = await _finish(given, state, destination, stale=record.stale)
        return PackSummary(
            manifest,
            surveyed,
            shards_written=len(state.records) - state.kept,
            shards_kept=state.kept,
            input_changed=found.under_way is not None and found.under_way.plan != surveyed.fingerprint,
            skipped=tuple(reason for record in _in_order(state) for reason in record.skipped),
        )


async def _survey(given: PackInput, offload: Offload, progress: Callable[[PackProgress], None]) -> Survey:
    found = PackProgress("survey")

    def seen(samples: int, size: int) -> None:
        nonlocal found
        found = PackProgress("survey", samples_total=samples, bytes_total=size)

    return await _with_reports(offload.run("disk", survey, given, seen=seen), lambda: progress(found))


@dataclass(frozen=True, slots=True)
class _Found:
    """What lies in a destination that may be packed to.

    Attributes:
        complete: The dataset of this very plan.
        replaced: The names of another dataset's shards, or None if there is no other.
        under_way: A pack that did not come to its end.
    """

    complete: DatasetManifest | None = None
    replaced: tuple[str, ...] | None = None
    under_way: PlanRecord | None = None


async def _look(destination: Destination, surveyed: Survey, *, resume: bool, overwrite: bool) -> _Found:
    """What is there; UsageError if it may not be written to."""
    manifest = await _read_manifest(destination, overwrite=overwrite)
    if manifest is not None and resume and manifest.provenance.get("plan") == surveyed.fingerprint:
        return _Found(complete=manifest)
    if manifest is not None and not overwrite:
        raise UsageError(
            f"{destination.name} already holds a dataset of {manifest.samples} samples, of other input or options",
            subject=destination.name,
            hint="name another destination, or replace that dataset with --overwrite",
        )
    raw = await destination.read(PLAN_KEY)
    under_way = None if raw is None else decode_plan(raw, of=f"{destination.name}/{PLAN_KEY}")
    found = None if overwrite or under_way is not None else await destination.first_key()
    if found is not None:
        raise UsageError(
            f"{destination.name} already holds something else, e.g. `{found}`",
            subject=destination.name,
            hint="name an empty destination, or pack beside what is there with --overwrite",
        )
    replaced = None if manifest is None else tuple(shard.name for shard in manifest.shards)
    return _Found(replaced=replaced, under_way=under_way)


async def _read_manifest(destination: Destination, *, overwrite: bool) -> DatasetManifest | None:
    raw = await destination.read(MANIFEST_NAME)
    if raw is None:
        return None
    try:
        return decode_dataset_manifest(raw, of=f"{destination.name}/{MANIFEST_NAME}")
    except FormatError:
        if overwrite:
            return DatasetManifest(())
        raise


async def _begin(
    given: PackInput, destination: Destination, found: _Found, surveyed: Survey, *, resume: bool
) -> PlanRecord:
    """Take the destination for this plan."""
    stale = {*(found.replaced or ())}
    if found.under_way is not None:
        # Of a pack that was killed, any shard may be there, also one without a record.
        stale |= {*found.under_way.stale, *found.under_way.shard_names()}
    if not resume:
        await destination.delete([record_key(name) for name in await destination.recorded()])
    record = PlanRecord(surveyed.fingerprint, given.name, surveyed.shards, tuple(sorted(stale)))
    await destination.write(PLAN_KEY, encode_plan(record))
    if found.replaced is not None:
        # A manifest names only what is there: it goes before the first of its shards is replaced.
        await destination.delete([MANIFEST_NAME])
    await destination.clear_leftovers()
    return record


async def _write_shards(
    given: PackInput, state: _State, destination: Destination, writer: ShardWriter, offload: Offload
) -> None:
    shards = state.surveyed.plans(given.name)
    slots = asyncio.Semaphore(writer.width)
    try:
        async with asyncio.TaskGroup() as group:
            while (plan := await _next_shard(shards, state, slots, offload)) is not None:
                group.create_task(_one_shard(plan, state, destination, writer, slots))
    except BaseException:
        writer.stop()
        raise
    if state.failure is not None:
        raise state.failure


async def _next_shard(
    shards: Iterator[ShardPlan], state: _State, slots: asyncio.Semaphore, offload: Offload
) -> ShardPlan | None:
    """The next shard once there is somebody to write it; None at the end, or after a failure."""
    await slots.acquire()
    if state.failure is not None:
        return None
    try:
        return await offload.run("disk", _next, shards)
    except Exception as error:  # raised by _write_shards, once the shards that are being written have ended
        state.failure = error
        return None


async def _one_shard(
    plan: ShardPlan, state: _State, destination: Destination, writer: ShardWriter, slots: asyncio.Semaphore
) -> None:
    try:
        record = await _kept_record(plan, state, destination)
        if record is not None:
            state.kept += 1
            state.kept_samples += record.entry.samples
            state.kept_bytes += record.entry.size
        else:
            record = await writer.write(plan)
            await destination.write(record_key(plan.name), encode_record(record))
            event(logger, logging.DEBUG, "shard.written", shard=plan.name, bytes=record.entry.size)
        state.records[plan.name] = record
    except Exception as error:  # raised by _write_shards, once the others have ended: what they wrote is kept
        if state.failure is None:
            state.failure = error
    finally:
        slots.release()


async def _kept_record(plan: ShardPlan, state: _State, destination: Destination) -> ShardRecord | None:
    """The record of an earlier pack, if it is of this very plan and its shard is there."""
    if plan.name not in state.recorded:
        return None
    key = record_key(plan.name)
    raw = await destination.read(key)
    if raw is None:
        return None
    try:
        record = decode_record(raw, of=f"{destination.name}/{key}")
    except FormatError:
        event(logger, logging.WARNING, "record.unusable", shard=plan.name)
        return None
    if record.plan != plan.fingerprint or record.entry.name != plan.name:
        return None
    return record if await destination.size(plan.name) == record.entry.size else None


async def _finish(
    given: PackInput, state: _State, destination: Destination, *, stale: tuple[str, ...]
) -> DatasetManifest:
    records = _in_order(state)
    limits = given.limits
    manifest = DatasetManifest(
        shards=tuple(record.entry for record in records),
        fields=tuple(sorted({name for record in records for name in record.fields})),
        provenance={
            "packer": f"stager {stager.__version__}",
            "plan": state.surveyed.fingerprint,
            "seed": given.seed,
            "shard_bytes_max": limits.shard_bytes_max,
            "shard_samples_max": limits.shard_samples_max,
            "left_out": state.surveyed.findings.left_out,
            "unreadable_samples": sum(len(record.skipped) for record in records),
        },
    )
    await destination.write(MANIFEST_NAME, encode_dataset_manifest(manifest))
    written = {entry.name for entry in manifest.shards}
    await destination.delete([name for name in stale if name not in written])
    await destination.clear_leftovers()
    await destination.forget_progress()
    event(
        logger,
        logging.INFO,
        "dataset.packed",
        dataset=destination.name,
        samples=manifest.samples,
        bytes=manifest.size,
    )
    return manifest


def _in_order(state: _State) -> list[ShardRecord]:
    return [state.records[name] for name in sorted(state.records, key=lambda name: (len(name), name))]


def _next(shards: Iterator[ShardPlan]) -> ShardPlan | None:
    return next(shards, None)


def _progress(state: _State, writer: ShardWriter) -> PackProgress:
    samples, size = writer.done()
    return PackProgress(
        "pack",
        samples=samples + state.kept_samples,
        samples_total=state.surveyed.samples,
        bytes=size + state.kept_bytes,
        bytes_total=state.surveyed.size,
        shards=len(state.records),
        shards_total=state.surveyed.shards,
        kept_bytes=state.kept_bytes,
    )


async def _with_reports(work: Coroutine[Any, Any, T], report: Callable[[], None]) -> T:
    """The result of ``work``, with ``report`` called now and then while it runs."""
    failure: Exception | None = None

    async def tick() -> None:
        while True:
            report()
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    async with asyncio.TaskGroup() as group:
        ticker = group.create_task(tick())
        try:
            result = await work
        except Exception as error:  # raised below: out of the group it would come wrapped
            failure = error
        finally:
            ticker.cancel()
    if failure is not None:
        raise failure
    return result
