"""What prompt caches have done since the parent's start, by model, from what heartbeats say. Pure.

A worker counts from its own start and forgets with its end; here its last word is kept, so that counters only
rise. What it knows of the disk is left out: the files are everybody's to evict, and are counted where they
lie (prompt_disk.py). Owned by `PromptCaches`, on the event loop.
"""

from __future__ import annotations

from mlxpool.shared.control import CacheSummary

# What only rises while a worker lives.
COUNTERS = ("hits", "misses", "cached_tokens", "spills", "restores", "restore_ms", "dropped", "failed")


def add(one: CacheSummary, other: CacheSummary) -> CacheSummary:
    """Both together: counters and memory add up; of what is one at a time, `other`'s where it has it."""
    summed = (*COUNTERS, "bytes", "pending")
    return CacheSummary(
        **{name: getattr(one, name) + getattr(other, name) for name in summed},
        restore_ms_last=other.restore_ms_last or one.restore_ms_last,
        off=other.off if other.off is not None else one.off,
    )


class CacheTally:
    """Counters by model, and drains by how they ended."""

    def __init__(self) -> None:
        self._ended: dict[str, CacheSummary] = {}
        self._live: dict[int, tuple[str, CacheSummary]] = {}
        self.drains = {True: 0, False: 0}

    def heard(self, worker: int, model: str, summary: CacheSummary) -> None:
        """A worker's newest word replaces its last one."""
        self._live[worker] = model, summary

    def of(self, worker: int) -> CacheSummary | None:
        """What a live worker said last, of its own life alone."""
        known = self._live.get(worker)
        return known[1] if known is not None else None

    def ended(self, worker: int) -> None:
        """The worker is gone: what it has done stays counted, what it held is gone."""
        known = self._live.pop(worker, None)
        if known is None:
            return
        model, said = known
        before = self._ended.get(model, CacheSummary())
        counted = {name: getattr(before, name) + getattr(said, name) for name in COUNTERS}
        self._ended[model] = CacheSummary(
            **counted,
            restore_ms_last=said.restore_ms_last or before.restore_ms_last,
        )

    def drained(self, durable: bool) -> None:
        """A drain is over."""
        self.drains[durable] += 1

    def by_model(self) -> dict[str, CacheSummary]:
        """Of every model that ever had a worker: since the parent's start."""
        found = dict(self._ended)
        for model, said in self._live.values():
            found[model] = add(found.get(model, CacheSummary()), said)
        return found

    def all(self) -> CacheSummary:
        """Of all models together."""
        total = CacheSummary()
        for summary in self.by_model().values():
            total = add(total, summary)
        return total
