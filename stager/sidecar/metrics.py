"""Prometheus metrics, gathered from the status document when they are asked for, so that nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
        yield from _gauges(
            ("stager_ready", "1 when every service is up.", float(status["ready"])),
            ("stager_degraded", "Services that are being restarted.", len(status["degraded"])),
            ("stager_uptime_seconds", "Since the daemon started.", status["uptime_s"]),
            ("stager_loop_lag_seconds", "Worst lateness of the loop in a minute.", status["loop_lag_s"]),
        )
        yield from _staging_metrics(status["staging"])
        yield from _checkpoint_metrics(status["checkpoints"])
        yield from _store_metrics(status["stores"])


def make_metrics(status: Callable[[], Mapping[str, Any]]) -> Callable[[], bytes]:
    """A function that renders the metrics of the moment."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    return lambda: generate_latest(registry)


def _staging_metrics(staging: Mapping[str, Any]) -> Iterable[Metric]:
    cache = staging["cache"]
    yield from _gauges(
        ("stager_cache_bytes", "Bytes in the cache, staging included.", cache["bytes"]),
        ("stager_cache_capacity_bytes", "Bytes that the cache may hold.", cache["capacity_bytes"]),
        ("stager_cache_shards", "Complete, verified shards in the cache.", cache["shards"]),
        ("stager_readers", "Readers that have announced their order.", len(staging["readers"])),
        ("stager_waiting", "Shards that readers stand waiting for.", len(staging["waiting"])),
        ("stager_failing", "Shards whose last fetch failed.", len(staging["failures"])),
        ("stager_problems", "Datasets and disks that do not work now.", len(staging["problems"])),
    )
    yield from _counters(
        ("stager_shards_published", "Shards fetched and made visible.", staging["published"]),
        ("stager_fetched_bytes", "Bytes of shards fetched.", staging["fetched_bytes"]),
        ("stager_shards_evicted", "Shards given up.", staging["evicted"]),
        ("stager_shards_quarantined", "Shards found damaged on this node.", cache["quarantined"]),
    )


def _checkpoint_metrics(runs: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
    states = GaugeMetricFamily("stager_checkpoints", "Checkpoints known, by state.", labels=["run", "state"])
    for run in runs:
        counts: dict[str, int] = {}
        for checkpoint in run["checkpoints"]:
            counts[checkpoint["state"]] = counts.get(checkpoint["state"], 0) + 1
        for state, count in sorted(counts.items()):
            states.add_metric([run["run"], state], count)
    yield states
    for fact, help_text in (
        ("sealed", "Checkpoints made safe from the trainer's rotation."),
        ("committed", "Checkpoints whose manifest was written."),
        ("discarded", "Seals of no use: their files had changed."),
        ("vanished", "Checkpoints that went away before they were sealed."),
        ("retired", "Checkpoints that the keep rule removed from the run."),
    ):
        family = CounterMetricFamily(f"stager_checkpoints_{fact}", help_text, labels=["run"])
        for run in runs:
            family.add_metric([run["run"]], run[fact])
        yield family


def _store_metrics(stores: Mapping[str, Any]) -> Iterable[Metric]:
    requests = CounterMetricFamily("stager_store_requests", "Requests to stores, by verb.", labels=["verb"])
    for verb, count in stores["requests"].items():
        requests.add_metric([verb], count)
    yield requests
    failures = CounterMetricFamily(
        "stager_store_failures", "Failed requests, by verb and error.", labels=["verb", "error"]
    )
    for failure, count in stores["failures"].items():
        failures.add_metric(failure.split(" ", 1), count)
    yield failures
    yield from _counters(
        ("stager_store_sent_bytes", "Bytes of bodies sent to stores.", stores["bytes_up"]),
        ("stager_store_received_bytes", "Bytes of bodies received from stores.", stores["bytes_down"]),
    )
    yield from _gauges(
        ("stager_store_in_flight", "Requests and bodies open now.", stores["in_flight"]),
        ("stager_stores_away", "Stores that have not answered yet.", len(stores["away"])),
    )


def _gauges(*facts: tuple[str, str, float]) -> Iterable[Metric]:
    return [GaugeMetricFamily(name, help_text, value=value) for name, help_text, value in facts]


def _counters(*facts: tuple[str, str, float]) -> Iterable[Metric]:
    return [CounterMetricFamily(name, help_text, value=value) for name, help_text, value in facts]
