"""A run's tiers, from the nearest to the trainer on: what each is, and how it is kept in bounds.

A seal goes into the first tier. Once it is committed there, it is handed on: the same files under one more hard link, in
the folder that the tier behind is fed from. Hot space is free as soon as a directory tier holds the checkpoint, and a tier
that is away holds up only those behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from stager.checkpoint.commit import list_manifests
from stager.checkpoint.keep import KeepRule, NextTier, plan_retention
from stager.checkpoint.publish import PublishOptions
from stager.checkpoint.retain import carry_out, finish_retirements, read_pins
from stager.errors import StagerError
from stager.formats.commits import CheckpointManifest
from stager.logs import event
from stager.store.api import ObjectStore
from stager.transfer.tools import Tools

log = logging.getLogger("stager.tiers")

RELAY_FOLDER = ".stager-relay"


@dataclass(frozen=True, slots=True)
class Tier:
    """One place that holds committed checkpoints.

    Attributes:
        name: Its URL or path.
        open_store: Its store; called before each use, so that one which cannot be reached keeps nothing from being sealed.
        folder: The same as an absolute path, where it is a directory of this machine.
        keep: What it keeps.
        publish: How seals go into it.
    """

    name: str
    open_store: Callable[[], Awaitable[ObjectStore]]
    folder: str = ""
    keep: KeepRule = KeepRule()
    publish: PublishOptions = field(default_factory=PublishOptions)


def relay_root(folder: str, place: int, node: int) -> str:
    """Where this node's seals for the tier number ``place`` lie; hidden, and on the file system of ``folder``."""
    return f"{folder}/{RELAY_FOLDER}/{place}-node-{node}"


class Retainer:
    """Applies a tier's rule. Node 0's alone does."""

    def __init__(self, tier: Tier, behind: Tier | None, tools: Tools) -> None:
        self._tier = tier
        self._behind = behind
        self._tools = tools
        self._turn = asyncio.Lock()

    async def retain(self, relied: frozenset[str]) -> frozenset[str]:
        """Delete what no rule keeps; the names that went. A failure is told, and the next commit tries again.

        Args:
            relied: Names that stay: what seals of this node are about to rely on, and what was committed just now.
        """
        rule = self._tier.keep
        if rule.keeps_all or self._tier.publish.node != 0:
            return frozenset()
        async with self._turn:
            try:
                store = await self._tier.open_store()
                await finish_retirements(store, self._tools)
                rule = replace(rule, pinned=rule.pinned | relied | await read_pins(store))
                plan = plan_retention(await sound_manifests(store), rule, await next_tier(self._behind))
                await carry_out(store, plan, self._tools)
            except StagerError as error:
                event(log, logging.WARNING, "retention.failed", tier=self._tier.name, reason=error.message)
                return frozenset()
        return frozenset(retention.manifest.checkpoint for retention in plan if not retention.keep)


async def next_tier(behind: Tier | None) -> NextTier | None:
    """What the tier behind holds, for the plan of the one before it."""
    if behind is None:
        return None
    store = await behind.open_store()
    rule = replace(behind.keep, pinned=await read_pins(store))
    return NextTier(behind.name, await sound_manifests(store), rule)


async def sound_manifests(store: ObjectStore) -> list[CheckpointManifest]:
    """As `list_manifests`, without the damaged ones: those vouch for nothing, and nobody deletes them."""
    return [found for found in await list_manifests(store) if isinstance(found, CheckpointManifest)]
