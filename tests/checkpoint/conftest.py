"""Checkpoints that the frameworks themselves wrote, made once a session; a test works on a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FRAMEWORKS = Path(__file__).with_name("frameworks.py")
Copy = Callable[[str, str], Path]


def run_framework(*commands: tuple[str, ...]) -> None:
    """Run commands of `frameworks.py` side by side; the first failure fails the test with what it printed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(FRAMEWORKS), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for command in commands
    ]
    try:
        for process in running:
            output, _ = process.communicate(timeout=100)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in running:
            process.kill()


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``written(command)``: the folder that this command of `frameworks.py` wrote into, made on first use."""
    root = tmp_path_factory.mktemp("written")
    made: dict[str, Path] = {}

    def folder(command: str) -> Path:
        if command not in made:
            place = root / command
            place.mkdir()
            target = str(place if command in ("save_files", "save_trainer") else place / "step-100")
            if command == "save_dcp_ranks":
                run_framework((command, target, "0", "2"), (command, target, "1", "2"))
            else:
                run_framework((command, target))
            made[command] = place
        return made[command]

    return folder


@pytest.fixture
def copied(written: Callable[[str], Path], tmp_path: Path) -> Copy:
    """``copied(command, name)``: a copy of one checkpoint of that command, in ``tmp_path/watch``, times kept."""

    def copy(command: str, name: str) -> Path:
        source = written(command) / name
        target = tmp_path / "watch" / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
        return target

    return copy
