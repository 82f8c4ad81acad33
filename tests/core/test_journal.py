"""The journal: what it keeps, and that losing it is never fatal."""

from __future__ import annotations

from pathlib import Path

import pytest

from stager.disk import LocalDisk
from stager.journal import Journal


def test_notes_survive_a_restart(tmp_path: Path) -> None:
    """What was put is there for the next daemon, what was forgotten is not."""
    path = str(tmp_path / "journal.sqlite")
    journal = Journal(path, LocalDisk())
    journal.put("upload", "a", {"id": 1})
    journal.put("upload", "a", {"id": 2})
    journal.put("upload", "b", {"id": 3})
    journal.put("seal", "a", {"x": "y"})
    journal.forget("upload", "b")
    journal.forget("upload", "never")
    journal.close()
    again = Journal(path, LocalDisk())
    assert again.get("upload", "a") == {"id": 2} and again.get("upload", "b") is None
    assert again.keys("upload") == ["a"] and again.keys("none") == []
    again.close()


@pytest.mark.parametrize("damage", ["garbage", "newer", "truncated"])
def test_a_damaged_journal_is_set_aside(tmp_path: Path, damage: str) -> None:
    """Garbage, a newer schema or a cut file: the daemon starts with an empty journal and keeps the old file for a look."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(str(path), LocalDisk())
    for number in range(200):
        journal.put("upload", str(number), {"id": "x" * 100})
    if damage == "newer":
        journal._database.execute("PRAGMA user_version = 99")
    journal.close()
    if damage == "garbage":
        path.write_bytes(b"not a database" * 1000)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
    again = Journal(str(path), LocalDisk())
    again.keys("upload")
    again.put("upload", "new", {"id": 1})
    assert again.get("upload", "new") == {"id": 1} and len(again.keys("upload")) == 1
    again.close()
    assert (tmp_path / "journal.sqlite.damaged").exists()


def test_a_damaged_value_is_no_value(tmp_path: Path) -> None:
    """A note that is not JSON is as good as none."""
    journal = Journal(":memory:", LocalDisk())
    journal._database.execute("INSERT INTO notes VALUES ('t', 'k', '{broken'), ('t', 'l', '[1]')")
    assert journal.get("t", "k") is None and journal.get("t", "l") is None
    journal.close()


def test_a_full_disk_costs_only_notes(tmp_path: Path) -> None:
    """While nothing can be written, nothing is; what was noted before is still there, and writing goes on afterwards."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(str(path), LocalDisk())
    journal.put("upload", "before", {"id": 1})
    pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
    journal._database.execute(f"PRAGMA max_page_count = {pages}")
    journal.put("upload", "large", {"id": "x" * 100_000})
    assert journal.get("upload", "large") is None and journal.get("upload", "before") == {"id": 1}
    journal._database.execute("PRAGMA max_page_count = 1000000")
    journal.put("upload", "large", {"id": "x" * 100_000})
    assert journal.get("upload", "large") is not None
    journal.close()
    assert not (tmp_path / "journal.sqlite.damaged").exists()


def test_a_place_that_takes_no_database(tmp_path: Path) -> None:
    """A journal that cannot be made is kept in memory: the daemon starts."""
    (tmp_path / "journal.sqlite").mkdir()
    journal = Journal(str(tmp_path / "journal.sqlite"), LocalDisk())
    journal.put("upload", "a", {"id": 1})
    assert journal.get("upload", "a") == {"id": 1}
    journal.close()
