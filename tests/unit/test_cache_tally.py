"""Counts of prompt caches outlive the workers that made them."""

from __future__ import annotations

from mlxpool.parent.pool.cache_tally import CacheTally
from mlxpool.shared.control import CacheSummary


def test_a_workers_newest_word_counts_and_its_last_one_stays() -> None:
    tally = CacheTally()
    tally.heard(1, "a", CacheSummary(bytes=5, hits=1, ssd_bytes=7, ssd_entries=1, pending=2, off="disk full"))
    tally.heard(1, "a", CacheSummary(bytes=9, hits=3, ssd_bytes=8, ssd_entries=2, restores=1, restore_ms=4.0))
    assert tally.of(1) == CacheSummary(
        bytes=9, hits=3, ssd_bytes=8, ssd_entries=2, restores=1, restore_ms=4.0
    )
    tally.ended(1)
    assert tally.of(1) is None
    # What was in memory is gone with it; what it said of the disk may be evicted the next moment.
    assert tally.by_model() == {"a": CacheSummary(hits=3, restores=1, restore_ms=4.0)}


def test_the_next_worker_of_a_model_counts_on() -> None:
    tally = CacheTally()
    for worker in (1, 2):
        tally.heard(worker, "a", CacheSummary(hits=3, misses=1, cached_tokens=100, ssd_bytes=8))
        tally.ended(worker)
    tally.heard(3, "a", CacheSummary(bytes=4, hits=1, ssd_bytes=9))
    assert tally.by_model()["a"] == CacheSummary(bytes=4, hits=7, misses=2, cached_tokens=200)


def test_models_together() -> None:
    tally = CacheTally()
    tally.heard(1, "a", CacheSummary(bytes=1, hits=1, ssd_bytes=10, pending=1, off="disk full"))
    tally.heard(2, "b", CacheSummary(bytes=2, hits=2, ssd_bytes=20, restore_ms_last=3.5))
    assert tally.all() == CacheSummary(bytes=3, hits=3, pending=1, off="disk full", restore_ms_last=3.5)


def test_one_that_never_spoke_leaves_nothing() -> None:
    tally = CacheTally()
    tally.ended(1)
    assert tally.by_model() == {}
