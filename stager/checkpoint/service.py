"""The service of one watched folder and its run: two tasks, one that looks and seals, one that publishes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from stager.checkpoint.hints import watching
from stager.checkpoint.ledger import CheckpointJournal, Ledger
from stager.checkpoint.publish import PublishOptions
from stager.checkpoint.queue import PublishQueue
from stager.checkpoint.retain import KeepRule
from stager.checkpoint.rotate import plan_rotation, remove_checkpoint
from stager.checkpoint.seal import Seal, load_seals
from stager.checkpoint.watcher import Watcher, Watching, WatchOptions
from stager.clock import Clock
from stager.errors import DeadlineExceeded, StagerError
from stager.formats.wire import SealReply, SealRequest
from stager.logs import event
from stager.store.api import ObjectStore
from stager.transfer.tools import Tools

log = logging.getLogger("stager.checkpoint")

WAIT_STEP_S = 60.0


class CheckpointService:
    """Watches, seals, publishes, retains."""

    def __init__(
        self,
        run_url: str,
        watch: WatchOptions,
        open_store: Callable[[], Awaitable[ObjectStore]],
        tools: Tools,
        journal: CheckpointJournal,
        clock: Clock,
        *,
        publish: PublishOptions = PublishOptions(),
        keep: KeepRule = KeepRule(),
        keep_local: int | None = None,
        hinting: Watching = watching,
    ) -> None:
        """Put the parts together.

        Args:
            run_url: For messages.
            watch: What is watched.
            open_store: The run's store; called before each use, so that a store which cannot be reached at the start
                keeps nothing from being sealed.
            tools: Disk, threads and bounds.
            journal: The daemon's notebook.
            clock: Wall time.
            publish: How seals go into the run.
            keep: What the run keeps.
            keep_local: How many committed checkpoints stay in the watched folder; None leaves the folder alone.
            hinting: Gives hints at changes; simulations, whose files raise no events, hand in one that gives none.
        """
        self._run_url = run_url
        self._tools = tools
        self._keep_local = keep_local
        self._ledger = Ledger(journal, watch.watch)
        self._watcher = Watcher(watch, tools, clock, self._sealed, self._gone, hinting=hinting)
        self._queue = PublishQueue(
            watch.seals,
            open_store,
            tools,
            journal,
            self._ledger,
            clock,
            options=publish,
            keep=keep,
            on_broken=self._watcher.reopen,
            on_committed=self._rotate,
        )

    @property
    def name(self) -> str:
        return f"checkpoints of {self.watch}"

    @property
    def watch(self) -> str:
        return self._watcher.options.watch

    async def run(self, ready: Callable[[], None]) -> None:
        """Until cancelled."""
        options = self._watcher.options
        seals, broken = await self._tools.offload.run("disk", load_seals, self._tools.disk, options.seals)
        for seal_id, reason in broken:
            event(log, logging.WARNING, "seal.discarded", seal=seal_id, reason=reason)
        if seals:
            event(log, logging.INFO, "seals.recalled", watch=self.watch, seals=len(seals))
        committed = await self._tools.offload.run("database", self._ledger.committed)
        ids = frozenset(seal.seal_id for seal in seals)
        await self._tools.offload.run("database", self._ledger.forget_other_seals, ids)
        self._queue.recall(seals, committed)
        taken = {name: note.fingerprint for name, note in committed.items()}
        taken |= {seal.name: seal.fingerprint for seal in seals}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watcher.run(taken, ready))
            group.create_task(self._queue.run())

    async def seal(self, request: SealRequest) -> SealReply:
        """Take a directory as complete now; with ``wait``, answer when it is committed.

        Raises:
            NotFound: There is no such directory.
            UsageError: It is not directly below the watched folder, or empty.
            IntegrityError: Its own metadata says that it is damaged, or it changed while it was sealed or uploaded.
            DeadlineExceeded: It was not committed in time; it stays sealed and its upload goes on.
        """
        name, fingerprint = await self._watcher.seal_now(request.directory)
        held = self._queue.find(name, fingerprint)
        if held is None or not request.wait:
            return SealReply(name, held.state if held else "committed")
        try:
            async with asyncio.timeout(request.deadline_s):
                while held.seal.seal_id in self._queue.held:
                    await self._queue.pulse.wait(WAIT_STEP_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"`{name}` was not committed in {request.deadline_s:g} s; it is {held.state}"
                + (f": {held.reason}" if held.reason else ""),
                subject=name,
                hint="it is sealed and its upload goes on; `stager status` shows how far it is",
            ) from None
        note = self._queue.committed.get(name)
        if note is None or note.fingerprint != fingerprint:
            raise StagerError(
                f"`{name}` changed while it was uploaded; what was sent of it is not committed",
                subject=name,
                hint="seal it when nothing writes into it any more",
            )
        return SealReply(note.target, "committed")

    async def drain(self) -> None:
        """Look once more, and return when everything that is complete is committed."""
        await self._watcher.look_again()
        while self.unpublished():
            await self._queue.pulse.wait(0.5)

    def unpublished(self) -> list[str]:
        """Checkpoints that are sealed or about to be, and not committed."""
        held = {held.seal.name for held in self._queue.held.values()}
        return sorted(held | set(self._watcher.settling()))

    def status(self) -> Mapping[str, Any]:
        """What `stager status` shows of it."""
        counts = self._queue.counts
        held = {held.seal.name for held in self._queue.held.values()}
        writing = [
            {"name": found.name, "state": str(found.phase), "bytes": found.size, "reason": found.reason}
            for found in self._watcher.standings()
            if found.name not in held
        ]
        return {
            "run": self._run_url,
            "watch": self.watch,
            "checkpoints": [*self._queue.status(), *writing],
            "sealed": counts.sealed,
            "committed": counts.committed,
            "discarded": counts.discarded,
            "vanished": self._watcher.vanished,
            "problem": self._watcher.problem,
            "retired": counts.retired,
        }

    def _sealed(self, seal: Seal) -> None:
        self._queue.add(seal)

    def _gone(self, name: str) -> None:
        # The note stays in the journal until the name is used again; it names a state that cannot come back.
        self._queue.committed.pop(name, None)

    async def _rotate(self) -> None:
        """Apply the rule of the watched folder, if the user wrote one."""
        if self._keep_local is None:
            return
        for name, note in plan_rotation(self._queue.committed, self._keep_local):
            try:
                removed = await self._tools.offload.run(
                    "disk", remove_checkpoint, self._tools.disk, self._watcher.options, name, note.fingerprint
                )
            except StagerError as error:
                event(log, logging.WARNING, "rotation.failed", checkpoint=name, reason=error.message)
                continue
            if removed:
                event(log, logging.INFO, "checkpoint.rotated", checkpoint=name, keep_local=self._keep_local)
                self._queue.committed.pop(name, None)
                await self._tools.offload.run("database", self._ledger.forget_committed, name)
