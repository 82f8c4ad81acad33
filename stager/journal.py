"""The daemon's notebook: progress that would cost requests to find again. Losing it never costs correctness.

One sqlite file, private to the daemon, a table of small JSON values by topic and key. Its calls block; the engine sends
them through the ``database`` lane, which has one thread.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from typing import Any

from stager.disk import Disk
from stager.errors import StagerError
from stager.logs import event

log = logging.getLogger("stager.journal")

SCHEMA_VERSION = 1


class Journal:
    """Values by ``(topic, key)``. A damaged file is set aside and begun anew."""

    def __init__(self, path: str, disk: Disk) -> None:
        """Open the file, or ``:memory:``; made if it is missing."""
        self._path = path
        self._disk = disk
        try:
            self._database = _open(path)
        except sqlite3.DatabaseError as error:
            if not _is_full(error):
                self._set_aside(error)
            self._database = self._reopened()

    def get(self, topic: str, key: str) -> dict[str, Any] | None:
        """The value, or None if there is none or it is damaged."""
        rows = self._execute("SELECT value FROM notes WHERE topic = ? AND key = ?", (topic, key))
        return _decoded(rows[0][0]) if rows else None

    def put(self, topic: str, key: str, value: dict[str, Any]) -> None:
        """Note a value, durably, in place of any before."""
        self._execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", (topic, key, json.dumps(value)))

    def forget(self, topic: str, key: str) -> None:
        """Drop a value; a missing one is fine."""
        self._execute("DELETE FROM notes WHERE topic = ? AND key = ?", (topic, key))

    def keys(self, topic: str) -> list[str]:
        """All keys of a topic, sorted."""
        return [
            str(row[0])
            for row in self._execute("SELECT key FROM notes WHERE topic = ? ORDER BY key", (topic,))
        ]

    def close(self) -> None:
        self._database.close()

    def _execute(self, statement: str, values: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """All rows of a statement. A journal that breaks while in use is set aside: the work goes on without its notes."""
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            # A full disk, a lock, a failing device: what was noted may still be right, and only this note is lost.
            event(log, logging.WARNING, "journal.failed", path=self._path, reason=str(error))
            return []
        except sqlite3.DatabaseError as error:
            self._database.close()
            self._set_aside(error)
            self._database = self._reopened()
            return []

    def _reopened(self) -> sqlite3.Connection:
        try:
            return _open(self._path)
        except sqlite3.DatabaseError as error:
            event(log, logging.ERROR, "journal.in_memory", path=self._path, reason=str(error))
            return _open(":memory:")

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        event(log, logging.WARNING, "journal.set_aside", path=self._path, reason=str(error))
        if self._path != ":memory:":
            try:
                for suffix in ("-wal", "-shm"):
                    self._disk.remove(self._path + suffix)
                self._disk.publish(self._path, self._path + ".damaged", durable=False)
            except (StagerError, OSError) as failure:
                event(log, logging.WARNING, "journal.not_set_aside", path=self._path, reason=str(failure))


def _is_full(error: sqlite3.DatabaseError) -> bool:
    """Whether nothing is wrong with the file but the room around it."""
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_FULL


def _open(path: str) -> sqlite3.Connection:
    # The lane has one thread, but not the same one for ever; sqlite's own check would refuse the next.
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise sqlite3.DatabaseError(f"schema version {version}")
        database.execute(
            "CREATE TABLE IF NOT EXISTS notes"
            " (topic TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (topic, key)) WITHOUT ROWID"
        )
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except BaseException:
        database.close()
        raise
    return database


def _decoded(raw: object) -> dict[str, Any] | None:
    try:
        value = json.loads(str(raw))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
