"""What `tune` tries next and what it keeps, decided from runs that are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mlxpool.shared.colibri.measured import Verdict
from mlxpool.worker.colibri.tune_search import Candidate, Pair, Run, Search, Setup, judge

START = Setup(slots=24, io="direct", prefetch=True, overlap=True, queue_depth=8, mtp=False)
CHOICES: dict[Any, Any] = {
    "mtp": [False, True],
    "overlap": (True, False),
    "prefetch": (True, False),
    "queue_depth": (4, 8, 16),
    "io": ["direct", "buffered"],
    "slots": [24, 18, 12],
}
TOKENS = tuple(range(20))


def pair(best: float, candidate: float, tokens: tuple[int, ...] = TOKENS) -> Pair:
    return Pair(Run(TOKENS, best), Run(tokens, candidate))


def searched(rate: Callable[[Setup], float], choices: dict[Any, Any] | None = None) -> Search:
    """A search on a machine that is as fast as `rate` says."""
    search = Search(START, CHOICES if choices is None else choices)
    for candidate in search.candidates():
        pairs: list[Pair] = []
        while True:
            pairs.append(pair(rate(search.best), rate(candidate.setup)))
            if search.told(candidate, pairs) is not None:
                break
    return search


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([pair(1.0, 1.2)], None),
        ([pair(1.0, 0.9)], None),
        ([pair(1.0, 0.89)], "slower"),
        ([pair(1.0, 1.2), pair(1.0, 1.2)], "kept"),
        ([pair(1.0, 1.031), pair(1.0, 1.031)], "kept"),
        ([pair(1.0, 1.029), pair(1.0, 1.029)], "no gain"),
        ([pair(1.0, 1.0), pair(1.0, 1.0)], "no gain"),
        ([pair(1.0, 1.0), pair(1.0, 0.99)], "slower"),
        # A machine that only warms up: whoever came second was faster.
        ([pair(1.0, 1.5), pair(1.5, 1.0)], "no gain"),
        # Faster in all, in one order alone: that is noise.
        ([pair(1.0, 2.0), pair(1.0, 0.99)], "unsteady"),
    ],
)
def test_what_is_kept_is_faster_by_three_percent_and_in_both_orders(
    pairs: list[Pair], verdict: Verdict | None
) -> None:
    assert judge(pairs) == verdict


def test_what_says_other_tokens_is_thrown_out_however_fast_it_is() -> None:
    assert judge([pair(1.0, 9.0, (*TOKENS[:-1], 99))]) == "other tokens"
    assert judge([pair(1.0, 1.5), pair(1.0, 1.5, (5, *TOKENS[1:]))]) == "other tokens"


def test_a_run_that_was_cut_short_is_compared_as_far_as_it_came() -> None:
    assert judge([pair(1.0, 0.2, TOKENS[:5])]) == "slower"
    assert judge([pair(1.0, 0.2, (7, *TOKENS[1:5]))]) == "other tokens"
    assert judge([pair(1.0, 0.0, ())]) == "other tokens"


def test_one_setting_is_changed_at_a_time_from_the_best_so_far() -> None:
    tried: list[Setup] = []

    def rate(setup: Setup) -> float:
        if setup not in tried:
            tried.append(setup)
        return (2.0 if setup.slots == 18 else 1.0) * (1.5 if setup.queue_depth == 16 else 1.0)

    search = searched(rate)
    assert search.best == msgspec.structs.replace(START, slots=18, queue_depth=16)
    assert search.best_rate == pytest.approx(3.0)
    assert [(trial.name, trial.value, trial.verdict) for trial in search.trials] == [
        ("slots", 18, "kept"),
        ("slots", 12, "slower"),
        ("io", "buffered", "no gain"),
        ("queue_depth", 4, "no gain"),
        ("queue_depth", 16, "kept"),
        ("prefetch", False, "no gain"),
        ("overlap", False, "no gain"),
        ("mtp", True, "no gain"),
    ]
    assert search.most == len(search.trials)
    assert tried[3] == msgspec.structs.replace(START, slots=18, io="buffered")


def test_where_nothing_pays_all_stays_as_it_was() -> None:
    assert searched(lambda setup: 1.0 if setup == START else 0.97).best == START


def test_what_may_not_be_changed_is_not_tried() -> None:
    search = searched(lambda _: 1.0, {"prefetch": (True, False), "io": ["direct"]})
    assert [trial.name for trial in search.trials] == ["prefetch"]


def test_a_candidate_that_fails_is_told_of_and_the_search_goes_on_from_the_best() -> None:
    search = Search(START, {"io": ["direct", "uncached"], "overlap": (True, False)})
    candidates = search.candidates()
    search.failed(next(candidates), "the disk refuses")
    assert search.trials[0].verdict == "failed"
    assert search.trials[0].reason == "the disk refuses"
    assert next(candidates) == Candidate("overlap", msgspec.structs.replace(START, overlap=False))


def test_drafts_that_lose_by_their_tokens_are_told_with_why() -> None:
    search = Search(START, {"mtp": [False, True], "overlap": (True, False)})
    for candidate in search.candidates():
        search.told(candidate, [pair(1.0, 9.0, (*TOKENS[:-1], 99))])
    told = {trial.name: (trial.verdict, trial.reason) for trial in search.trials}
    assert told["overlap"] == ("other tokens", "")
    assert told["mtp"][0] == "other tokens"
    assert told["mtp"][1].startswith("(in 16 bits several rows at once are rounded otherwise")
