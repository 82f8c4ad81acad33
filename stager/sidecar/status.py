"""The status document: what `stager status --json` prints, and what the metrics are made of."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stager import __version__
from stager.clock import Clock, iso_utc
from stager.config import NodeSection
from stager.service import Service, Supervisor
from stager.sidecar.access import AccessService
from stager.sidecar.heartbeat import HeartbeatService
from stager.sidecar.signals import Stop
from stager.store.metered import StoreMeter


@dataclass(frozen=True, slots=True)
class StatusSources:
    """Where the facts of the document come from."""

    node: NodeSection
    clock: Clock
    started_ns: int
    stop: Stop
    supervisor: Supervisor
    staging: Service
    checkpoints: Sequence[Service]
    access: AccessService
    heartbeat: HeartbeatService
    meter: StoreMeter

    @property
    def state(self) -> str:
        """``running``, then ``draining``."""
        return "draining" if self.stop.asked.is_set() else "running"

    def waiting_for(self) -> list[str]:
        """What keeps the daemon from being ready; empty means ready."""
        waiting = sorted(self.supervisor.waiting_for)
        return [self.state, *waiting] if self.stop.asked.is_set() else waiting

    def document(self) -> Mapping[str, Any]:
        """All facts of this moment; JSON values only."""
        waiting_for = self.waiting_for()
        return {
            "version": __version__,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "state": self.state,
            "ready": not waiting_for,
            "waiting_for": waiting_for,
            "started": iso_utc(self.started_ns),
            "uptime_s": (self.clock.wall_ns() - self.started_ns) / 1e9,
            "loop_lag_s": self.heartbeat.lag_s,
            "node": {"index": self.node.node_index, "count": self.node.node_count},
            "degraded": dict(self.supervisor.degraded),
            "staging": self.staging.status(),
            "checkpoints": [service.status() for service in self.checkpoints],
            "stores": self._stores(),
        }

    def _stores(self) -> Mapping[str, Any]:
        return {
            "requests": dict(self.meter.requests),
            "failures": {" ".join(failure): count for failure, count in self.meter.failures.items()},
            "bytes_up": self.meter.bytes_up,
            "bytes_down": self.meter.bytes_down,
            "in_flight": self.meter.in_flight,
            "away": dict(self.access.status()),
        }
