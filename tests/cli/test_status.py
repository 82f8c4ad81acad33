"""What people see of a status document."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from stager.cli.status import _rendered, render
from stager.errors import FormatError

DOCUMENT: dict[str, Any] = {
    "version": "1.0",
    "host": "node",
    "process": 7,
    "state": "running",
    "ready": False,
    "waiting_for": ["staging"],
    "uptime_s": 65.0,
    "degraded": {"staging": "the disk [bold]is[/] odd"},
    "stores": {"away": {"s3://b/run": "no route"}},
    "staging": {
        "cache": {"root": "/cache", "bytes": 50, "capacity_bytes": 100},
        "datasets": [
            {
                "source": "s3://b/[d]",
                "shards_here": 1,
                "shards": 2,
                "samples": 9,
                "bytes_here": 5,
                "bytes": 10,
            }
        ],
        "coming": {"d/shard-1.tar": {"arrived": 3, "bytes": 6, "wanted": True}},
        "readers": [{"name": "host/job/0", "dataset": "d", "epoch": 2, "position": 640}],
        "waiting": ["d/shard-1.tar"],
        "problems": {"s3://b/x": "no manifest"},
        "failures": {"d/shard-0.tar": "altered"},
    },
    "checkpoints": [
        {
            "run": "s3://b/run",
            "watch": "/saves",
            "problem": "",
            "checkpoints": [
                {"name": "step-1", "state": "committed", "bytes": 2000, "reason": ""},
                {"name": "step-2", "state": "uploading", "bytes": 4000, "sent_bytes": 1000, "reason": ""},
                {"name": "[step-3]", "state": "writing", "bytes": 0, "reason": "no metadata yet"},
            ],
        }
    ],
}


def shown(document: dict[str, Any]) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as captured:
        console.print(render(document))
    return captured.get()


def test_everything_is_there_as_it_is_named() -> None:
    """States, sizes and problems; brackets in names are shown, not obeyed."""
    text = shown(DOCUMENT)
    for told in (
        "process 7: waiting for staging, up 1 min 05 s",
        "degraded: staging: the disk [bold]is[/] odd",
        "away: s3://b/run: no route",
        "50 B of 100 B",
        "s3://b/[d]  1 of 2 shards, 9 samples",
        "3 B of 6 B",
        "host/job/0  epoch 2, sample 640",
        "d/shard-0.tar: altered",
        "step-1  committed",
        "1.0 KB of 4.0 KB",
        "[step-3]  writing: no metadata yet",
    ):
        assert told in text, (told, text)


def test_a_daemon_that_ends() -> None:
    """Draining is a state, not something that is waited for."""
    assert "process 7: draining, up" in shown(
        {**DOCUMENT, "state": "draining", "waiting_for": ["draining", "staging"]}
    )


def test_a_daemon_of_another_version() -> None:
    """A document without what this version shows is told as such, not as a bug."""
    without = {key: value for key, value in DOCUMENT.items() if key != "staging"}
    with pytest.raises(FormatError, match=r"`/s` is stager 1\.0"):
        _rendered(without, "/s")
