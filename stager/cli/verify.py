"""`stager verify`: whether a dataset is what its manifest says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stager.cli.output import command, console, print_json

if TYPE_CHECKING:
    from stager.cli.session import Session
    from stager.pack.verify import Verdict

DAMAGED = 13


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)


@command
def verify(
    url: Annotated[
        str, typer.Argument(metavar="URL|DIR", help="A dataset: s3://bucket/prefix or a directory.")
    ],
    config: Annotated[
        str,
        typer.Option("--config", "-c", metavar="FILE", help="How buckets are reached: its store section."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> int:
    """Read every shard: sizes, digests, tar structure, samples. Exit code 13 names what is damaged."""
    from stager.cli.byte_progress import byte_progress
    from stager.cli.session import run_in_session
    from stager.pack.verify import read_manifest, verify_dataset

    async def work(session: Session) -> Verdict:
        store = await session.open(url)
        manifest = await read_manifest(store)
        with byte_progress("verifying", manifest.size) as progress:
            return await verify_dataset(store, manifest, offload=session.tools.offload, seen=progress.advance)

    verdict = run_in_session(work, config=config)
    if as_json:
        _print_json(url, verdict)
    else:
        _print_text(url, verdict)
    return DAMAGED if verdict.damaged else 0


def _print_json(url: str, verdict: Verdict) -> None:
    print_json(
        {
            "dataset": url,
            "ok": not verdict.damaged,
            "fingerprint": verdict.manifest.fingerprint,
            "shards": len(verdict.shards),
            "samples": verdict.manifest.samples,
            "bytes": verdict.manifest.size,
            "damaged": [{"shard": shard.name, "reasons": list(shard.damage)} for shard in verdict.damaged],
            "notes": [
                {"shard": shard.name, "notes": list(shard.notes)} for shard in verdict.shards if shard.notes
            ],
        }
    )


def _print_text(url: str, verdict: Verdict) -> None:
    from stager.units import format_size

    out = console()
    for shard in verdict.shards:
        for reason in shard.damage:
            out.print(f"damaged: {shard.name}: {reason}", style="red", markup=False)
        for note in shard.notes:
            out.print(f"note: {shard.name}: {note}", markup=False)
    manifest = verdict.manifest
    counted = f"{len(verdict.shards)} shards, {manifest.samples} samples, {format_size(manifest.size)}"
    if verdict.damaged:
        damaged = f"{len(verdict.damaged)} of {len(verdict.shards)} shards are damaged"
        out.print(f"{url}: {damaged}", style="bold red", markup=False)
        out.print("hint: pack or copy these shards again; readers refuse them", markup=False)
    else:
        out.print(f"{url}: {counted}: every byte is as the manifest says", markup=False)
