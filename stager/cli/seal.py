"""`stager seal`: take a directory as a complete checkpoint now."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stager.cli.output import command, console, print_json
from stager.errors import DeadlineExceeded, UsageError

if TYPE_CHECKING:
    from stager.cli.session import Session


def register(app: typer.Typer) -> None:
    app.command("seal")(seal)


@command
def seal(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The checkpoint's directory or file.")],
    run_url: Annotated[
        str,
        typer.Option("--run", metavar="RUN_URL", help="Upload to this run here and now, without a daemon."),
    ] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Until the daemon has committed it.")] = False,
    deadline_s: Annotated[float, typer.Option("--deadline", metavar="SECONDS", min=1)] = 3600.0,
    socket: Annotated[str, typer.Option("--socket", metavar="PATH", help="The daemon's socket.")] = "",
    config: Annotated[
        str,
        typer.Option(
            "--config", "-c", metavar="FILE", help="With --run: how buckets are reached, its store section."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Make a checkpoint safe from the trainer's rotation, and upload it. No marker is needed: this is one."""
    path = os.path.abspath(directory)
    if not os.path.exists(path):
        raise UsageError(f"there is no `{path}`", subject=path, hint="name the checkpoint's directory")
    said = _here(path, run_url, deadline_s, config) if run_url else _by_daemon(path, socket, wait, deadline_s)
    if as_json:
        print_json(said)
    else:
        console().print(f"{said['checkpoint']}: {said['state']}", markup=False)


def _by_daemon(path: str, socket: str, wait: bool, deadline_s: float) -> Mapping[str, Any]:
    from stager.client.api import Client
    from stager.client.sockets import find_socket

    found = find_socket(socket or None)
    if found is None:
        raise UsageError(
            "no daemon is known on this node",
            subject="socket",
            hint="start `stager run`, name its socket with --socket, or upload from here with --run RUN_URL",
        )
    reply = Client(found).seal(path, wait=wait, deadline_s=deadline_s)
    return {"checkpoint": reply.checkpoint, "state": reply.state}


def _here(path: str, run_url: str, deadline_s: float, config: str) -> Mapping[str, Any]:
    from stager.checkpoint.once import seal_once
    from stager.cli.byte_progress import byte_progress
    from stager.cli.session import run_in_session
    from stager.formats.commits import CheckpointManifest

    async def work(session: Session) -> CheckpointManifest:
        store = await session.open(run_url)
        try:
            async with asyncio.timeout(deadline_s):
                with byte_progress(f"uploading {os.path.basename(path)}", _size_of(path)) as progress:
                    return await seal_once(
                        store, path, session.tools, session.clock, progress=progress.advance
                    )
        except TimeoutError:
            raise DeadlineExceeded(
                f"`{path}` was not committed to `{run_url}` in {deadline_s:g} s",
                subject=path,
                hint="nothing is visible of it; a longer --deadline gives it more time",
            ) from None

    manifest = run_in_session(work, config=config)
    return {
        "checkpoint": manifest.checkpoint,
        "state": "committed",
        "step": manifest.step,
        "layout": manifest.layout,
        "bytes": manifest.size,
        "files": len(manifest.files),
    }


def _size_of(path: str) -> int:
    if os.path.isfile(path):
        return os.path.getsize(path)
    found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(os.path.getsize(file) for file in found if os.path.isfile(file))
