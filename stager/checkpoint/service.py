"""The service of one watched folder and its run: a task that looks and seals, and one for each tier that publishes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from stager.checkpoint.hints import watching
from stager.checkpoint.ledger import CheckpointJournal, Ledger
from stager.checkpoint.queue import Held, PublishQueue, Pulse
from stager.checkpoint.rotate import plan_rotation, remove_checkpoint
from stager.checkpoint.seal import Seal, files_path, hand_on, load_seals
from stager.checkpoint.tiers import Retainer, Tier, relay_root
from stager.checkpoint.watcher import Watcher, Watching, WatchOptions
from stager.clock import Clock
from stager.errors import DeadlineExceeded, StagerError
from stager.formats.commits import CheckpointManifest
from stager.formats.wire import SealReply, SealRequest
from stager.logs import event
from stager.transfer.tools import Tools

log = logging.getLogger("stager.checkpoint")

WAIT_STEP_S = 60.0


@dataclass(frozen=True, slots=True)
class _Stage:
    """One tier at work."""

    tier: Tier
    root: str
    ledger: Ledger
    queue: PublishQueue
    retainer: Retainer

    def status(self, wall_ns: int, newest_step: int | None) -> Mapping[str, Any]:
        """What an operator asks of a tier: how old its newest checkpoint is, and how far it is behind."""
        queue = self.queue
        newest = queue.newest
        behind = None
        if newest_step is not None:
            behind = newest_step - (newest.step or 0) if newest is not None else newest_step
        return {
            "tier": self.tier.name,
            "newest": newest.target if newest else None,
            "newest_step": newest.step if newest else None,
            "newest_age_s": (wall_ns - newest.sealed_ns) / 1e9 if newest else None,
            "steps_at_risk": behind,
            "commit_s": queue.commit_s,
            "waiting": len(queue.held),
            "waiting_bytes": sum(held.seal.size for held in queue.held.values()),
            "copied_bytes": queue.copied_bytes,
            "committed": queue.counts.committed,
            "retired": queue.counts.retired,
            "checkpoints": queue.status(),
        }


class CheckpointService:
    """Watches, seals, publishes into tier after tier, retains."""

    def __init__(
        self,
        run_url: str,
        watch: WatchOptions,
        tiers: Sequence[Tier],
        tools: Tools,
        journal: CheckpointJournal,
        clock: Clock,
        *,
        keep_local: int | None = None,
        hinting: Watching = watching,
    ) -> None:
        """Put the parts together.

        Args:
            run_url: For messages.
            watch: What is watched.
            tiers: Where checkpoints go, one after another; at least one.
            tools: Disk, threads and bounds.
            journal: The daemon's notebook.
            clock: Wall time.
            keep_local: How many committed checkpoints stay in the watched folder; None leaves the folder alone.
            hinting: Gives hints at changes; simulations, whose files raise no events, hand in one that gives none.
        """
        self._run_url = run_url
        self._tools = tools
        self._clock = clock
        self._keep_local = keep_local
        self._watcher = Watcher(watch, tools, clock, self._sealed, self._gone, hinting=hinting)
        self._newest_step: int | None = None
        self._pulse = Pulse()
        self._stages: list[_Stage] = []
        feeding = watch.watch
        for place, tier in enumerate(tiers):
            root = relay_root(feeding, place, tier.publish.node) if place else watch.seals
            ledger = Ledger(journal, f"{watch.watch} {tier.name}")
            queue = PublishQueue(
                root,
                tier,
                tools,
                journal,
                ledger,
                clock,
                on_broken=self._broken if place else self._watcher.reopen,
                hand_on=partial(self._hand_on, place),
                on_committed=partial(self._committed, place),
            )
            behind = tiers[place + 1] if place + 1 < len(tiers) else None
            self._stages.append(_Stage(tier, root, ledger, queue, Retainer(tier, behind, tools)))
            feeding = tier.folder or feeding

    @property
    def name(self) -> str:
        return f"checkpoints of {self.watch}"

    @property
    def watch(self) -> str:
        return self._watcher.options.watch

    async def run(self, ready: Callable[[], None]) -> None:
        """Until cancelled."""
        taken: dict[str, str] = {}
        for stage in self._stages:
            taken = await self._recall(stage) | taken
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watcher.run(taken, ready))
            for stage in self._stages:
                group.create_task(stage.queue.run())

    async def _recall(self, stage: _Stage) -> dict[str, str]:
        """What an earlier life left in a tier; fingerprints by name of what needs no sealing again."""
        seals, broken = await self._tools.offload.run("disk", load_seals, self._tools.disk, stage.root)
        for seal_id, reason in broken:
            event(log, logging.WARNING, "seal.discarded", seal=seal_id, reason=reason)
        if seals:
            event(log, logging.INFO, "seals.recalled", tier=stage.tier.name, seals=len(seals))
        ledger = stage.ledger
        committed = await self._tools.offload.run("database", ledger.committed)
        ids = frozenset(seal.seal_id for seal in seals)
        await self._tools.offload.run("database", ledger.forget_other_seals, ids)
        stage.queue.recall(seals, committed)
        for step in [*(note.step for note in committed.values()), *(seal.commit.step for seal in seals)]:
            self._note_step(step)
        # A seal for this tier stands for its name in the tiers before, which have committed it.
        first = stage is self._stages[0]
        noted = {name: note.fingerprint for name, note in committed.items()} if first else {}
        return noted | {seal.name: seal.fingerprint for seal in seals}

    async def seal(self, request: SealRequest) -> SealReply:
        """Take a directory as complete now; with ``wait``, answer when it is committed.

        Raises:
            NotFound: There is no such directory.
            UsageError: It is not directly below the watched folder, or empty.
            IntegrityError: Its own metadata says that it is damaged, or it changed while it was sealed or uploaded.
            DeadlineExceeded: It was not committed in time; it stays sealed and its upload goes on.
        """
        name, fingerprint = await self._watcher.seal_now(request.directory)
        held = self._find(name, fingerprint)
        if held is None or not request.wait:
            return SealReply(name, held.state if held else "committed")
        try:
            async with asyncio.timeout(request.deadline_s):
                while (waiting := self._find(name, fingerprint)) is not None:
                    held = waiting
                    await self._pulse.wait(WAIT_STEP_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"`{name}` was not committed in {request.deadline_s:g} s; it is {held.state}"
                + (f": {held.reason}" if held.reason else ""),
                subject=name,
                hint="it is sealed and its upload goes on; `stager status` shows how far it is",
            ) from None
        note = self._stages[-1].queue.committed.get(name)
        if note is None or note.fingerprint != fingerprint:
            raise StagerError(
                f"`{name}` changed while it was uploaded; what was sent of it is not committed",
                subject=name,
                hint="seal it when nothing writes into it any more",
            )
        return SealReply(note.target, "committed")

    async def drain(self) -> None:
        """Look once more, and return when everything that is complete is committed in every tier."""
        await self._watcher.look_again()
        while self.unpublished():
            await self._pulse.wait(0.5)

    def unpublished(self) -> list[str]:
        """Checkpoints that are sealed or about to be, and not committed in every tier."""
        return sorted(self._held_names() | set(self._watcher.settling()))

    def status(self) -> Mapping[str, Any]:
        """What `stager status` shows of it. Its figures are those of the first tier, ``tiers`` has each one's."""
        first = self._stages[0].queue
        held = self._held_names()
        writing = [
            {"name": found.name, "state": str(found.phase), "bytes": found.size, "reason": found.reason}
            for found in self._watcher.standings()
            if found.name not in held
        ]
        return {
            "run": self._run_url,
            "watch": self.watch,
            "checkpoints": [*first.status(), *writing],
            "sealed": first.counts.sealed,
            "committed": first.counts.committed,
            "discarded": first.counts.discarded,
            "vanished": self._watcher.vanished,
            "problem": self._watcher.problem,
            "retired": first.counts.retired,
            "newest_step": self._newest_step,
            "tiers": [stage.status(self._clock.wall_ns(), self._newest_step) for stage in self._stages],
        }

    def _find(self, name: str, fingerprint: str) -> Held | None:
        """The seal of this state of a name, in the nearest tier that has not committed it."""
        found = (stage.queue.find(name, fingerprint) for stage in self._stages)
        return next((held for held in found if held is not None), None)

    def _held_names(self) -> set[str]:
        return {held.seal.name for stage in self._stages for held in stage.queue.held.values()}

    def _sealed(self, seal: Seal) -> None:
        self._note_step(seal.commit.step)
        self._stages[0].queue.add(seal)

    def _note_step(self, step: int | None) -> None:
        if step is not None:
            self._newest_step = max(step, self._newest_step or 0)

    def _gone(self, name: str) -> None:
        # The note stays in the journal until the name is used again; it names a state that cannot come back.
        self._stages[0].queue.committed.pop(name, None)

    def _broken(self, name: str) -> None:
        # What a tier holds is not looked at again: `stager restore` passes it over, and retention keeps what stands before.
        event(log, logging.ERROR, "relay.broken", checkpoint=name)

    async def _hand_on(self, place: int, seal: Seal, manifest: CheckpointManifest) -> None:
        """Before a seal is dropped: the same for the tier behind, from the directory that holds it now."""
        self._pulse.beat()
        if place + 1 == len(self._stages):
            return
        tier, behind = self._stages[place].tier, self._stages[place + 1]
        if seal.seal_id in behind.queue.held:
            return
        source = f"{tier.folder}/{manifest.checkpoint}" if tier.folder else ""
        source = source or files_path(self._stages[place].root, seal.seal_id)
        digests = {entry.path: entry.digest for entry in manifest.files}
        handed = await self._tools.offload.run(
            "disk", hand_on, self._tools.disk, seal, source, behind.root, digests
        )
        behind.queue.add(handed)

    async def _committed(self, place: int, manifest: CheckpointManifest) -> None:
        """After a commit: what may go now, here and in the tier before, and in the watched folder."""
        self._pulse.beat()
        for stage in self._stages[max(0, place - 1) : place + 1]:
            just_now = frozenset([manifest.checkpoint]) if stage is self._stages[place] else frozenset()
            stage.queue.count_retired(await stage.retainer.retain(stage.queue.targets | just_now))
        if place == 0:
            await self._rotate()

    async def _rotate(self) -> None:
        """Apply the rule of the watched folder, if the user wrote one."""
        if self._keep_local is None:
            return
        first = self._stages[0]
        for name, note in plan_rotation(first.queue.committed, self._keep_local):
            try:
                removed = await self._tools.offload.run(
                    "disk", remove_checkpoint, self._tools.disk, self._watcher.options, name, note.fingerprint
                )
            except StagerError as error:
                event(log, logging.WARNING, "rotation.failed", checkpoint=name, reason=error.message)
                continue
            if removed:
                event(log, logging.INFO, "checkpoint.rotated", checkpoint=name, keep_local=self._keep_local)
                first.queue.committed.pop(name, None)
                await self._tools.offload.run("database", first.ledger.forget_committed, name)
