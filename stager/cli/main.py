"""The `stager` command: every file of this package that registers something is a command or a group of them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Annotated

import typer

import stager.cli
from stager import __version__

# What commands share. Some of it imports the engine, which a probe that runs every few seconds should not pay for.
_SHARED = {"byte_progress", "main", "output", "progress", "session", "stores"}

app = typer.Typer(
    name="stager",
    help="Tiers for training data and checkpoints: pack, stage, seal, restore.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"stager {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def _register_all() -> None:
    for name in sorted(found.name for found in pkgutil.iter_modules(stager.cli.__path__)):
        if name not in _SHARED:
            importlib.import_module(f"stager.cli.{name}").register(app)


_register_all()


def main() -> None:
    """Entry point of the console script."""
    app()
