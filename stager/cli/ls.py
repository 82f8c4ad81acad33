"""`stager ls`: the committed checkpoints of a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from stager.cli.output import command, console, print_json, talk


def register(app: typer.Typer) -> None:
    app.command("ls")(list_checkpoints)


@command
def list_checkpoints(
    run_url: Annotated[str, typer.Argument(metavar="RUN_URL", help="s3://bucket/runs/name, or a directory.")],
    config: Annotated[
        str,
        typer.Option("--config", "-c", metavar="FILE", help="How buckets are reached: its store section."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> int:
    """List a run's committed checkpoints, oldest first. What is not committed does not exist."""
    from stager.checkpoint.commit import Damaged, list_manifests
    from stager.cli.session import Session, run_in_session
    from stager.clock import iso_utc
    from stager.units import format_size

    async def work(session: Session) -> list[Any]:
        return list(await list_manifests(await session.open(run_url)))

    found = run_in_session(work, config=config)
    damaged = [entry for entry in found if isinstance(entry, Damaged)]
    sound = [entry for entry in found if not isinstance(entry, Damaged)]
    for entry in damaged:
        talk().print(f"warning: {entry.error.message}", style="yellow", markup=False)
    if as_json:
        print_json(
            {
                "run": run_url,
                "checkpoints": [
                    {
                        "checkpoint": manifest.checkpoint,
                        "step": manifest.step,
                        "layout": manifest.layout,
                        "bytes": manifest.size,
                        "files": len(manifest.files),
                        "nodes": manifest.nodes,
                        "metrics": dict(manifest.metrics),
                        "committed": iso_utc(manifest.created_ns),
                        "has_cursor": manifest.cursor is not None,
                    }
                    for manifest in sound
                ],
                "damaged": [
                    {"checkpoint": entry.checkpoint, "reason": entry.error.message} for entry in damaged
                ],
            }
        )
    elif not sound:
        console().print(f"{run_url}: no committed checkpoint", markup=False)
    else:
        table = Table(box=None, pad_edge=False)
        for heading, justify in (
            ("checkpoint", "left"),
            ("step", "right"),
            ("size", "right"),
            ("files", "right"),
        ):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]  # rich wants a Literal
        for heading in ("layout", "committed", "metrics"):
            table.add_column(heading)
        for manifest in sound:
            table.add_row(
                manifest.checkpoint,
                "-" if manifest.step is None else str(manifest.step),
                format_size(manifest.size),
                str(len(manifest.files)),
                manifest.layout,
                iso_utc(manifest.created_ns),
                " ".join(f"{name}={value:g}" for name, value in sorted(manifest.metrics.items())),
            )
        console().print(table)
    return 13 if damaged else 0
