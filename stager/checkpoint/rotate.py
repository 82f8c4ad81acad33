"""Rotation in the watched folder, where the user wrote a rule for it: only what is committed and has not changed since."""

from __future__ import annotations

from collections.abc import Mapping

from stager.checkpoint.detect import fingerprint_of
from stager.checkpoint.ledger import Committed
from stager.checkpoint.look import look
from stager.checkpoint.watcher import WatchOptions, as_it_is
from stager.disk import Disk
from stager.formats.layouts.api import Complete


def plan_rotation(committed: Mapping[str, Committed], keep: int) -> list[tuple[str, Committed]]:
    """What goes so that the ``keep`` newest stay, the oldest first. Age is by step, then by the time of sealing.

    The ``keep`` that were sealed last stay as well: a trainer that went back saves lower steps than it did before.
    """

    def age(item: tuple[str, Committed]) -> tuple[int, int, str]:
        name, note = item
        return (-1 if note.step is None else note.step, note.sealed_ns, name)

    ordered = sorted(committed.items(), key=age)
    recent = {
        name for name, _ in sorted(ordered, key=lambda item: (item[1].sealed_ns, age(item)))[-max(1, keep) :]
    }
    return [item for item in ordered[: max(0, len(ordered) - max(1, keep))] if item[0] not in recent]


def remove_checkpoint(disk: Disk, options: WatchOptions, name: str, fingerprint: str) -> bool:
    """Remove a checkpoint from the watched folder; False, and untouched, if it is not what was committed. Blocking."""
    found = look(disk, options.watch, name, layout=options.layout, ranks=options.ranks)
    if found is None:
        return True
    complete = found.verdict if isinstance(found.verdict, Complete) else as_it_is(found)
    if fingerprint_of(found.files, complete.files) != fingerprint:
        return False
    path = f"{options.watch}/{name}"
    if found.is_file:
        disk.remove(path)
        return True
    # Markers first: half of a removal is never a checkpoint.
    for marker in reversed(complete.markers):
        disk.remove(f"{path}/{marker}")
    disk.remove_tree(path)
    return True
