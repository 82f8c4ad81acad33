"""The checkpoint services of a configuration: one for each watched folder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from stager.checkpoint.publish import PublishOptions
from stager.checkpoint.retain import KeepRule
from stager.checkpoint.service import CheckpointService
from stager.checkpoint.watcher import WatchOptions
from stager.clock import Clock
from stager.config import CheckpointSection, Config
from stager.journal import Journal
from stager.sidecar.stores import Stores
from stager.store.api import ObjectStore
from stager.transfer.tools import Tools


def make_checkpoint_services(
    config: Config, stores: Stores, tools: Tools, journal: Journal, clock: Clock
) -> list[CheckpointService]:
    """A service for each ``[[checkpoint]]`` section."""
    node = config.node
    publish = PublishOptions(node=node.node_index, nodes=node.node_count)
    return [
        CheckpointService(
            section.run,
            WatchOptions(section.watch, section.layout, rescan_s=section.rescan_s),
            _opener(stores, section),
            tools,
            journal,
            clock,
            publish=publish,
            keep=KeepRule(last=section.keep.last, every_steps=section.keep.every_steps),
            keep_local=section.keep_local,
        )
        for section in config.checkpoint
    ]


def _opener(stores: Stores, section: CheckpointSection) -> Callable[[], Awaitable[ObjectStore]]:
    async def open_store() -> ObjectStore:
        return await stores.open(section.run)

    return open_store
