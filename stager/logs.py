"""Log records are constant event names with fields.

INFO is one line for a change of state, never for a chunk. The first retry is WARNING, its repeats DEBUG.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import TextIO

from stager.clock import iso_utc


class EventName(str):
    """A record's message: the event's constant name, which prints with its facts for formatters that are not ours.

    In a trainer's process logging is the trainer's, and a warning without its facts helps nobody.
    """

    __slots__ = ("fields",)
    fields: Mapping[str, object]

    def __str__(self) -> str:
        return str.__str__(self) + _facts(self.fields)


def event(logger: logging.Logger, level: int, name: str, /, **fields: object) -> None:
    """Log the event ``name`` (a constant such as ``shard.published``) with its facts."""
    if logger.isEnabledFor(level):
        message = EventName(name)
        message.fields = fields
        logger.log(level, message, extra={"fields": fields})


class LogfmtFormatter(logging.Formatter):
    """``time level logger event key=value ...`` on one line; line breaks in values are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = iso_utc(int(record.created * 1e9))
        line = f"{stamp} {record.levelname.lower()} {record.name} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {})
        entry: dict[str, object] = {
            "time": iso_utc(int(record.created * 1e9)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": str.__str__(record.msg) if isinstance(record.msg, EventName) else record.getMessage(),
            **{key: _jsonable(value) for key, value in fields.items()},
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging(*, level: str = "info", style: str = "logfmt", stream: TextIO | None = None) -> None:
    """Send stager's records to ``stream`` (standard error when None), once for the process."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else LogfmtFormatter())
    root = logging.getLogger("stager")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())


def _facts(fields: Mapping[str, object]) -> str:
    return "".join(f" {key}={_plain(value)}" for key, value in fields.items())


def _plain(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and all(character.isprintable() and character not in ' "=' for character in text):
        return text
    return json.dumps(text, ensure_ascii=False)


def _jsonable(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
