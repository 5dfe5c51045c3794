"""Which settings of a streamed model `tune` tries next, and which it keeps. Pure.

A greedy search: one setting is changed at a time, from the best so far. A candidate and the best decode the
same prompts, in the order best, candidate, candidate, best, so that a machine that gets slower or faster
meanwhile favours neither. What is kept answers with the same tokens, was no slower in either order, and is
faster by 3% in all: less than that is noise, and a setting that only seems better is one more thing to
wonder about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from mlxpool.shared.colibri.launch import IoMode
from mlxpool.shared.colibri.measured import Name, Trial, Verdict

# Why drafts may lose by the tokens alone, which no other setting does for a reason.
_ROUNDING = "(in 16 bits several rows at once are rounded otherwise, and a near tie may fall the other way)"
# What a change must bring.
LEAST_GAIN = 0.03
# A candidate that is this much slower in the first order gets no second one.
HOPELESS = 0.9

DEPTHS = (4, 8, 16)


class Setup(msgspec.Struct, frozen=True):
    """What is tried. slots: per layer, at most: with the draft layer fewer may fit. io: as it is in use."""

    slots: int
    io: IoMode
    prefetch: bool
    overlap: bool
    queue_depth: int
    mtp: bool


class Run(NamedTuple):
    """One decoding. tokens: all that came. rate: tokens a second, of those that counted."""

    tokens: tuple[int, ...]
    rate: float


class Pair(NamedTuple):
    """The best so far and a candidate, on the same prompt."""

    best: Run
    candidate: Run


class Candidate(msgspec.Struct, frozen=True):
    name: Name
    setup: Setup

    @property
    def value(self) -> Any:
        return getattr(self.setup, self.name)


def judge(pairs: Sequence[Pair]) -> Verdict | None:
    """What to do with a candidate after one pair or both; None: the other order has to be tried too."""
    for pair in pairs:
        # One may have been cut short for being slow.
        length = min(len(pair.best.tokens), len(pair.candidate.tokens))
        if length == 0 or pair.best.tokens[:length] != pair.candidate.tokens[:length]:
            return "other tokens"
    if len(pairs) == 1:
        return "slower" if pairs[0].candidate.rate < HOPELESS * pairs[0].best.rate else None
    best, candidate = (mean_rate([pair[side] for pair in pairs]) for side in (0, 1))
    if candidate < best:
        return "slower"
    if candidate < (1 + LEAST_GAIN) * best:
        return "no gain"
    return "kept" if all(pair.candidate.rate >= pair.best.rate for pair in pairs) else "unsteady"


def mean_rate(runs: Sequence[Run]) -> float:
    """Of runs of as many tokens each: all tokens over all seconds."""
    if not all(run.rate for run in runs):
        return 0.0
    return len(runs) / sum(1 / run.rate for run in runs)


class Search:
    """One search from beginning to end: `candidates`, each followed by `told` or `failed`.

    choices: for each setting that may be changed its values; others are left as they are.
    """

    def __init__(self, start: Setup, choices: dict[Name, Sequence[Any]]) -> None:
        self.best = start
        self.best_rate = 0.0
        self.trials: list[Trial] = []
        self._start = start
        self._choices = choices

    @property
    def most(self) -> int:
        """Candidates there can be."""
        return sum(
            value != getattr(self._start, name) for name, values in self._choices.items() for value in values
        )

    def candidates(self) -> Iterator[Candidate]:
        """Each made of what is the best when it is asked for."""
        for name in get_args(Name):
            # Against the value it began with: once another is kept, that one has lost already.
            tried = getattr(self._start, name)
            for value in self._choices.get(name, ()):
                if value != tried:
                    yield Candidate(name, msgspec.structs.replace(self.best, **{name: value}))

    def told(self, candidate: Candidate, pairs: Sequence[Pair]) -> Verdict | None:
        """What was measured of it so far. None: another pair is wanted."""
        verdict = judge(pairs)
        if verdict is not None:
            best, rate = (mean_rate([pair[side] for pair in pairs]) for side in (0, 1))
            rounded = candidate.name == "mtp" and verdict == "other tokens"
            reason = _ROUNDING if rounded else ""
            self.trials.append(Trial(candidate.name, candidate.value, verdict, best, rate, reason))
            if verdict == "kept":
                self.best, self.best_rate = candidate.setup, rate
            else:
                self.best_rate = best
        return verdict

    def failed(self, candidate: Candidate, reason: str) -> None:
        """It can't be had."""
        self.trials.append(Trial(candidate.name, candidate.value, "failed", reason=reason))
