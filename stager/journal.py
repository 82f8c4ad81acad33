"""The daemon's notebook: progress that would cost requests to find again. Losing it never costs correctness.

A damaged file is set aside. A disk that is full or fails costs the notes that were not written, no more: what is read
back is then older, which is what a kill before the write would have left.

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
        self._failing = False
        try:
            self._database = _open(path)
        except sqlite3.DatabaseError as error:
            self._database = self._begin_anew(error)

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
        """All rows of a statement; none where the journal fails. The work goes on without its notes."""
        try:
            rows = self._database.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            if not self._failing:
                event(log, logging.WARNING, "journal.failing", path=self._path, reason=str(error))
            self._failing = True
            return []
        except sqlite3.DatabaseError as error:
            self._database.close()
            self._database = self._begin_anew(error)
            return []
        if self._failing:
            event(log, logging.INFO, "journal.recovered", path=self._path)
            self._failing = False
        return rows

    def _begin_anew(self, error: sqlite3.DatabaseError) -> sqlite3.Connection:
        """An empty journal in place of one that cannot be used; in memory where the disk takes none."""
        reason = str(error)
        # An operational error is about the disk, not about what the file holds.
        if not isinstance(error, sqlite3.OperationalError):
            try:
                self._set_aside(reason)
                return _open(self._path)
            except (sqlite3.DatabaseError, StagerError, OSError) as second:
                reason = f"{reason}; {second}"
        event(log, logging.WARNING, "journal.in_memory", path=self._path, reason=reason)
        return _open(":memory:")

    def _set_aside(self, reason: str) -> None:
        event(log, logging.WARNING, "journal.set_aside", path=self._path, reason=reason)
        if self._path != ":memory:":
            for suffix in ("-wal", "-shm"):
                self._disk.remove(self._path + suffix)
            self._disk.publish(self._path, self._path + ".damaged", durable=False)


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
