"""The checkpoint services of a configuration: one for each watched folder."""

from __future__ import annotations

import logging
from functools import partial

from stager.checkpoint.publish import PublishOptions
from stager.checkpoint.keep import Best, KeepRule
from stager.checkpoint.service import CheckpointService
from stager.checkpoint.tiers import Tier
from stager.checkpoint.watcher import WatchOptions
from stager.clock import Clock
from stager.config import Config, KeepSection, NodeSection, TierSection
from stager.errors import StagerError
from stager.journal import Journal
from stager.logs import event
from stager.sidecar.stores import Stores
from stager.store.probe import probe
from stager.store.registry import parse_url
from stager.transfer.tools import Tools

log = logging.getLogger("stager.sidecar")


async def make_checkpoint_services(
    config: Config, stores: Stores, tools: Tools, journal: Journal, clock: Clock
) -> list[CheckpointService]:
    """One service for each ``[[checkpoint]]``."""
    services = []
    for section in config.checkpoint:
        tiers = []
        for tier in section.all_tiers:
            commits = await _may_commit(config.node, tier, stores, tools)
            options = PublishOptions(config.node.node_index, config.node.node_count, commits=commits)
            tiers.append(make_tier(tier, stores, options))
        watch = WatchOptions(section.watch, layout=section.layout, rescan_s=section.rescan_s)
        services.append(
            CheckpointService(
                section.run, watch, tiers, tools, journal, clock, keep_local=section.keep_local
            )
        )
    return services


def make_tier(section: TierSection, stores: Stores, publish: PublishOptions = PublishOptions()) -> Tier:
    """A tier of the configuration."""
    url = parse_url(section.location)
    return Tier(
        section.location,
        partial(stores.open, section.location, section.storage_class),
        folder=url.bucket if url.scheme == "file" else "",
        keep=keep_rule(section.keep),
        publish=publish,
    )


def keep_rule(section: KeepSection) -> KeepRule:
    """A rule of the configuration."""
    best = None if section.best is None else Best(section.best.metric, section.best.count, section.best.mode)
    return KeepRule(section.last, section.every_steps, section.every_hours, best, section.names)


async def _may_commit(node: NodeSection, tier: TierSection, stores: Stores, tools: Tools) -> bool:
    """Whether this node may write manifests: node 0 always; the others where a race for a name has one winner."""
    if node.node_index == 0:
        return True
    try:
        found = await probe(await stores.open(tier.location, tier.storage_class), tools.random)
    except (StagerError, TimeoutError) as error:
        event(
            log,
            logging.WARNING,
            "store.not_probed",
            tier=tier.location,
            reason=str(error),
            commits="node 0 alone",
        )
        return False
    if not found.create_only_atomic:
        event(log, logging.WARNING, "store.no_atomic_create", tier=tier.location, commits="node 0 alone")
    return found.create_only_atomic
