"""`stager status`: what this node's daemon is doing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stager.cli.output import command, console, print_json
from stager.units import format_duration, format_size

SocketOption = Annotated[str, typer.Option("--socket", metavar="PATH", help="The daemon's socket.")]
BAR_WIDTH = 30


def register(app: typer.Typer) -> None:
    app.command("status")(status)


@command
def status(
    socket: SocketOption = "",
    config: Annotated[
        str, typer.Option("--config", "-c", metavar="FILE", help="Ask the daemon of this configuration.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The whole document as JSON.")] = False,
    ready: Annotated[
        bool, typer.Option("--ready", help="Only tell whether it is ready: exit code 0 or 3.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Only tell whether it answers: exit code 0 or 12.")
    ] = False,
) -> int:
    """Show the daemon's datasets, readers and checkpoints. With --ready or --live, a probe for orchestrators."""
    from stager.client import Client
    from stager.client.sockets import find_socket
    from stager.errors import Unavailable, UsageError

    path = find_socket(socket or _configured_socket(config))
    if path is None:
        raise UsageError(
            "no daemon's socket is known",
            subject="--socket",
            hint="give --socket PATH or --config FILE, or set STAGER_SOCKET",
        )
    client = Client(path)
    if live:
        if not client.live():
            raise Unavailable(
                f"no daemon answers at `{path}`",
                subject=path,
                hint="start it with `stager run --config stager.toml`",
            )
        return 0
    if ready:
        is_ready, waiting_for = client.ready()
        if not is_ready:
            console().print("waiting for " + ", ".join(waiting_for), markup=False)
        return 0 if is_ready else 3
    document = client.status()
    if as_json:
        print_json(document)
    else:
        console().print(render(document))
    return 0


def _configured_socket(config: str) -> str | None:
    if not config:
        return None
    from stager.config import load_config

    return load_config(config).config.node.socket


def render(document: Mapping[str, Any]) -> RenderableType:
    """The status document for people."""
    parts: list[RenderableType] = [_head(document)]
    parts += [Text(f"degraded: {name}: {why}", "yellow") for name, why in document["degraded"].items()]
    parts.append(_staging(document["staging"]))
    parts += [_run(run) for run in document["checkpoints"]]
    return Group(*parts)


def _head(document: Mapping[str, Any]) -> Text:
    state = "ready" if document["ready"] else "waiting for " + ", ".join(document["waiting_for"])
    text = Text(f"stager {document['version']} on {document['host']}, process {document['process']}: ")
    text.append(state, "green" if document["ready"] else "yellow")
    return text.append(f", up {format_duration(document['uptime_s'])}")


def _staging(staging: Mapping[str, Any]) -> RenderableType:
    cache = staging["cache"]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row(
        "cache",
        _bar(cache["bytes"], cache["capacity_bytes"]),
        _of(cache["bytes"], cache["capacity_bytes"]),
        cache["root"],
    )
    for dataset in staging["datasets"]:
        said = f"{dataset['shards_here']} of {dataset['shards']} shards, {dataset['samples']} samples"
        bar = _bar(dataset["bytes_here"], dataset["bytes"])
        table.add_row(
            "dataset", bar, _of(dataset["bytes_here"], dataset["bytes"]), f"{dataset['source']}  {said}"
        )
    for shard, coming in staging["coming"].items():
        table.add_row(
            "coming", _bar(coming["arrived"], coming["bytes"]), _of(coming["arrived"], coming["bytes"]), shard
        )
    for reader in staging["readers"]:
        table.add_row(
            "reader", "", "", f"{reader['name']}  epoch {reader['epoch']}, sample {reader['position']}"
        )
    for shard in staging["waiting"]:
        table.add_row(Text("waiting", "yellow"), "", "", shard)
    problems = {**staging["problems"], **staging["failures"]}
    for subject, reason in problems.items():
        table.add_row(Text("failing", "red"), "", "", f"{subject}: {reason}")
    return table


def _run(run: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("run", "", "", f"{run['run']}  watching {run['watch']}")
    for checkpoint in run["checkpoints"]:
        total, sent = checkpoint.get("bytes", 0), checkpoint.get("sent_bytes", 0)
        bar: RenderableType = _bar(sent, total) if checkpoint["state"] == "uploading" else ""
        size = _of(sent, total) if checkpoint["state"] == "uploading" else format_size(total)
        said = checkpoint["state"] + (f": {checkpoint['reason']}" if checkpoint.get("reason") else "")
        table.add_row("checkpoint", bar, size, f"{checkpoint['name']}  {said}")
    return table


def _bar(done: float, total: float) -> RenderableType:
    return ProgressBar(total=max(total, 1), completed=done, width=BAR_WIDTH)


def _of(done: float, total: float) -> str:
    return f"{format_size(done)} of {format_size(total)}"
