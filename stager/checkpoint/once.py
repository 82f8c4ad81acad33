"""One checkpoint into a run, in the foreground, without a daemon: seal, upload, commit, unseal."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stager.checkpoint.copies import Copies
from stager.checkpoint.ledger import Ledger
from stager.checkpoint.publish import Publisher, Publishing, PublishOptions
from stager.checkpoint.seal import Seal, remove_seal
from stager.checkpoint.watcher import Watcher, WatchOptions
from stager.clock import Clock
from stager.disk import Disk
from stager.formats.commits import CheckpointManifest
from stager.store.api import ObjectStore
from stager.transfer.tools import Tools
from stager.transfer.upload import abort_stale_uploads

ONCE_FOLDER = ".stager-once"


async def seal_once(
    store: ObjectStore,
    path: str,
    tools: Tools,
    clock: Clock,
    *,
    progress: Callable[[int], None] | None = None,
) -> CheckpointManifest:
    """Upload and commit the directory or file ``path`` as it is now; ``progress`` is called with bytes sent.

    Raises:
        NotFound: There is none.
        UsageError: It holds nothing.
        IntegrityError: It is damaged, or it changed meanwhile; nothing is committed.
        LockHeld: Another process seals in the same folder.
        StoreError: The run failed for good; nothing is committed.
    """
    options = WatchOptions(os.path.dirname(path), seals_folder=ONCE_FOLDER)
    await tools.offload.run("disk", tools.disk.make_directory, options.seals)
    with tools.disk.lock(f"{options.seals}/lock", f"stager seal of {path}"):
        # Whoever holds the lock owns what is there: leftovers of a killed one.
        await tools.offload.run("disk", _tidy, tools.disk, options.seals)
        manifest = await _publish(store, path, options, tools, clock, progress)
    await abort_stale_uploads(store, f"{manifest.checkpoint}/", frozenset())
    return manifest


async def _publish(
    store: ObjectStore,
    path: str,
    options: WatchOptions,
    tools: Tools,
    clock: Clock,
    progress: Callable[[int], None] | None,
) -> CheckpointManifest:
    seals: list[Seal] = []
    await Watcher(options, tools, clock, seals.append, lambda name: None).seal_now(path)
    (seal,) = seals
    notes = _Notes()
    ledger = Ledger(notes, options.watch)
    publisher = Publisher(store, options.seals, tools, notes, ledger, clock, PublishOptions(), Copies())
    try:
        manifest = await publisher.publish(Publishing(seal, progress=progress))
    finally:
        await tools.offload.run("disk", remove_seal, tools.disk, options.seals, seal.seal_id)
    assert manifest is not None, "a run of one node waits for nobody"
    return manifest


def _tidy(disk: Disk, seals: str) -> None:
    for name in disk.list_names(seals):
        if name != "lock":
            disk.remove_tree(f"{seals}/{name}")


class _Notes:
    """A journal for a process that does everything in one go."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], dict[str, Any]] = {}

    def get(self, topic: str, key: str) -> dict[str, Any] | None:
        return self._notes.get((topic, key))

    def put(self, topic: str, key: str, value: dict[str, Any]) -> None:
        self._notes[topic, key] = value

    def forget(self, topic: str, key: str) -> None:
        self._notes.pop((topic, key), None)

    def keys(self, topic: str) -> list[str]:
        return sorted(key for found, key in self._notes if found == topic)
