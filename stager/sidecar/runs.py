"""The checkpoint services of a configuration: one for each watched folder."""

from __future__ import annotations

import logging
from functools import partial

from stager.checkpoint.publish import PublishOptions
from stager.checkpoint.retain import KeepRule
from stager.checkpoint.service import CheckpointService
from stager.checkpoint.watcher import WatchOptions
from stager.clock import Clock
from stager.config import CheckpointSection, Config, NodeSection
from stager.errors import StagerError
from stager.journal import Journal
from stager.logs import event
from stager.sidecar.stores import Stores
from stager.store.probe import probe
from stager.transfer.tools import Tools

log = logging.getLogger("stager.sidecar")


async def make_checkpoint_services(
    config: Config, stores: Stores, tools: Tools, journal: Journal, clock: Clock
) -> list[CheckpointService]:
    """One service for each ``[[checkpoint]]``."""
    services = []
    for section in config.checkpoint:
        commits = await _may_commit(config.node, section, stores, tools)
        services.append(_make_service(config.node, section, stores, tools, journal, clock, commits=commits))
    return services


def _make_service(
    node: NodeSection,
    section: CheckpointSection,
    stores: Stores,
    tools: Tools,
    journal: Journal,
    clock: Clock,
    *,
    commits: bool,
) -> CheckpointService:
    return CheckpointService(
        section.run,
        WatchOptions(section.watch, layout=section.layout, rescan_s=section.rescan_s),
        partial(stores.open, section.run),
        tools,
        journal,
        clock,
        publish=PublishOptions(node.node_index, node.node_count, commits=commits),
        keep=KeepRule(section.keep.last, section.keep.every_steps),
        keep_local=section.keep_local,
    )


async def _may_commit(node: NodeSection, section: CheckpointSection, stores: Stores, tools: Tools) -> bool:
    """Whether this node may write manifests: node 0 always; the others where a race for a name has one winner."""
    if node.node_index == 0:
        return True
    try:
        found = await probe(await stores.open(section.run), tools.random)
    except (StagerError, TimeoutError) as error:
        event(
            log,
            logging.WARNING,
            "store.not_probed",
            run=section.run,
            reason=str(error),
            commits="node 0 alone",
        )
        return False
    if not found.create_only_atomic:
        event(log, logging.WARNING, "store.no_atomic_create", run=section.run, commits="node 0 alone")
    return found.create_only_atomic
