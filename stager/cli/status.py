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
        console().print(_rendered(document, path))
    return 0


def _rendered(document: Mapping[str, Any], socket: str) -> RenderableType:
    from stager import __version__
    from stager.errors import FormatError

    try:
        return render(document)
    except (KeyError, TypeError) as error:
        # A daemon that goes on running while stager is upgraded below it.
        raise FormatError(
            f"the daemon at `{socket}` is stager {document.get('version', '?')}, and this {__version__} cannot show"
            f" its status: {error!r}",
            subject=socket,
            hint="--json gives it as it is; restart the daemon to have one version of both",
        ) from error


def _configured_socket(config: str) -> str | None:
    if not config:
        return None
    from stager.config import load_config

    return load_config(config).config.node.socket


def render(document: Mapping[str, Any]) -> RenderableType:
    """The status document for people."""
    parts: list[RenderableType] = [_head(document)]
    parts += [Text(f"degraded: {name}: {why}", "yellow") for name, why in document["degraded"].items()]
    parts += [Text(f"away: {store}: {why}", "yellow") for store, why in document["stores"]["away"].items()]
    table = Table(box=None, pad_edge=False, show_header=False)
    _add_staging(table, document["staging"])
    for run in document["checkpoints"]:
        _add_run(table, run)
    return Group(*parts, table)


def _head(document: Mapping[str, Any]) -> Text:
    state = "ready" if document["ready"] else "waiting for " + ", ".join(document["waiting_for"])
    if document["state"] != "running":
        state = document["state"]
    text = Text(f"stager {document['version']} on {document['host']}, process {document['process']}: ")
    text.append(state, "green" if document["ready"] else "yellow")
    return text.append(f", up {format_duration(document['uptime_s'])}")


def _add_staging(table: Table, staging: Mapping[str, Any]) -> None:
    cache = staging["cache"]
    _add(table, "cache", cache["root"], done=cache["bytes"], total=cache["capacity_bytes"])
    for dataset in staging["datasets"]:
        here = f"{dataset['shards_here']} of {dataset['shards']} shards, {dataset['samples']} samples"
        said = f"{dataset['source']}  {here}"
        _add(table, "dataset", said, done=dataset["bytes_here"], total=dataset["bytes"])
    for shard, coming in staging["coming"].items():
        _add(table, "coming", shard, done=coming["arrived"], total=coming["bytes"])
    for reader in staging["readers"]:
        _add(table, "reader", f"{reader['name']}  epoch {reader['epoch']}, sample {reader['position']}")
    for shard in staging["waiting"]:
        _add(table, "waiting", shard, style="yellow")
    for subject, reason in {**staging["problems"], **staging["failures"]}.items():
        _add(table, "failing", f"{subject}: {reason}", style="red")


def _add_run(table: Table, run: Mapping[str, Any]) -> None:
    _add(table, "run", f"{run['run']}  watching {run['watch']}")
    if run["problem"]:
        _add(table, "failing", run["problem"], style="red")
    for checkpoint in run["checkpoints"]:
        said = checkpoint["state"] + (f": {checkpoint['reason']}" if checkpoint.get("reason") else "")
        total = checkpoint.get("bytes", 0)
        if checkpoint["state"] == "uploading":
            sent = checkpoint.get("sent_bytes", 0)
            _add(table, "checkpoint", f"{checkpoint['name']}  {said}", done=sent, total=total)
        else:
            _add(table, "checkpoint", f"{checkpoint['name']}  {said}", size=format_size(total))


def _add(
    table: Table,
    label: str,
    said: str,
    *,
    done: float | None = None,
    total: float = 0,
    size: str = "",
    style: str = "",
) -> None:
    """A row, with a bar where ``done`` is known. Text throughout: names may hold what looks like markup."""
    bar: RenderableType = ""
    if done is not None:
        bar = ProgressBar(total=max(total, 1), completed=done, width=BAR_WIDTH)
        size = f"{format_size(done)} of {format_size(total)}"
    table.add_row(Text(label, style), bar, Text(size), Text(said))
