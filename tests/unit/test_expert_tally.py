"""What was read of experts by model: counters only rise, whatever becomes of the workers."""

from __future__ import annotations

from mlxpool.parent.pool.expert_tally import ExpertTally
from mlxpool.shared.colibri.stats import ColibriStats, ExpertSummary, ResidencyStats, summarise


def test_a_worker_counts_from_its_own_start_and_the_model_goes_on() -> None:
    tally = ExpertTally()
    tally.heard(1, "a", ExpertSummary(1, 2, 30, 0.5))
    tally.heard(1, "a", ExpertSummary(2, 4, 60, 1.0))
    assert tally.by_model() == {"a": ExpertSummary(2, 4, 60, 1.0)}
    tally.ended(1)
    tally.ended(1)
    assert tally.by_model() == {"a": ExpertSummary(2, 4, 60, 1.0)}
    tally.heard(2, "a", ExpertSummary(1, 1, 10, 0.25))
    tally.heard(3, "b", ExpertSummary(0, 1, 10, 0.25))
    assert tally.by_model() == {"a": ExpertSummary(3, 5, 70, 1.25), "b": ExpertSummary(0, 1, 10, 0.25)}


def test_the_draft_layer_counts_too() -> None:
    main = ResidencyStats(hits=1, misses=2, read_bytes=3, wait_s=0.5)
    assert summarise(ColibriStats(main=main)) == ExpertSummary(1, 2, 3, 0.5)
    assert summarise(ColibriStats(main=main, mtp=main)) == ExpertSummary(2, 4, 6, 1.0)
