"""`stager retain`: what a rule keeps of a run's checkpoints, and why; without --dry-run, the rest is deleted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from stager.cli.output import command, console, print_json, talk
from stager.errors import UsageError

if TYPE_CHECKING:
    from stager.checkpoint.keep import Retention
    from stager.cli.session import Session
    from stager.config import TierSection


def register(app: typer.Typer) -> None:
    app.command("retain")(retain)


@command
def retain(
    run_url: Annotated[str, typer.Argument(metavar="RUN_URL", help="s3://bucket/runs/name, or a directory.")],
    last: Annotated[int, typer.Option("--last", metavar="K", min=0, help="Keep the newest K.")] = 0,
    every_steps: Annotated[
        int, typer.Option("--every-steps", metavar="N", min=0, help="Keep steps that are multiples of N.")
    ] = 0,
    pin: Annotated[list[str] | None, typer.Option("--pin", metavar="NAME", help="Keep this one.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")
    ] = False,
    config: Annotated[
        str,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="The rules of its tiers; how buckets are reached: its store section.",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> int:
    """Keep what any of the rules keeps, and the newest in any case; delete the rest, manifests first.

    With a configuration that has a tier at RUN_URL and no rule given here, that tier's rule is taken, and nothing goes
    before the tier behind it holds it.
    """
    from stager.checkpoint.commit import Damaged, list_manifests
    from stager.checkpoint.keep import KeepRule, plan_retention
    from stager.checkpoint.retain import carry_out, finish_retirements, read_pins
    from stager.checkpoint.tiers import next_tier
    from stager.cli.session import run_in_session
    from stager.formats.commits import CheckpointManifest
    from stager.units import format_size

    rule = KeepRule(last or None, every_steps or None)
    place, tiers = _configured(config, run_url)
    if rule.keeps_all and not dry_run and place is None:
        raise UsageError("no rule is given", subject=run_url, hint="give --last K, --every-steps N, or both")

    async def work(session: Session) -> tuple[list[Retention], list[Damaged]]:
        from stager.sidecar.runs import keep_rule, make_tier

        store = await session.open(run_url)
        chosen, behind = rule, None
        if place is not None:
            chosen = keep_rule(tiers[place].keep) if rule.keeps_all else rule
            if place + 1 < len(tiers):
                behind = await next_tier(make_tier(tiers[place + 1], session.stores))
        chosen = replace(chosen, pinned=frozenset(pin or ()) | await read_pins(store))
        found = await list_manifests(store)
        sound = [entry for entry in found if isinstance(entry, CheckpointManifest)]
        plan = plan_retention(sound, chosen, behind)
        if not dry_run:
            await finish_retirements(store, session.tools)
            await carry_out(store, plan, session.tools)
        return plan, [entry for entry in found if isinstance(entry, Damaged)]

    plan, damaged = run_in_session(work, config=config)
    for broken in damaged:
        talk().print(f"warning: {broken.error.message}; it is left alone", style="yellow", markup=False)
    if as_json:
        rows = [
            {
                "checkpoint": entry.manifest.checkpoint,
                "step": entry.manifest.step,
                "bytes": entry.manifest.size,
                "keep": entry.keep,
                "reason": entry.reason,
            }
            for entry in plan
        ]
        print_json({"run": run_url, "dry_run": dry_run, "checkpoints": rows})
        return 13 if damaged else 0
    table = Table(box=None, pad_edge=False)
    for heading in ("checkpoint", "size", "", "reason"):
        table.add_column(heading)
    for entry in plan:
        what = "keep" if entry.keep else "would go" if dry_run else "deleted"
        table.add_row(entry.manifest.checkpoint, format_size(entry.manifest.size), what, entry.reason)
    console().print(table if plan else f"{run_url}: no committed checkpoint")
    return 13 if damaged else 0


def _configured(config: str, run_url: str) -> tuple[int | None, Sequence[TierSection]]:
    """Where ``run_url`` stands among the tiers of the configuration, if it does."""
    from stager.config import load_checkpoint_section

    section = load_checkpoint_section(config or None, run_url)
    if section is None:
        return None, ()
    places = [tier.location.rstrip("/") for tier in section.all_tiers]
    return places.index(run_url.rstrip("/")), section.all_tiers
