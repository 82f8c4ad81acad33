"""The command line as such: help, versions, exit codes, what goes where."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from stager import __version__
from stager.cli.main import app
from stager.cli.output import command, tell
from stager.errors import FormatError, LockHeld, Partial, StagerError, Unavailable, UsageError
from tests.daemon.process import stager


def exit_code_of(function: Callable[..., int | None], **arguments: object) -> int:
    with pytest.raises(typer.Exit) as caught:
        command(function)(**arguments)
    return int(caught.value.exit_code)


def raising(error: BaseException) -> Callable[..., int | None]:
    def function(as_json: bool = False) -> int | None:
        raise error

    return function


def test_the_version() -> None:
    """On standard output, nothing else."""
    done = stager("--version", environment={})
    assert (done.returncode, done.stdout, done.stderr) == (0, f"stager {__version__}\n", "")


def test_help_names_only_what_is_there() -> None:
    """Every command that help lists answers to --help."""
    runner = CliRunner()
    told = runner.invoke(app, ["--help"], env={"NO_COLOR": "1", "TERM": "dumb"}).stdout
    listed = re.findall(r"^│ ([a-z]+) ", told, re.MULTILINE)
    assert {"config", "ls", "pack", "restore", "run", "status"} <= set(listed)
    for name in listed:
        assert runner.invoke(app, [name, "--help"]).exit_code == 0, name


@pytest.mark.parametrize("name", ["pack", "verify", "index", "ls", "restore", "retain", "seal"])
def test_help_keeps_its_words(name: str) -> None:
    """Nothing in a help text is swallowed as markup, as ``[store]`` would be."""
    said = stager(name, "--help", environment={"NO_COLOR": "1", "COLUMNS": "160"}).stdout
    assert "store section." in said and "  section" not in said


@pytest.mark.parametrize("arguments", [["nothing"], ["pack"], ["run", "--nothing"], ["config"]])
def test_what_cannot_be_meant(arguments: list[str]) -> None:
    """Unknown commands and options, missing arguments: exit code 2."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and "Usage:" in done.output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (Partial("x"), 3),
        (LockHeld("x"), 11),
        (Unavailable("x"), 12),
        (FormatError("x"), 13),
        (StagerError("x"), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError(), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of error has its own; only a bug comes with a traceback, and asks to be reported."""
    assert exit_code_of(raising(error)) == code
    said = capsys.readouterr()
    assert ("Traceback" in said.err and "report" in said.err) == isinstance(error, ZeroDivisionError)
    assert said.out == ""


def test_errors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the error is a document on standard output, and for people on standard error as well."""
    assert exit_code_of(raising(LockHeld("`x` is held", subject="x", hint="wait")), as_json=True) == 11
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "error": {"kind": "LockHeld", "message": "`x` is held", "subject": "x", "hint": "wait"}
    }
    assert said.err == "error: `x` is held\nhint: wait\n"


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets and backslashes in names are no markup."""
    message = r"`a[bold]b[/]\[x]` [link=y]"
    tell(StagerError(message, hint=message))
    assert capsys.readouterr().err == f"error: {message}\nhint: {message}\n"


def test_no_colour_in_pipes() -> None:
    """Nothing but text goes into a pipe, colours wanted or not."""
    done = stager("status", "--socket", "/nowhere/s", environment={"NO_COLOR": "1"})
    assert done.returncode == 12 and "\x1b" not in done.stdout + done.stderr and "hint:" in done.stderr


def test_a_reader_that_goes_away() -> None:
    """`stager ... | head` ends quietly."""
    code = "import sys; from stager.cli.output import command, print_json\n"
    code += "command(lambda: print_json(['x' * 100] * 10_000))()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        said = process.stderr.read()
    assert b"BrokenPipe" not in said, said


def test_probes_start_without_the_engine() -> None:
    """What an orchestrator runs every few seconds imports neither the engine nor an SDK."""
    code = (
        "import sys; sys.argv = ['stager', 'status', '--live', '--socket', '/nowhere/s']\n"
        "from stager.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 12, end.code\n"
        "heavy = {'torch', 'aiobotocore', 'aiohttp', 'awscrt', 'pyarrow', 'stager.sidecar'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_two_names_for_one_checkpoint() -> None:
    """Neither of --step and --name is dropped silently."""
    done = stager("restore", "/nowhere/run", "/nowhere/dest", "--step", "1", "--name", "b", environment={})
    assert done.returncode == 2 and "--step and --name" in done.stderr
