"""One request inside the engine.

The engine thread owns everything here except `cancelled`, which the event loop sets and the engine reads
between steps, and `sink`, which is called on the event loop.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from mlxpool.shared.colibri.stats import TurnStats
from mlxpool.worker.adapters.layers import AdapterSet
from mlxpool.worker.engine import admission
from mlxpool.worker.engine.admission import Projection
from mlxpool.worker.engine.constraint import Constraint
from mlxpool.worker.engine.sampler import Noise
from mlxpool.worker.engine.shaping import Shaping
from mlxpool.worker.request.plan import Plan
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.events import Event


class Row:
    """A plan on its way: waiting, prefilled, decoding, ended.

    adapters: on in every pass of its, None for the model as it is. constraint: its place in a grammar, the
    engine's from here on. token_bytes: a token's bytes, which a plan with log-probabilities needs; ValueError
    without. ids: the prompt and the tokens that were handed out. cache: mlx-lm's caches, one per layer,
    between the end of its prefill and the batch. primed: the last of its ids has gone through the model, so
    what is pending is a sampled token. sampled counts draws, emitted the tokens that were
    handed out.
    """

    def __init__(
        self,
        plan: Plan,
        text: AnswerText,
        sink: Callable[[Sequence[Event]], None],
        constraint: Constraint | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
        adapters: AdapterSet | None = None,
    ) -> None:
        if plan.top_logprobs is not None and token_bytes is None:
            raise ValueError("a plan with log-probabilities needs token_bytes")
        self.plan = plan
        self.sampling = plan.sampling
        self.xtc_keeps: Sequence[int] = sorted({*plan.xtc_keeps, *plan.eos_ids})
        self.text = text
        self.sink = sink
        self.constraint = constraint
        self.token_bytes = token_bytes
        self.adapters = adapters
        self.noise = Noise(plan.sampling.seed)
        self.shaping = Shaping(plan.sampling) if Shaping.needed(plan.sampling) else None
        self.cancelled = False
        self.number = 0  # in the order of arrival, from 1
        self.ids = list(plan.ids)
        self.cache: list[Any] = []
        self.primed = False
        self.sampled = 0
        self.emitted = 0
        self.ended = False
        # Of its prompt, the tokens that were not prefilled for it; None until that is known.
        self.cached_tokens: int | None = None
        self.told_prefilled = False
        self.took_turns = False  # with rows that could not share its passes
        self.reasoning_tokens = 0
        self.silent_tokens = 0  # sampled since the last one that something was heard of
        # Tokens that were guessed ahead, those of them that came, and the model's passes for its answer.
        self.drafted = self.accepted = self.target_calls = 0
        self.speculates = False  # it has been drafted, if only with nothing
        # For traces, perf_counter seconds: when it was let in, when its prompt was done, and when its first
        # token was known; 0.0 until then.
        self.admitted_s = 0.0
        self.prefilled_s = 0.0
        self.first_s = 0.0
        self.turn: TurnStats | None = None  # what was read from disk for it, once it has ended

    @property
    def adjusted(self) -> bool:
        """Whether anything but the draw itself is done with its logits."""
        return bool(self.constraint or self.shaping) or self.plan.top_logprobs is not None

    @property
    def position(self) -> int:
        """Place among all its ids of the token that the next draw follows."""
        return len(self.plan.ids) - 1 + self.sampled

    def requeue(self) -> None:
        """Give up the caches: what has been handed out is prefilled with the prompt when there is room again,
        and the draws go on with the same randomness, from the same place in the grammar."""
        self.cache = []
        self.noise.forget()
        self.primed, self.sampled = False, self.emitted
        if self.shaping is not None:
            self.shaping.forget()

    def end(self) -> None:
        """Give back all that it holds. Harmless for a row that has ended."""
        self.ended = True
        self.cache, self.shaping = [], None
        self.noise.forget()
        constraint, self.constraint = self.constraint, None
        if constraint is not None:
            try:
                constraint.release()
            except Exception:
                traceback.print_exc()
                sys.stderr.flush()

    @property
    def at_block_end(self) -> bool:
        """Whether its projection has just become longer."""
        return not self.plan.limited and self.emitted % admission.GROWTH_BLOCK_TOKENS == 0

    def projection(self) -> Projection:
        return Projection(len(self.plan.ids), self.emitted, self.plan.max_tokens, self.plan.limited)
