"""Seals on their way into a run: the newest first, tried again for as long as it takes, then retention."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from stager.checkpoint.commit import missing_parts, read_manifest
from stager.checkpoint.copies import Copies
from stager.checkpoint.ledger import CheckpointJournal, Committed, Ledger
from stager.checkpoint.publish import Publisher, Publishing
from stager.checkpoint.seal import DamagedSeal, Seal, check_seal, remove_seal
from stager.checkpoint.tiers import Tier
from stager.clock import Clock
from stager.errors import IntegrityError, StagerError
from stager.formats.commits import CheckpointManifest
from stager.logs import event
from stager.transfer.tools import Tools
from stager.transfer.upload import abort_stale_uploads

log = logging.getLogger("stager.publish")

RETRY_FIRST_S = 2.0
RETRY_MOST_S = 60.0
OTHER_NODES_S = 5.0
OTHER_NODES_TOLD_S = 600.0
RECENT_MAX = 20


@dataclass(slots=True)
class Held:
    """A seal that is not committed yet."""

    progress: Publishing
    state: str = "sealed"
    reason: str = ""
    attempts: int = 0
    not_before: float = 0.0
    published_at: float | None = None
    told: bool = False

    @property
    def seal(self) -> Seal:
        return self.progress.seal


@dataclass(slots=True)
class _Counts:
    sealed: int = 0
    committed: int = 0
    discarded: int = 0
    retired: int = 0


@dataclass(slots=True)
class Pulse:
    """Wakes everybody who waits for any change of state."""

    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def beat(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until the next change, or until the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass


class PublishQueue:
    """What is sealed and not committed in one tier."""

    def __init__(
        self,
        seals_root: str,
        tier: Tier,
        tools: Tools,
        journal: CheckpointJournal,
        ledger: Ledger,
        clock: Clock,
        *,
        on_broken: Callable[[str], None],
        hand_on: Callable[[Seal, CheckpointManifest], Awaitable[None]],
        on_committed: Callable[[CheckpointManifest], Awaitable[None]],
    ) -> None:
        """Publish into ``tier``.

        Args:
            seals_root: Where its seals lie.
            tier: Where they go.
            tools: Disk, threads and bounds.
            journal: The daemon's notebook.
            ledger: This tier's part of it.
            clock: Wall time.
            on_broken: Told the name of each seal that had to be thrown away.
            hand_on: Takes a committed seal over for the tier behind, durably, before it is dropped here.
            on_committed: Follows a commit.
        """
        self._root = seals_root
        self._tier = tier
        self._tools = tools
        self._journal = journal
        self._ledger = ledger
        self._clock = clock
        self._options = tier.publish
        self._copies = Copies(tier.publish.copies)
        self._on_broken = on_broken
        self._hand_on = hand_on
        self._on_committed = on_committed
        self.held: dict[str, Held] = {}
        self.committed: dict[str, Committed] = {}
        self.newest: Committed | None = None
        self.commit_s = 0.0
        self.counts = _Counts()
        self.pulse = Pulse()
        self._recent: list[dict[str, Any]] = []

    def recall(self, seals: list[Seal], committed: dict[str, Committed]) -> None:
        """Begin with what an earlier life left."""
        self.held = {seal.seal_id: Held(Publishing(seal)) for seal in seals}
        self.committed = committed
        for note in committed.values():
            self._note_newest(note)

    @property
    def copied_bytes(self) -> int:
        """Bytes that the tier copied by itself."""
        return self._copies.copied_bytes

    @property
    def targets(self) -> frozenset[str]:
        """Names in the tier that seals are about to become."""
        return frozenset(held.progress.target for held in self.held.values())

    def count_retired(self, names: frozenset[str]) -> None:
        """These are no longer in the tier."""
        self.counts.retired += len(names)
        self._recent = [entry for entry in self._recent if entry["name"] not in names]

    def add(self, seal: Seal) -> None:
        """A new seal to publish."""
        self.held[seal.seal_id] = Held(Publishing(seal))
        self.counts.sealed += 1
        self.pulse.beat()

    def find(self, name: str, fingerprint: str) -> Held | None:
        """The seal of this state of a name, if it is not committed yet."""
        for held in self.held.values():
            if (held.seal.name, held.seal.fingerprint) == (name, fingerprint):
                return held
        return None

    def status(self) -> list[dict[str, Any]]:
        """Recently committed ones, then those on their way, oldest first."""
        waiting = [
            {
                "name": held.progress.target or held.seal.name,
                "state": held.state,
                "step": held.seal.commit.step,
                "bytes": held.seal.size,
                "sent_bytes": min(held.progress.sent_bytes, held.seal.size),
                "reason": held.reason,
            }
            for held in self._by_age()
        ]
        return [*self._recent, *waiting]

    async def run(self) -> None:
        """Publish until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            held = self._next(loop.time())
            if held is None:
                soonest = min((entry.not_before for entry in self.held.values()), default=loop.time() + 60.0)
                await self.pulse.wait(max(0.01, soonest - loop.time()))
                continue
            await self._advance(held)
            self.pulse.beat()

    def _next(self, now: float) -> Held | None:
        """What to try next: the highest step, since that is what a restart needs.

        Saves of one name go in the order of their sealing, and so do all without a step, because for them the time of the
        commit is what tells the newest.
        """
        first: dict[str, Held] = {}
        for held in self._by_age():
            first.setdefault(held.seal.name, held)
        ready = [held for held in first.values() if held.not_before <= now]
        stepped = [held for held in ready if held.seal.commit.step is not None]
        if stepped:
            return max(stepped, key=lambda held: (held.seal.commit.step or 0, held.seal.sealed_ns))
        return ready[0] if ready else None

    def _by_age(self) -> list[Held]:
        return sorted(self.held.values(), key=lambda held: (held.seal.sealed_ns, held.seal.seal_id))

    async def _advance(self, held: Held) -> None:
        """One try with one seal; whatever comes of it is a state, not an error of the service."""
        if held.published_at is None:
            held.state, held.reason = "uploading", ""
            self.pulse.beat()
        try:
            manifest = await self._publish(held)
            if manifest is not None:
                await self._hand_on(held.seal, manifest)
                await self._finish(held, manifest)
        except (StagerError, OSError) as error:
            await self._failed(held, error)
            return
        held.attempts = 0
        if manifest is None:
            await self._wait_for_nodes(held)
            return
        await self._on_committed(manifest)

    async def _failed(self, held: Held, error: StagerError | OSError) -> None:
        """Try again later, or give up a seal that vouches for nothing any more."""
        try:
            if isinstance(error, DamagedSeal) or await self._is_broken(held.seal):
                await self._discard(held, str(error))
                return
        except (StagerError, OSError) as unreadable:
            # The local disk fails, and may come back: the seal is not given up for that.
            error = unreadable
        held.attempts += 1
        wait_s = min(RETRY_MOST_S, RETRY_FIRST_S * 2 ** min(held.attempts - 1, 10))
        held.state = "failing"
        held.reason = error.message if isinstance(error, StagerError) else str(error)
        held.not_before = asyncio.get_running_loop().time() + wait_s
        level = logging.WARNING if held.attempts == 1 else logging.DEBUG
        hint = error.hint if isinstance(error, StagerError) else ""
        event(
            log, level, "checkpoint.not_published", checkpoint=held.seal.name, reason=held.reason, hint=hint
        )

    async def _publish(self, held: Held) -> CheckpointManifest | None:
        await self._recall_copies()
        publisher = Publisher(
            await self._tier.open_store(),
            self._root,
            self._tools,
            self._journal,
            self._ledger,
            self._clock,
            self._options,
            self._copies,
        )
        return await publisher.publish(held.progress)

    async def _recall_copies(self) -> None:
        """Learn what the tier holds from the newest two that an earlier life committed; copies are a saving, no more."""
        if self._copies.known:
            return
        notes = sorted(self.committed.values(), key=lambda note: note.sealed_ns)[-2:]
        for note in notes:
            try:
                manifest = await read_manifest(await self._tier.open_store(), note.target)
            except StagerError as error:
                event(log, logging.DEBUG, "copies.unknown", checkpoint=note.target, reason=error.message)
                return
            if manifest is not None:
                self._copies.remember(manifest)

    async def _is_broken(self, seal: Seal) -> bool:
        try:
            await self._tools.offload.run("disk", check_seal, self._tools.disk, self._root, seal)
        except IntegrityError:
            return True
        return False

    async def _discard(self, held: Held, reason: str) -> None:
        """A file of the seal was written in place: what was sent of it vouches for nothing."""
        event(log, logging.WARNING, "seal.discarded", checkpoint=held.seal.name, reason=reason)
        self.counts.discarded += 1
        await self._drop(held.seal)
        self._on_broken(held.seal.name)

    async def _wait_for_nodes(self, held: Held) -> None:
        now = asyncio.get_running_loop().time()
        held.state, held.not_before = "published", now + OTHER_NODES_S
        if held.published_at is None:
            held.published_at = now
        if held.told or now - held.published_at < OTHER_NODES_TOLD_S:
            held.reason = f"waiting for the other parts, of {self._options.nodes} nodes"
            return
        held.told = True
        try:
            lacking = await missing_parts(
                await self._tier.open_store(), held.progress.target, self._options.nodes
            )
        except StagerError as error:
            held.reason = error.message
            return
        held.reason = f"no part from node {', '.join(map(str, lacking))} of {self._options.nodes}"
        event(
            log,
            logging.WARNING,
            "checkpoint.node_missing",
            checkpoint=held.progress.target,
            nodes=",".join(map(str, lacking)),
        )

    async def _finish(self, held: Held, manifest: CheckpointManifest) -> None:
        seal = held.seal
        note = Committed(seal.fingerprint, manifest.checkpoint, manifest.step, seal.sealed_ns)
        await self._sweep(manifest.checkpoint)
        self.committed[seal.name] = note
        self._note_newest(note)
        self._copies.remember(manifest)
        self.commit_s = max(0.0, (self._clock.wall_ns() - seal.sealed_ns) / 1e9)
        await self._tools.offload.run("database", self._ledger.note_committed, seal.name, note)
        await self._drop(seal)
        self.counts.committed += 1
        self._recent.append(
            {
                "name": manifest.checkpoint,
                "state": "committed",
                "step": manifest.step,
                "bytes": seal.size,
                "sent_bytes": held.progress.sent_bytes,
                "reason": "",
            }
        )
        del self._recent[:-RECENT_MAX]

    async def _drop(self, seal: Seal) -> None:
        """Give the seal's space and notes back."""
        await self._tools.offload.run("disk", remove_seal, self._tools.disk, self._root, seal.seal_id)
        await self._tools.offload.run("database", self._ledger.forget_files, seal.seal_id)
        self.held.pop(seal.seal_id, None)

    async def _sweep(self, checkpoint: str) -> None:
        """Uploads below a committed name that nobody goes on with: their beginning was answered to nobody."""
        try:
            count = await abort_stale_uploads(await self._tier.open_store(), f"{checkpoint}/", frozenset())
        except StagerError as error:
            event(log, logging.DEBUG, "uploads.not_swept", checkpoint=checkpoint, reason=error.message)
            return
        if count:
            event(log, logging.INFO, "uploads.swept", checkpoint=checkpoint, uploads=count)

    def _note_newest(self, note: Committed) -> None:
        if self.newest is None or note.sealed_ns >= self.newest.sealed_ns:
            self.newest = note
