"""One checkpoint into a run, in the foreground, without a daemon: seal, upload, commit, unseal."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stager.checkpoint.ledger import Ledger
from stager.checkpoint.publish import Publisher, Publishing, PublishOptions
from stager.checkpoint.seal import Seal, remove_seal
from stager.checkpoint.watcher import Watcher, WatchOptions
from stager.clock import Clock
from stager.errors import StagerError
from stager.formats.commits import CheckpointManifest
from stager.store.api import ObjectStore
from stager.transfer.tools import Tools


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
        StoreError: The run failed for good; nothing is committed.
    """
    seals: list[Seal] = []
    options = WatchOptions(os.path.dirname(path))
    watcher = Watcher(options, tools, clock, seals.append, lambda name: None)
    await watcher.seal_now(path)
    (seal,) = seals
    notes = _NoNotes()
    publisher = Publisher(
        store, options.seals, tools, notes, Ledger(notes, options.watch), clock, PublishOptions()
    )
    try:
        manifest = await publisher.publish(Publishing(seal, progress=progress))
    finally:
        await tools.offload.run("disk", remove_seal, tools.disk, options.seals, seal.seal_id)
    if manifest is None:
        raise StagerError(f"`{seal.name}` needs other nodes' parts", subject=seal.name)
    return manifest


class _NoNotes:
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
