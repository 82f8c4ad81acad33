"""Looks at the watched folder and seals what is complete. Needs no store: rotation is survived while the store is away.

Hints say where to look soon; a full look every `rescan_s` is what nothing escapes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from stager.checkpoint.detect import Bad, Decision, Detector, Gone, Phase, Standing, Take, fingerprint_of
from stager.checkpoint.hints import Hints, watching
from stager.checkpoint.look import Look, look, names_in
from stager.checkpoint.publish import is_generation_name
from stager.checkpoint.seal import SEALS_FOLDER, Seal, make_seal
from stager.clock import Clock
from stager.errors import IntegrityError, NotFound, StagerError, UsageError
from stager.formats.layouts.api import Complete, Corrupt
from stager.formats.layouts.detection import AUTO, markers_of
from stager.formats.layouts.steps import is_unfinished_file, step_in
from stager.logs import event
from stager.transfer.tools import Tools

log = logging.getLogger("stager.watch")

GATHER_S = 0.1
Watching = Callable[[str, Hints], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What is watched, and how.

    Attributes:
        watch: The folder that trainers save into; absolute, without a final ``/``.
        layout: Of its checkpoints, or ``auto``.
        ranks: How many ranks write a checkpoint, where that is known.
        rescan_s: Seconds between full looks.
        seals_folder: Name, in the watched folder, of where seals lie; hidden.
    """

    watch: str
    layout: str = AUTO
    ranks: int | None = None
    rescan_s: float = 5.0
    seals_folder: str = SEALS_FOLDER

    @property
    def seals(self) -> str:
        """Where seals lie: on the same file system, under a name that no framework takes for a checkpoint."""
        return f"{self.watch}/{self.seals_folder}"


class Watcher:
    """The folder's looks and seals."""

    def __init__(
        self,
        options: WatchOptions,
        tools: Tools,
        clock: Clock,
        on_sealed: Callable[[Seal], None],
        on_gone: Callable[[str], None],
        *,
        hinting: Watching = watching,
    ) -> None:
        """``on_sealed`` is told of each new seal, ``on_gone`` of each name that is no longer there; both at once."""
        self.options = options
        self._tools = tools
        self._clock = clock
        self._on_sealed = on_sealed
        self._on_gone = on_gone
        self._hinting = hinting
        self._detector = Detector()
        self._hints = Hints()
        self._sealing = asyncio.Lock()
        self._passes = 0
        self._full_asked = False
        self._passed = asyncio.Condition()
        self.vanished = 0
        self.problem = ""

    async def run(self, taken: Mapping[str, str], ready: Callable[[], None]) -> None:
        """Until cancelled. ``taken``: fingerprints by name of what needs no sealing again."""
        watch = self.options.watch
        await self._tools.offload.run("disk", self._tools.disk.make_directory, watch)
        self._detector = Detector(taken)
        self._hints = Hints()
        with self._hinting(watch, self._hints):
            await self._pass(full=True)
            ready()
            loop = asyncio.get_running_loop()
            rescan_at = loop.time() + self.options.rescan_s
            while True:
                due = self._detector.next_due()
                until = rescan_at if due is None else min(rescan_at, due)
                await self._hints.wait(max(0.0, until - loop.time()))
                # A save raises a flood of events; gathering them bounds the looks.
                await asyncio.sleep(GATHER_S)
                full = self._full_asked or loop.time() >= rescan_at
                if full:
                    self._full_asked = False
                    rescan_at = loop.time() + self.options.rescan_s
                await self._pass(full=full)

    async def look_again(self) -> None:
        """Return after a full look that began after this call."""
        self._full_asked = True
        self._hints.add("")
        # A pass that runs already may have begun before; the one after it has not.
        wanted = self._passes + 2
        async with self._passed:
            while self._passes < wanted:
                self._full_asked = True
                self._hints.add("")
                await self._passed.wait()

    def settling(self) -> list[str]:
        """Names that are complete and have yet to be quiet for long enough."""
        return [found.name for found in self._detector.standings() if found.phase is Phase.SETTLING]

    def standings(self) -> list[Standing]:
        """For the status: what is not sealed, by name."""
        return [found for found in self._detector.standings() if found.phase is not Phase.TAKEN]

    def reopen(self, name: str) -> None:
        """Its seal was of no use: look at it again."""
        self._detector.reopen(name, asyncio.get_running_loop().time())
        self._hints.add(name)

    async def seal_now(self, directory: str) -> tuple[str, str]:
        """Take a directory as it is now for complete; its name and fingerprint.

        Raises:
            NotFound: There is no such directory.
            UsageError: It is not directly below the watched folder, or empty.
            IntegrityError: Its own metadata says that it is damaged, or it changes.
        """
        name = self._name_of(directory)
        found = await self._look(name)
        if found is None:
            raise NotFound(f"there is no `{self.options.watch}/{name}`", subject=name)
        if isinstance(found.verdict, Corrupt):
            raise IntegrityError(
                f"`{name}` is damaged: {found.verdict.reason}",
                subject=name,
                hint="save it again, or remove it",
            )
        complete = found.verdict if isinstance(found.verdict, Complete) else as_it_is(found)
        if not complete.files:
            raise UsageError(
                f"`{name}` holds no files to seal", subject=name, hint="is it the right directory?"
            )
        decision = Take(found, complete, fingerprint_of(found.files, complete.files))
        self._detector.observe(name, found, asyncio.get_running_loop().time())
        try:
            await self._take(decision)
        except FileNotFoundError as error:
            raise IntegrityError(
                f"`{name}` lost `{error.filename}` while it was sealed", subject=name
            ) from None
        return name, decision.fingerprint

    async def _pass(self, *, full: bool) -> None:
        """Look at what was hinted at; with ``full``, or when something has settled, at everything."""
        names = self._hints.collect()
        due = self._detector.next_due()
        if full or (due is not None and due <= asyncio.get_running_loop().time()):
            names |= await self._everything()
        for name in sorted(names):
            found = await self._look(name)
            decision = self._detector.observe(name, found, asyncio.get_running_loop().time())
            if found is None:
                self._on_gone(name)
            await self._act(decision)
        if full:
            async with self._passed:
                self._passes += 1
                self._passed.notify_all()

    async def _everything(self) -> frozenset[str]:
        """Names in the folder, and those that were there. A folder that cannot be read now is looked at again later."""
        try:
            there = await self._tools.offload.run("disk", names_in, self._tools.disk, self.options.watch)
        except StagerError as error:
            level = logging.DEBUG if self.problem else logging.ERROR
            event(
                log,
                level,
                "watch.unreadable",
                watch=self.options.watch,
                reason=error.message,
                hint=error.hint,
            )
            self.problem = error.message
            return frozenset()
        self.problem = ""
        return frozenset(there) | self._detector.names()

    async def _look(self, name: str) -> Look | None:
        call = partial(look, layout=self.options.layout, ranks=self.options.ranks)
        return await self._tools.offload.run("disk", call, self._tools.disk, self.options.watch, name)

    async def _act(self, decision: Decision | None) -> None:
        if isinstance(decision, Take):
            try:
                await self._take(decision)
            except (OSError, StagerError) as error:
                # It stays as it is in the trainer's folder; the next look decides anew.
                name = decision.look.name
                self._detector.reopen(name, asyncio.get_running_loop().time())
                event(log, logging.WARNING, "seal.failed", checkpoint=name, reason=str(error))
        elif isinstance(decision, Gone):
            self.vanished += 1
            event(
                log,
                logging.WARNING,
                "checkpoint.vanished",
                checkpoint=decision.name,
                state=str(decision.phase),
                reason=decision.reason,
            )
        elif isinstance(decision, Bad):
            name = f"checkpoint.{decision.phase}"
            event(log, logging.WARNING, name, checkpoint=decision.name, reason=decision.reason)

    async def _take(self, decision: Take) -> None:
        """Seal what was looked at, unless this state of it is sealed already."""
        async with self._sealing:
            name = decision.look.name
            if self._detector.is_taken(name, decision.fingerprint):
                return
            seal = await self._tools.offload.run(
                "disk",
                make_seal,
                self._tools.disk,
                self.options.watch,
                decision.look,
                decision.complete,
                self.options.seals,
                f"{self._tools.random.getrandbits(128):032x}",
                self._clock.wall_ns(),
            )
            self._detector.take(name, decision.fingerprint)
            self._on_sealed(seal)
            event(
                log,
                logging.INFO,
                "checkpoint.sealed",
                checkpoint=name,
                layout=seal.layout,
                step=seal.commit.step,
                files=len(seal.files),
                bytes=seal.size,
            )

    def _name_of(self, directory: str) -> str:
        name = os.path.relpath(os.path.normpath(directory), self.options.watch)
        if "/" in name or name.startswith("."):
            raise UsageError(
                f"`{directory}` is not directly below the watched folder `{self.options.watch}`",
                subject=directory,
                hint="seal the checkpoint's own directory",
            )
        if is_generation_name(name):
            raise UsageError(
                f"`{name}` ends like the names that stager gives to later saves of one name",
                subject=directory,
                hint="give it a name that does not end in .r and a number",
            )
        return name


def as_it_is(found: Look) -> Complete:
    """Everything in it, on the word of whoever asked for its seal."""
    files = tuple(sorted(path for path in found.files if not is_unfinished_file(path)))
    return Complete("sealed", step_in(found.name), files, 0.0, markers_of("sealed", files))
