"""How long the event loop kept its tasks waiting: the first thing to look at when a daemon is slow."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from stager.logs import event

log = logging.getLogger("stager.sidecar")

BEAT_S = 0.25
WINDOW_S = 60.0
LAG_WARNED_S = 1.0


class HeartbeatService:
    """Sleeps for a short while, again and again, and takes note of how much later it was woken."""

    name = "heartbeat"

    def __init__(self) -> None:
        self._lags: deque[float] = deque([0.0], maxlen=int(WINDOW_S / BEAT_S))

    @property
    def lag_s(self) -> float:
        """The worst of the last minute."""
        return max(self._lags)

    async def run(self, ready: Callable[[], None]) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        ready()
        while True:
            due = loop.time() + BEAT_S
            await asyncio.sleep(BEAT_S)
            lag = max(0.0, loop.time() - due)
            if lag > LAG_WARNED_S and self.lag_s <= LAG_WARNED_S:
                event(
                    log,
                    logging.WARNING,
                    "loop.late",
                    lag_s=lag,
                    hint="the machine or the daemon is overloaded",
                )
            self._lags.append(lag)

    def status(self) -> Mapping[str, Any]:
        return {"loop_lag_s": self.lag_s}
