"""`stager run`: the daemon."""

from __future__ import annotations

from typing import Annotated

import typer

from stager.cli.output import command


def register(app: typer.Typer) -> None:
    app.command("run")(run)


@command
def run(
    config: Annotated[
        str, typer.Option("--config", "-c", help="The TOML file.", metavar="FILE")
    ] = "stager.toml",
) -> int:
    """Run this node's daemon: stage datasets, watch checkpoints, serve the control API. Ends by SIGTERM."""
    # Imported here: other commands start without the engine.
    from stager.config import load_config
    from stager.logs import set_up_logging
    from stager.sidecar.access import url_problem
    from stager.sidecar.app import run_daemon

    loaded = load_config(config, check_url=url_problem)
    set_up_logging(level=loaded.config.log.level, style=loaded.config.log.format)
    return run_daemon(loaded.config)
