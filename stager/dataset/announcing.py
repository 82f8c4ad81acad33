"""Telling the daemon where a reader stands, now and then: it computes the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from stager.dataset.ranks import Ranks
from stager.dataset.sources import Source
from stager.errors import StagerError
from stager.logs import event

EVERY_S = 2.0
_LOGGER = logging.getLogger("stager.dataset")


class Announcer:
    """Announces one rank's order and place at the beginning and every two seconds while it advances.

    It is a hint to the daemon's prefetching. When it fails, reading goes on; repeating it is also what tells a restarted
    daemon. It stands where the first worker reads, which may be a few batches ahead of what the trainer has consumed.
    """

    def __init__(self, source: Source, reader: str, ranks: Ranks) -> None:
        self._source = source
        self._reader = reader
        self._ranks = ranks
        self._next_s = 0.0
        self._failed = False
        self._warned = False

    def announce(self, order: Callable[[int], Mapping[str, Any]], position: int) -> None:
        """Announce ``position`` if it is time to, with the ``order`` as it is there."""
        if time.monotonic() < self._next_s:
            return
        try:
            reply = self._source.announce(
                order(position), position, self._reader, self._ranks.rank, self._ranks.world
            )
        except StagerError as error:
            level = logging.DEBUG if self._failed else logging.WARNING
            event(_LOGGER, level, "announce.failed", dataset=self._source.name, reason=error.message)
            self._failed = True
        else:
            self._failed = False
            if reply is not None and reply.cache_bytes_needed > reply.cache_bytes and not self._warned:
                self._warned = True
                event(
                    _LOGGER,
                    logging.WARNING,
                    "cache.smaller_than_window",
                    dataset=self._source.name,
                    cache_bytes=reply.cache_bytes,
                    cache_bytes_needed=reply.cache_bytes_needed,
                    hint="shards will be fetched more than once an epoch: raise cache_bytes, or lower window",
                )
        self._next_s = time.monotonic() + EVERY_S
