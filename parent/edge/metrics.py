"""`GET /metrics`: the pool and the relay for Prometheus.

Nothing is counted twice: what the scheduler and the relay know anyway is read at the time of the scrape. The
library that writes the format is imported by the first scrape, not by the start. Labels are names of models
that exist or have something on disk here, never what a client wrote.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from mlxpool.parent.history.store import HistoryStore
from mlxpool.parent.pool.service import PoolService
from mlxpool.parent.pool.views import PoolView, WorkerView
from mlxpool.shared.colibri.stats import ExpertSummary
from mlxpool.shared.control import CacheSummary
from mlxpool.shared.trace import Outcome

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Seconds. First tokens come within tens of milliseconds to a long prefill; whole answers take longer.
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_WORKER_GAUGES: tuple[tuple[str, str, Callable[[WorkerView], float]], ...] = (
    ("planned_bytes", "Memory reserved for the model.", lambda w: w.planned_bytes),
    ("footprint_bytes", "Memory its process holds.", lambda w: w.footprint_bytes),
    ("active_requests", "Requests that run.", lambda w: w.active),
    ("queued_requests", "Requests that wait.", lambda w: w.queued),
    ("tokens_per_second", "Tokens generated, of late.", lambda w: w.tokens_per_s),
)
# Of each model's prompt cache; the counters are those of all its workers since the parent's start.
_CACHE_GAUGES: tuple[tuple[str, str, Callable[[CacheSummary], float]], ...] = (
    ("prompt_cache_bytes", "Memory that prompts take.", lambda c: c.bytes),
    ("ssd_cache_pending", "Records that wait to be written.", lambda c: c.pending),
)
_CACHE_COUNTERS: tuple[tuple[str, str, Callable[[CacheSummary], float]], ...] = (
    ("prompt_cache_hits", "Prompts of which a beginning was cached.", lambda c: c.hits),
    ("prompt_cache_misses", "Prompts that were read from their start.", lambda c: c.misses),
    ("prompt_cache_cached_tokens", "Prompt tokens that needed no prefill.", lambda c: c.cached_tokens),
    ("ssd_cache_spills", "Records written.", lambda c: c.spills),
    ("ssd_cache_restores", "Prompts read back from disk.", lambda c: c.restores),
    ("ssd_cache_restore_seconds", "Time that this took.", lambda c: c.restore_ms / 1000),
    ("ssd_cache_dropped", "Records given up because too many waited.", lambda c: c.dropped),
    ("ssd_cache_failed", "Writes that failed.", lambda c: c.failed),
)
# Of models whose experts are streamed, as above.
_EXPERT_COUNTERS: tuple[tuple[str, str, Callable[[ExpertSummary], float]], ...] = (
    ("expert_hits", "Experts that a pass needed and found in memory.", lambda e: e.hits),
    ("expert_misses", "Experts that a pass needed and had to wait for.", lambda e: e.misses),
    ("expert_read_bytes", "Read of experts, ahead of need too.", lambda e: e.read_bytes),
    ("expert_wait_seconds", "Time that passes waited for experts.", lambda e: e.wait_s),
)


@dataclass
class Histogram:
    """Counts per bucket, as Prometheus wants them cumulated at the scrape."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """One observation."""
        self.counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def cumulated(self) -> list[tuple[str, float]]:
        """(upper bound, observations at most that)."""
        rows, seen = [], 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, float(seen)))
        return rows


@dataclass
class RelayMetrics:
    """What the relay observes. Event loop only."""

    requests: dict[tuple[str, Outcome], int] = field(default_factory=dict)
    wait_s: dict[str, Histogram] = field(default_factory=dict)
    first_byte_s: dict[str, Histogram] = field(default_factory=dict)
    duration_s: dict[str, Histogram] = field(default_factory=dict)

    def observe(
        self, model: str, outcome: Outcome, waited_s: float | None, first_s: float | None, total_s: float
    ) -> None:
        """A request ended. waited_s: until its model was ready; first_s: to its first byte; None: never."""
        self.requests[model, outcome] = self.requests.get((model, outcome), 0) + 1
        for table, seconds in (
            (self.wait_s, waited_s),
            (self.first_byte_s, first_s),
            (self.duration_s, total_s),
        ):
            if seconds is not None:
                table.setdefault(model, Histogram()).add(seconds)


class Metrics:
    """The handler and the collector behind it."""

    def __init__(self, pool: PoolService, relay: RelayMetrics, history: HistoryStore) -> None:
        self._pool = pool
        self._relay = relay
        self._history = history

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics"""
        from prometheus_client.exposition import generate_latest

        text = generate_latest(self)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def collect(self) -> Iterator[Metric]:
        """Everything, read now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        view = self._pool.view()
        for name, text, value in (
            ("mlxpool_budget_bytes", "Memory that models and their prompts may hold.", view.budget_bytes),
            ("mlxpool_reserved_bytes", "Memory that is promised to models.", view.reserved_bytes),
            ("mlxpool_prompt_cache_limit_bytes", "Memory that prompts may take.", view.prompt_cache_bytes),
            ("mlxpool_queued_requests", "Requests that wait for a model.", len(view.queue)),
            ("mlxpool_leases_shared", "Requests that may use the GPU.", view.leases.shared),
            ("mlxpool_leases_exclusive", "1 while a job has the GPU for itself.", view.leases.exclusive),
            ("mlxpool_leases_waiting", "Requests and jobs that wait for the GPU.", view.leases.waiting),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, count in view.counters.items():
            yield CounterMetricFamily(f"mlxpool_{name}", f"Model {name} since the start.", value=count)

        workers = view.workers
        states = GaugeMetricFamily(
            "mlxpool_worker_state", "1 for the state a model is in.", labels=["model", "state"]
        )
        for worker in workers:
            states.add_metric([worker.model, worker.state], 1)
        yield states
        for name, text, read in _WORKER_GAUGES:
            gauge = GaugeMetricFamily(f"mlxpool_worker_{name}", text, labels=["model"])
            for worker in workers:
                gauge.add_metric([worker.model], read(worker))
            yield gauge
        crashes = CounterMetricFamily("mlxpool_worker_crashes", "Crashes while serving.", labels=["model"])
        for worker in workers:
            crashes.add_metric([worker.model], worker.restarts)
        yield crashes

        yield from self._cache(view)
        yield from self._experts()
        yield from self._stored()

        requests = CounterMetricFamily(
            "mlxpool_requests", "Requests that ended.", labels=["model", "outcome"]
        )
        for (model, outcome), count in self._relay.requests.items():
            requests.add_metric([model, outcome], count)
        yield requests
        for name, text, table in (
            ("wait", "From a request to its model being ready for it.", self._relay.wait_s),
            ("first_byte", "From a request to its answer's first byte.", self._relay.first_byte_s),
            ("request", "From a request to its answer's end.", self._relay.duration_s),
        ):
            family = HistogramMetricFamily(f"mlxpool_{name}_seconds", text, labels=["model"])
            for model, histogram in table.items():
                family.add_metric([model], histogram.cumulated(), histogram.total_s)
            yield family

    def _cache(self, view: PoolView) -> Iterator[Metric]:
        """Prompt caches, as the heartbeats told them: no worker is asked."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        models = self._pool.effects.caches.tally.by_model()
        for family, rows in ((GaugeMetricFamily, _CACHE_GAUGES), (CounterMetricFamily, _CACHE_COUNTERS)):
            for name, text, read in rows:
                metric = family(f"mlxpool_{name}", text, labels=["model"])
                for model, summary in models.items():
                    metric.add_metric([model], read(summary))
                yield metric
        yield from self._disk()
        drains = CounterMetricFamily(
            "mlxpool_drains", "Drains, by whether all that was to be on disk is there.", labels=["durable"]
        )
        drains.add_metric(["true"], view.cache.drains - view.cache.losses)
        drains.add_metric(["false"], view.cache.losses)
        yield drains

    def _experts(self) -> Iterator[Metric]:
        """Streamed experts, as the heartbeats told them."""
        from prometheus_client.core import CounterMetricFamily

        models = self._pool.effects.experts.by_model()
        for name, text, read in _EXPERT_COUNTERS:
            metric = CounterMetricFamily(f"mlxpool_{name}", text, labels=["model"])
            for model, summary in models.items():
                metric.add_metric([model], read(summary))
            yield metric

    def _stored(self) -> Iterator[Metric]:
        """Responses that are kept."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self._history.figures
        for name, text, value in (
            ("entries", "Responses that are kept.", figures.entries),
            ("bytes", "Disk that they take.", figures.bytes),
            ("limit_bytes", "Disk that they may take.", figures.max_bytes),
            ("max_age_seconds", "How long they are kept.", figures.max_age_s),
        ):
            yield GaugeMetricFamily(f"mlxpool_history_{name}", text, value=value)
        yield CounterMetricFamily(
            "mlxpool_history_unstored", "Answers that could not be kept.", value=figures.unstored
        )

    def _disk(self) -> Iterator[Metric]:
        """Records on disk, as the folder was when it was looked at last; models without a worker too."""
        from prometheus_client.core import GaugeMetricFamily

        held: dict[str, tuple[int, int]] = {}
        for use in self._pool.disk.folders:
            size_bytes, entries = held.get(use.model, (0, 0))
            held[use.model] = size_bytes + use.bytes, entries + use.entries
        sizes = GaugeMetricFamily("mlxpool_ssd_cache_bytes", "Disk that prompts take.", labels=["model"])
        counts = GaugeMetricFamily(
            "mlxpool_ssd_cache_entries", "Records of prompts on disk.", labels=["model"]
        )
        for model, (size_bytes, entries) in held.items():
            sizes.add_metric([model], size_bytes)
            counts.add_metric([model], entries)
        yield sizes
        yield counts
