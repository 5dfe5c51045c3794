"""One prompt on its way: what of it is in its caches, who waits for it, and where it may go on from.

A prompt begins in one of three ways: from its first token; from a prefix that the prompt cache has, once that
is restored; or, where another prompt on its way begins with the same tokens, from that one's caches at the
place where the two part. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxpool.worker.adapters.layers import AdapterSet
from mlxpool.worker.cache.records import Ids
from mlxpool.worker.cache.restore import Restore
from mlxpool.worker.engine.row import Row


class Prompt:
    """Ids, the first `done` of which are in `caches`, and the rows that wait for the rest.

    tokens: the ids once more, as the prompt cache reads them; made once, because it is asked at each record.
    cached: how many of them this prompt did not have to prefill. told: whether a row has said so, or will;
    others that are handed over say that all of it was there. restore: what is coming from the prompt
    cache, None once it is there. follows: another prompt that has this one's first `parts_at` tokens too, and
    is let go first until there. adapters: on in its passes. boundaries: the plan's. cuts: positions,
    ascending, where a chunk must end because a state is kept there.
    """

    def __init__(self, ids: Sequence[int], namespace: str, caches: list[Any]) -> None:
        self.ids = list(ids)
        self.tokens: Ids = np.array(ids, dtype=np.uint32)
        self.namespace = namespace
        self.caches = caches
        self.rows: list[Row] = []
        self.done = 0
        self.cached = 0
        self.told = False
        self.restore: Restore | None = None
        self.follows: Prompt | None = None
        self.parts_at = 0
        self.adapters: AdapterSet | None = None
        self.boundaries: tuple[int, ...] = ()
        self.cuts: list[int] = []
        self.passed_over = 0
        self.alone = False  # a pass that it shared has failed

    @property
    def end(self) -> int:
        """Ids that are prefilled; the last one goes through the first decode step."""
        return len(self.ids) - 1

    @property
    def complete(self) -> bool:
        return self.done == self.end

    @property
    def ready(self) -> bool:
        """Whether its next chunk could go through the model now, for rows that wait for it."""
        return bool(self.rows) and self.restore is None and self.follows is None

    @property
    def leader(self) -> Prompt:
        """At the head of those that it follows; itself where it follows nobody."""
        prompt = self
        while prompt.follows is not None:
            prompt = prompt.follows
        return prompt

    @property
    def begins_at(self) -> int:
        """How many of its ids will at least be in its caches when it goes on."""
        return self.done if self.follows is None else self.parts_at

    def serves(self, row: Row) -> bool:
        """Whether a row asks exactly this."""
        return self.ids == row.ids and self.namespace == row.plan.namespace

    @property
    def first(self) -> Row | None:
        """Of the rows that wait for it, the one that came first: for it the prompt is prefilled."""
        return min(self.rows, key=lambda row: row.number, default=None)

    def begins_like(self, ids: Sequence[int]) -> int:
        """How many tokens the two have in common at their start, this one's last left out."""
        shorter = min(self.end, len(ids))
        low, high = 0, shorter
        # Comparing lists is fast, comparing tokens one by one is not.
        while low < high:
            middle = (low + high + 1) // 2
            if self.ids[low:middle] == list(ids[low:middle]):
                low = middle
            else:
                high = middle - 1
        return low

    def start(self, caches: list[Any], length: int) -> None:
        """Go on from caches that hold `length` of its ids."""
        self.caches = caches
        self.done = self.cached = length

    def hand_over(self) -> list[Row]:
        """The rows that waited, in the order in which they came, and know what was not prefilled for them."""
        rows, self.rows = sorted(self.rows, key=lambda row: row.number), []
        for row in rows:
            if row.cached_tokens is None:
                row.cached_tokens = self.end if self.told else self.cached
            self.told = True
        return rows

    def drop(self) -> None:
        """Nobody waits for it any more."""
        if self.restore is not None:
            self.restore.cancel()
            self.restore = None
        self.follows = None
