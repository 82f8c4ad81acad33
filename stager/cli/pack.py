"""`stager pack`: a tree of small files into WebDataset shards and a manifest."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stager.cli.output import command, console, print_json, talk

if TYPE_CHECKING:
    from stager.pack.findings import Findings
    from stager.pack.opening import DestinationOpener
    from stager.pack.run import PackSummary
    from stager.pack.survey import PackInput, Survey
    from stager.store.s3_settings import S3Settings

PARTIAL = 3
WORKERS_MAX = 256
SMALL_BYTES = 256_000_000
FIELDS_SHOWN = 12


def register(app: typer.Typer) -> None:
    app.command("pack")(pack)


@command
def pack(
    sources: Annotated[
        list[str], typer.Argument(metavar="SRC...", help="Directories of files called key.field.")
    ],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A directory, or s3://bucket/prefix.")],
    name: Annotated[str, typer.Option(help="Shards are called NAME-000000.tar.")] = "shard",
    max_bytes: Annotated[str, typer.Option(help="Largest shard file.")] = "256MB",
    max_samples: Annotated[int | None, typer.Option(min=1, help="Most samples in a shard.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=WORKERS_MAX,
            help="Processes; by default as many as cores, at most 4, and one for little input.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Shuffle all samples, the same way for the same seed.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Only files whose name matches, e.g. '*.jpg'.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave out files and folders by name.")] = None,
    on_unkeyable: Annotated[
        Literal["fail", "skip"], typer.Option(help="Files whose name makes no sample.")
    ] = "fail",
    on_error: Annotated[
        Literal["fail", "skip"], typer.Option(help="Files that cannot be read; with skip the exit code is 3.")
    ] = "fail",
    symlinks: Annotated[
        Literal["inside", "follow", "skip"], typer.Option(help="Which symbolic links are packed as files.")
    ] = "inside",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Keep the finished shards of a pack that was killed.")
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Pack into DEST although it holds something else.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look at everything, say what would be done, write nothing.")
    ] = False,
    config: Annotated[
        str,
        typer.Option("--config", "-c", metavar="FILE", help="How buckets are reached: its store section."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> int:
    """Pack small files into WebDataset shards, reproducibly; killed, it goes on where it was."""
    from stager.errors import UsageError
    from stager.pack.findings import Kind, Policies
    from stager.pack.opening import DestinationOpener
    from stager.pack.plan import Limits
    from stager.pack.survey import take_input
    from stager.store.registry import parse_url
    from stager.units import parse_size

    try:
        limits = Limits(parse_size(max_bytes), max_samples)
    except ValueError as error:
        raise UsageError(f"--max-bytes: {error}", subject="--max-bytes") from None
    policies = Policies(on_error, on_unkeyable, symlinks, tuple(include or ()), tuple(exclude or ()))
    url = parse_url(destination, base=os.getcwd())
    local = url.bucket if url.scheme == "file" else None
    given = take_input(sources, local, name=name, limits=limits, policies=policies, seed=seed)
    opener = DestinationOpener(url, _settings(config) if local is None else None)
    shown = local or str(url)
    if dry_run:
        return _dry_run(given, shown, as_json=as_json)
    try:
        done = asyncio.run(_pack(given, opener, workers, resume=resume, overwrite=overwrite))
    except KeyboardInterrupt:
        talk().print("interrupted: run the same command again to go on; finished shards are kept")
        raise
    _tell(done, shown, as_json=as_json)
    unread = done.summary.skipped or done.summary.survey.findings.counts[Kind.UNREADABLE]
    return PARTIAL if unread else 0


def _settings(config: str) -> S3Settings:
    from stager.config import load_store_section
    from stager.sidecar.stores import s3_settings

    return s3_settings(load_store_section(config or None))


@dataclass(frozen=True, slots=True)
class _Done:
    summary: PackSummary
    seconds: float


async def _pack(
    given: PackInput, opener: DestinationOpener, workers: int | None, *, resume: bool, overwrite: bool
) -> _Done:
    from stager.cli.progress import pack_progress
    from stager.offload import ThreadOffload
    from stager.pack import run
    from stager.pack.workers import LocalWriter, ProcessWriter, ShardWriter

    loop = asyncio.get_running_loop()
    began = loop.time()
    offload = ThreadOffload()
    target = await opener(offload)

    def make_writer(surveyed: Survey) -> ShardWriter:
        # Processes take a second to start: too long for what one has packed in as much.
        small = surveyed.size < SMALL_BYTES if workers is None else workers == 1
        if small:
            return LocalWriter(target, given.policies, offload=offload)
        return ProcessWriter(opener, given.policies, workers=workers or min(4, os.cpu_count() or 1))

    try:
        with pack_progress(loop.time) as progress:
            summary = await run.pack(
                given,
                target,
                make_writer,
                offload=offload,
                holder=f"stager pack, process {os.getpid()} on {socket.gethostname()}",
                resume=resume,
                overwrite=overwrite,
                progress=progress,
            )
    finally:
        await target.aclose()
        offload.close()
    return _Done(summary, loop.time() - began)


def _dry_run(given: PackInput, destination: str, *, as_json: bool) -> int:
    from stager.pack.survey import survey

    surveyed = survey(given)
    if as_json:
        print_json({"destination": destination, "dry_run": True, **_survey_json(surveyed)})
        return 0
    _tell_survey(surveyed, f"would pack into {destination}:")
    return 0


def _tell(done: _Done, destination: str, *, as_json: bool) -> None:
    summary = done.summary
    if as_json:
        print_json(
            {
                "destination": destination,
                **_survey_json(summary.survey),
                "samples": summary.manifest.samples,
                "bytes": summary.manifest.size,
                "fingerprint": summary.manifest.fingerprint,
                "shards_written": summary.shards_written,
                "shards_kept": summary.shards_kept,
                "complete_before": summary.complete_before,
                "input_changed": summary.input_changed,
                "skipped": list(summary.skipped),
                "seconds": round(done.seconds, 3),
            }
        )
        return
    if summary.complete_before:
        console().print(f"{destination} already holds exactly this dataset: nothing to do", markup=False)
        return
    _tell_survey(summary.survey, f"packed into {destination} in {done.seconds:.1f} s:")
    out = console()
    if summary.shards_kept:
        out.print(
            f"  {summary.shards_kept} shards were finished before, {summary.shards_written} written now"
        )
    if summary.input_changed:
        out.print("  the input or the options had changed since the pack that was killed")
    for reason in summary.skipped:
        out.print(f"  left out: {reason}", markup=False)
    out.print(f"  fingerprint {summary.manifest.fingerprint}")


def _tell_survey(surveyed: Survey, headline: str) -> None:
    from stager.units import format_size

    out = console()
    out.print(headline, markup=False)
    out.print(
        f"  {surveyed.samples} samples of {surveyed.files} files, {format_size(surveyed.content_bytes)},"
        f" in {surveyed.shards} shards, {format_size(surveyed.size)}"
    )
    shown = [
        f"{name} {count}"
        for name, count in sorted(surveyed.fields.items(), key=lambda item: (-item[1], item[0]))
    ]
    more = f", and {len(shown) - FIELDS_SHOWN} more" if len(shown) > FIELDS_SHOWN else ""
    out.print(f"  fields: {', '.join(shown[:FIELDS_SHOWN])}{more}", markup=False)
    _tell_findings(surveyed.findings)


def _tell_findings(findings: Findings) -> None:
    from stager.pack.findings import Kind

    out = console()
    for kind, count in sorted(findings.counts.items()):
        word = "warning" if kind is Kind.DOTTED else "left out"
        out.print(f"  {word}: {count} × {kind}, e.g. {findings.examples[kind][0]}", markup=False)


def _survey_json(surveyed: Survey) -> dict[str, Any]:
    return {
        "samples": surveyed.samples,
        "files": surveyed.files,
        "shards": surveyed.shards,
        "bytes": surveyed.size,
        "content_bytes": surveyed.content_bytes,
        "largest_sample": {"key": surveyed.largest[0], "bytes": surveyed.largest[1]},
        "fields": surveyed.fields,
        "plan": surveyed.fingerprint,
        "left_out": surveyed.findings.left_out,
        "examples": {str(kind): shown for kind, shown in sorted(surveyed.findings.examples.items())},
    }
