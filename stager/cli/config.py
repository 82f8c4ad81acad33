"""`stager config`: what the daemon would be told, and whether it would take it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from stager.cli.output import command, console, print_json

ConfigFile = Annotated[str, typer.Option("--config", "-c", help="The TOML file.", metavar="FILE")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Show or check a configuration.")
    group.command("show")(show)
    group.command("check")(check)
    app.add_typer(group, name="config")


@command
def show(config: ConfigFile = "stager.toml", as_json: AsJson = False) -> None:
    """Every setting in force, with where it came from. Secrets are masked."""
    from stager.config import load_config
    from stager.sidecar.access import url_problem

    loaded = load_config(config, check_url=url_problem)
    document = loaded.config.model_dump(mode="json")
    settings = [(place, value, loaded.origins.get(place, "default")) for place, value in _leaves(document)]
    if as_json:
        print_json({place: {"value": value, "from": origin} for place, value, origin in settings})
        return
    out = console()
    width = max(len(f"{place} = {value!r}") for place, value, _ in settings)
    for place, value, origin in settings:
        said = f"{place} = {value!r}".ljust(width)
        out.print(said, f"  # {origin}", markup=False, sep="")


@command
def check(config: ConfigFile = "stager.toml", as_json: AsJson = False) -> None:
    """Tell all that is wrong with a configuration at once; exit code 10 if anything is."""
    from stager.config import load_config
    from stager.sidecar.access import url_problem

    load_config(config, check_url=url_problem)
    if as_json:
        print_json({"ok": True, "file": config})
    else:
        console().print(f"{config}: no problem found", markup=False)


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{place}[{number}]")
    else:
        yield place, value
