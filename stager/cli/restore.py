"""`stager restore`: a committed checkpoint into a new directory, verified, whole or not at all."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

import typer

from stager.cli.output import command, console, print_json, talk
from stager.errors import DeadlineExceeded, NotFound, UsageError

LOOK_AGAIN_S = 5.0


def register(app: typer.Typer) -> None:
    app.command("restore")(restore_checkpoint)


@command
def restore_checkpoint(
    run_url: Annotated[str, typer.Argument(metavar="RUN_URL", help="s3://bucket/runs/name, or a directory.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A directory that does not exist yet.")],
    step: Annotated[str, typer.Option("--step", metavar="N|latest", help="Which step.")] = "latest",
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Which checkpoint, by its name.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is committed.")] = False,
    wait_timeout_s: Annotated[
        float, typer.Option("--wait-timeout", metavar="SECONDS", min=1, help="At most so long.")
    ] = 3600.0,
    config: Annotated[
        str,
        typer.Option("--config", "-c", metavar="FILE", help="How buckets are reached: its store section."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Restore a checkpoint: every file verified, then the directory appears at once."""
    from stager.checkpoint.restore import choose, restore
    from stager.cli.byte_progress import byte_progress
    from stager.cli.session import Session, run_in_session
    from stager.formats.commits import CheckpointManifest
    from stager.units import format_size

    number = _step_number(step)
    if name and number is not None:
        raise UsageError(
            "--step and --name are given, and one of them says which", subject="--name", hint="give one"
        )
    target = os.path.abspath(dest)

    async def choose_waiting(session: Session) -> CheckpointManifest:
        store = await session.open(run_url)
        try:
            async with asyncio.timeout(wait_timeout_s if wait else None):
                while True:
                    try:
                        return await choose(store, step=number, name=name or None)
                    except NotFound:
                        if not wait:
                            raise
                        await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"`{run_url}` had no such checkpoint for {wait_timeout_s:g} s",
                subject=run_url,
                hint="`stager ls` lists what is committed",
            ) from None

    async def work(session: Session) -> CheckpointManifest:
        manifest = await choose_waiting(session)
        title = f"restoring {manifest.checkpoint}"
        with byte_progress(title, manifest.size) as progress:
            await restore(
                await session.open(run_url), manifest, target, session.tools, progress=progress.advance
            )
        return manifest

    manifest = run_in_session(work, config=config)
    said: dict[str, Any] = {
        "checkpoint": manifest.checkpoint,
        "step": manifest.step,
        "bytes": manifest.size,
        "files": len(manifest.files),
        "directory": target,
        "cursor": None if manifest.cursor is None else dict(manifest.cursor),
    }
    if as_json:
        print_json(said)
    else:
        files = f"{len(manifest.files)} files, {format_size(manifest.size)}"
        console().print(f"restored {manifest.checkpoint} to {target}: {files}, all verified", markup=False)
        if manifest.cursor is not None:
            talk().print("its dataset position is in its .stager-commit.json", markup=False)


def _step_number(step: str) -> int | None:
    if step == "latest":
        return None
    if step.isascii() and step.isdigit():
        return int(step)
    raise UsageError(f"--step `{step}` is neither a number nor `latest`", subject="--step")
