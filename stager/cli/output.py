"""What commands say: data to standard output, talk to standard error, errors with a hint and their exit code."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from stager.errors import StagerError

P = ParamSpec("P")

INTERRUPTED = 130
PIPE_WIDTH = 160
ISSUES = "please report it with what is printed above"


def console() -> Console:
    """For people, on standard output. Honours NO_COLOR; into a pipe or file lines are wider than a terminal's."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def talk() -> Console:
    """For people, on standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # A file's name need not be Unicode; JSON's own escape says so.
    sys.stdout.write(text.encode("utf-8", "backslashreplace").decode() + "\n")


def command(function: Callable[P, int | None]) -> Callable[P, None]:
    """Make a command of a function that returns an exit code, or None for 0; its errors become messages and codes.

    With ``--json`` (a parameter named ``as_json``) an error is a JSON object on standard output as well.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs) or 0
        except StagerError as error:
            code = tell(error, as_json=bool(kwargs.get("as_json")))
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:
            # Whoever read our output has seen enough.
            sys.stdout = None  # or the interpreter complains while it exits
            code = 0
        except typer.Exit:
            raise
        except Exception:
            traceback.print_exc()
            talk().print(f"stager: this is a bug; {ISSUES}", style="red")
            code = 1
        raise typer.Exit(code)

    return run


def tell(error: StagerError, *, as_json: bool = False) -> int:
    """Print an error; returns its exit code."""
    if as_json:
        kind = type(error).__name__
        said = {"kind": kind, "message": error.message, "subject": error.subject, "hint": error.hint}
        print_json({"error": said})
    out = talk()
    # As text, not as markup: names in messages may hold brackets.
    out.print(Text.assemble(("error:", "bold red"), " ", error.message))
    if error.hint:
        out.print(Text.assemble(("hint:", "cyan"), " ", error.hint))
    return error.exit_code
