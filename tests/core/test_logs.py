"""Records: constant names with facts, for our formatters and for anybody's."""

from __future__ import annotations

import io
import json
import logging

import pytest

from stager.logs import JsonFormatter, LogfmtFormatter, event


def record_of(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    logger = logging.getLogger("stager.test")
    with caplog.at_level(logging.INFO, logger="stager.test"):
        event(logger, logging.INFO, "shard.published", shard="a b", bytes=3, note='say "x"\nnow')
        event(logger, logging.DEBUG, "not.wanted")
    [record] = caplog.records
    return record


def test_one_line_with_facts(caplog: pytest.LogCaptureFixture) -> None:
    """Values with spaces, quotes and line breaks stay on their line."""
    line = LogfmtFormatter().format(record_of(caplog))
    assert line.endswith(r'info stager.test shard.published shard="a b" bytes=3 note="say \"x\"\nnow"')
    assert "\n" not in line


def test_json_keeps_name_and_facts_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Machines find the event's constant name and each fact under its own key."""
    entry = json.loads(JsonFormatter().format(record_of(caplog)))
    assert entry["event"] == "shard.published" and entry["bytes"] == 3 and entry["level"] == "info"


def test_foreign_formatters_show_the_facts(caplog: pytest.LogCaptureFixture) -> None:
    """In a trainer whose logging is its own, a warning says what it is about."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.handle(record_of(caplog))
    assert stream.getvalue().startswith('shard.published shard="a b" bytes=3')
