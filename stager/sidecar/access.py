"""Whether the stores of a configuration can be used at all, asked once at the start.

What no wait mends (wrong credentials, an unknown bucket, another region) ends the daemon with that very error, so that a
mistake in the configuration is not a daemon that looks alive. A store that is merely away is asked again: the node serves what
it has, and seals what the trainer saves.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stager.backoff import backoff_s, may_pass
from stager.config import Config
from stager.errors import (
    BucketNotFound,
    ConfigError,
    DeadlineExceeded,
    NotFound,
    NotSupported,
    PermissionDenied,
    StagerError,
    Unauthenticated,
    UsageError,
)
from stager.formats.manifest import MANIFEST_NAME
from stager.formats.names import latest_key
from stager.logs import event
from stager.store.api import ObjectStore
from stager.store.registry import parse_url

log = logging.getLogger("stager.sidecar")

ANSWER_S = 15.0
HOPELESS = (Unauthenticated, BucketNotFound, ConfigError, NotSupported, UsageError)
OpenStore = Callable[[str], Awaitable[ObjectStore]]


@dataclass(frozen=True, slots=True)
class Entrance:
    """One object whose reading shows whether a store can be used.

    Attributes:
        url: The store.
        key: What is asked for. It need not be there.
        must_read: Whether a refusal to read it ends the daemon. Where nobody may list a bucket, S3 refuses to
            read what is missing as well; a run whose first checkpoint is to come is therefore given the benefit of the doubt.
    """

    url: str
    key: str
    must_read: bool


def entrances(config: Config) -> list[Entrance]:
    """Each store of a configuration once."""
    found = {section.source: Entrance(section.source, MANIFEST_NAME, True) for section in config.dataset}
    for section in config.checkpoint:
        found.setdefault(section.run, Entrance(section.run, latest_key(), False))
    return list(found.values())


def url_problem(url: str) -> str:
    """What is wrong with a URL that names no store which stager could open, or nothing."""
    try:
        parse_url(url)
    except StagerError as error:
        return error.message + (f"; {error.hint}" if error.hint else "")
    return ""


class AccessService:
    """Asks every store until it has answered once."""

    name = "stores"

    def __init__(self, sought: Sequence[Entrance], open_store: OpenStore, chance: random.Random) -> None:
        self._sought = list(sought)
        self._open_store = open_store
        self._chance = chance
        self._away: dict[str, StagerError] = {}

    async def run(self, ready: Callable[[], None]) -> None:
        """Until cancelled.

        Raises:
            StagerError: Of the store's own kind, when no wait mends what is wrong.
        """
        attempt = 0
        while self._sought:
            attempt += 1
            async with asyncio.TaskGroup() as group:
                tried = [(group.create_task(self._try(entrance)), entrance) for entrance in self._sought]
            outcomes = [(task.result(), entrance) for task, entrance in tried]
            _raise_hopeless([(error, entrance) for error, entrance in outcomes if error is not None])
            self._note(outcomes)
            ready()
            if self._sought:
                await asyncio.sleep(backoff_s(min(attempt, 6), self._chance))
        ready()
        await asyncio.get_running_loop().create_future()

    def status(self) -> Mapping[str, Any]:
        """Why each store that has not answered yet cannot be reached."""
        return {url: error.message for url, error in self._away.items()}

    async def _try(self, entrance: Entrance) -> StagerError | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                store = await self._open_store(entrance.url)
                async with store.get(entrance.key):
                    return None
        except TimeoutError:
            return DeadlineExceeded(f"{entrance.url} did not answer in {ANSWER_S:g} s", subject=entrance.url)
        except BucketNotFound as error:
            return error
        except NotFound:
            return None
        except StagerError as error:
            return error

    def _note(self, outcomes: Sequence[tuple[StagerError | None, Entrance]]) -> None:
        away = {entrance.url: error for error, entrance in outcomes if error is not None and may_pass(error)}
        for url, error in away.items():
            if url not in self._away:
                event(log, logging.WARNING, "store.away", store=url, reason=error.message, hint=error.hint)
        for refusal, entrance in outcomes:
            # Neither proof that the store is unusable nor a thing that time mends: work goes on, and may fail as this did.
            if refusal is not None and not may_pass(refusal):
                event(
                    log, logging.WARNING, "store.refused", store=entrance.url, reason=refusal.message, hint=refusal.hint
                )
        for url in self._away.keys() - away.keys():
            event(log, logging.INFO, "store.back", store=url)
        self._away = away
        self._sought = [entrance for entrance in self._sought if entrance.url in away]


def _raise_hopeless(failures: Sequence[tuple[StagerError, Entrance]]) -> None:
    hopeless = [
        error
        for error, entrance in failures
        if isinstance(error, HOPELESS) or (entrance.must_read and isinstance(error, PermissionDenied))
    ]
    if not hopeless:
        return
    first = hopeless[0]
    messages = list(dict.fromkeys(error.message for error in hopeless))
    raise type(first)("\n".join(messages), subject=first.subject, hint=first.hint) from first
