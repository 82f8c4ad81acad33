"""Prometheus metrics, gathered from the services' status when they are asked for, so that nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class StatusCollector(Collector):
    """Turns the status document into metrics."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        yield GaugeMetricFamily("stager_ready", "1 when every service is up.", value=float(status["ready"]))
        staging = status["staging"]
        cache = staging["cache"]
        for name, help_text, value in (
            ("stager_cache_bytes", "Bytes in the cache, staging included.", cache["bytes"]),
            ("stager_cache_capacity_bytes", "Bytes that the cache may hold.", cache["capacity_bytes"]),
            ("stager_cache_shards", "Complete, verified shards in the cache.", cache["shards"]),
            ("stager_readers", "Readers that have announced their order.", len(staging["readers"])),
            ("stager_waiting", "Shards that readers stand waiting for.", len(staging["waiting"])),
            ("stager_failing", "Shards whose last fetch failed.", len(staging["failures"])),
        ):
            yield GaugeMetricFamily(name, help_text, value=value)
        for name, help_text, value in (
            ("stager_shards_published", "Shards fetched and made visible.", staging["published"]),
            ("stager_fetched_bytes", "Bytes of shards fetched.", staging["fetched_bytes"]),
            ("stager_shards_evicted", "Shards given up.", staging["evicted"]),
            ("stager_shards_quarantined", "Shards found damaged on this node.", cache["quarantined"]),
        ):
            yield CounterMetricFamily(name, help_text, value=value)
        yield from _checkpoint_metrics(status["checkpoints"])


def _checkpoint_metrics(runs: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
    states = GaugeMetricFamily("stager_checkpoints", "Checkpoints known, by state.", labels=["run", "state"])
    for run in runs:
        counts: dict[str, int] = {}
        for checkpoint in run["checkpoints"]:
            counts[checkpoint["state"]] = counts.get(checkpoint["state"], 0) + 1
        for state, count in sorted(counts.items()):
            states.add_metric([run["run"], state], count)
    yield states


def make_metrics(status: Callable[[], Mapping[str, Any]]) -> Callable[[], bytes]:
    """A function that renders the metrics of the moment."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    return lambda: generate_latest(registry)
