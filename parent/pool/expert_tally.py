"""What has been read of streamed experts since the parent's start, by model, from what heartbeats say. Pure.

As with prompt caches (cache_tally.py) a worker's last word is kept when it is gone, so that counters only
rise. Owned by `PoolEffects`, on the event loop.
"""

from __future__ import annotations

from mlxpool.shared.colibri.stats import ExpertSummary


def add(one: ExpertSummary, other: ExpertSummary) -> ExpertSummary:
    """Both together."""
    return ExpertSummary(
        hits=one.hits + other.hits,
        misses=one.misses + other.misses,
        read_bytes=one.read_bytes + other.read_bytes,
        wait_s=one.wait_s + other.wait_s,
    )


class ExpertTally:
    """Counters by model."""

    def __init__(self) -> None:
        self._ended: dict[str, ExpertSummary] = {}
        self._live: dict[int, tuple[str, ExpertSummary]] = {}

    def heard(self, worker: int, model: str, summary: ExpertSummary) -> None:
        """A worker's newest word replaces its last one."""
        self._live[worker] = model, summary

    def ended(self, worker: int) -> None:
        """The worker is gone: what it has done stays counted."""
        if (known := self._live.pop(worker, None)) is not None:
            model, said = known
            self._ended[model] = add(self._ended.get(model, ExpertSummary()), said)

    def by_model(self) -> dict[str, ExpertSummary]:
        """Of every model that ever streamed: since the parent's start."""
        found = dict(self._ended)
        for model, said in self._live.values():
            found[model] = add(found.get(model, ExpertSummary()), said)
        return found
