"""One request inside the engine.

The engine thread owns everything here except `cancelled`, which the event loop sets and the engine reads
between steps, and `sink`, which is called on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxpool.worker.engine.admission import Projection
from mlxpool.worker.request.plan import Plan
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.events import Event


class Row:
    """A plan on its way: waiting, prefilled up to `prefilled`, decoding.

    ids: the prompt and the tokens that were handed out. cache: mlx-lm's caches, one per layer, until the row
    joins the batch. primed: the last of the ids it joined with has gone through the model, so what is pending
    is a sampled token. sampled counts draws, emitted the tokens that were handed out.
    """

    def __init__(self, plan: Plan, text: AnswerText, sink: Callable[[Sequence[Event]], None]) -> None:
        self.plan = plan
        self.sampling = plan.sampling
        self.text = text
        self.sink = sink
        self.cancelled = False
        self.number = 0  # in the order of arrival, from 1
        self.ids = list(plan.ids)
        self.cache: list[Any] = []
        self.prefilled = 0
        self.passed_over = 0
        self.token_s = 0.0  # what a token of its last chunk took
        self.primed = False
        self.sampled = 0
        self.emitted = 0
        # For traces, perf_counter seconds: when it was let in, and when its prompt was done; 0.0 until then.
        self.admitted_s = 0.0
        self.prefilled_s = 0.0

    @property
    def prefill_end(self) -> int:
        """Ids that are prefilled; the last one goes through the first decode step."""
        return len(self.ids) - 1

    def requeue(self) -> None:
        """Give up the caches: what has been handed out is prefilled with the prompt when there is room again,
        and the draws go on with the same randomness."""
        self.cache, self.prefilled, self.passed_over, self.token_s = [], 0, 0, 0.0
        self.primed, self.sampled = False, self.emitted

    def projection(self) -> Projection:
        return Projection(len(self.plan.ids), self.emitted, self.plan.max_tokens, self.plan.limited)
