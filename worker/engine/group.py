"""Rows that share a forward pass: their caches, what they feed next, what was sampled with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.adapters.layers import AdapterSet
from mlxpool.worker.engine import logprobs
from mlxpool.worker.engine.masks import Masks
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.sampler import in_order, is_greedy, sample


class Sampled(NamedTuple):
    """A token that became known. reading: what `logprobs.reading` packed, None where nobody asked."""

    row: Row
    token: int
    reading: npt.NDArray[np.float32] | None


class Fed(NamedTuple):
    """What a group feeds to its forward pass: tokens [rows], and the readings that were made with them."""

    tokens: mx.array
    readings: dict[Row, mx.array]


class Group:
    """One step is `forward`, then `draw`; between the two the caches are one token ahead of `pending`.

    caches: plain with one row, batch versions with more. Engine thread only.
    """

    def __init__(self, rows: list[Row], caches: list[Any], pending: Fed) -> None:
        self.rows, self.caches, self.pending = rows, caches, pending
        self._logits: mx.array | None = None
        # What is looked up once for as long as the same rows and caches run.
        self._looked_up: tuple[list[Row], list[Any]] | None = None
        self._best_only = False
        self._counting: list[Any] = []

    @property
    def adapters(self) -> AdapterSet | None:
        """On in its passes. Those of all its rows do the same."""
        return self.rows[0].adapters

    @property
    def namespace(self) -> str:
        """What its rows' keys and values depend on: only groups of the same can be one."""
        return self.rows[0].plan.namespace

    @property
    def constrained(self) -> bool:
        """Whether a draw must wait until the token before it is known."""
        self._look_up()
        return not self._best_only and any(row.constraint is not None for row in self.rows)

    def _look_up(self) -> None:
        if self._looked_up is not None:
            rows, caches = self._looked_up
            if rows is self.rows and caches is self.caches:
                return
        # The lists are never changed, only replaced; a row that ends is adjusted less, never more.
        self._looked_up = self.rows, self.caches
        self._best_only = not any(row.adjusted or not is_greedy(row.sampling) for row in self.rows)
        self._counting = list(_counting(self.caches))

    @property
    def _offsets(self) -> list[mx.array]:
        return [cache.offset for cache in self._counting]

    def forward(self, model: Any) -> Fed:
        """Make the graph of the forward pass; returns what it was fed."""
        fed = self.pending
        self._look_up()
        self._logits = model(fed.tokens[:, None], cache=self.caches)[:, -1, :]
        for row in self.rows:
            row.target_calls += 1
        return fed

    def verify(self, model: Any, tokens: Sequence[int]) -> mx.array:
        """Put several tokens of a lone row through the model; the logits [tokens, vocabulary] after each."""
        lines: mx.array = model(mx.array([tokens], dtype=mx.uint32), cache=self.caches)[0]
        mx.eval(lines)
        self.rows[0].target_calls += 1
        return lines

    def draw_from(self, logits: mx.array, masks: Masks, failed: Callable[[Row, Exception], None]) -> None:
        """`draw` from logits [rows, vocabulary] that a pass gave for what is pending."""
        self._look_up()
        self._logits = logits
        self.draw(masks, failed)

    def start(self) -> None:
        """Let the forward pass run, the draw not yet known."""
        # Layers without rotary embedding never read their offset: unevaluated, it would gather a graph node
        # (1.6 KB) per layer and step.
        mx.async_eval(self._logits, *self._offsets)  # type: ignore[no-untyped-call]

    def draw(self, masks: Masks, failed: Callable[[Row, Exception], None]) -> None:
        """Start the draws that follow the forward pass, and it too if it has not been started."""
        logits, self._logits = self._logits, None
        assert logits is not None
        if self._best_only:
            tokens = mx.argmax(logits, axis=-1)
            self.pending = Fed(tokens, {})
            mx.async_eval(tokens, *self._offsets)  # type: ignore[no-untyped-call]
        else:
            self._draw_each(logits, masks, failed)
        for row in self.rows:
            row.primed = True
            row.sampled += 1

    def _draw_each(self, logits: mx.array, masks: Masks, failed: Callable[[Row, Exception], None]) -> None:
        """Draws of rows that are not all plain and greedy."""
        adjusted = [place for place, row in enumerate(self.rows) if row.adjusted]
        readings: dict[Row, mx.array] = {}
        if not adjusted:
            tokens = sample(logits, self.rows)
        elif len(adjusted) == len(self.rows):
            tokens = self._draw_adjusted(logits, adjusted, readings, masks, failed)
        else:
            plain = [place for place in range(len(self.rows)) if place not in adjusted]
            parts = [
                sample(logits[mx.array(plain)], [self.rows[place] for place in plain]),
                self._draw_adjusted(logits[mx.array(adjusted)], adjusted, readings, masks, failed),
            ]
            tokens = in_order(parts, [plain, adjusted])
        self.pending = Fed(tokens, readings)
        shaping = [row.shaping.state for row in self.rows if row.shaping is not None]
        mx.async_eval(  # type: ignore[no-untyped-call]
            tokens, list(readings.values()), shaping, *self._offsets
        )

    def _draw_adjusted(
        self,
        logits: mx.array,
        places: list[int],
        readings: dict[Row, mx.array],
        masks: Masks,
        failed: Callable[[Row, Exception], None],
    ) -> mx.array:
        """Tokens of the rows at `places` from their logits: bias, penalties, grammar, reading, draw."""
        rows = [self.rows[place] for place in places]
        if any(row.shaping is not None or row.plan.top_logprobs is not None for row in rows):
            logits = logits.astype(mx.float32)
        if any(row.shaping is not None for row in rows):
            lines = [logits[line : line + 1] for line in range(len(rows))]
            for line, (place, row) in enumerate(zip(places, rows, strict=True)):
                if row.shaping is not None:
                    fed = self.pending.tokens[place : place + 1]
                    lines[line] = row.shaping.shaped(lines[line], fed, row.ids, row.position)
            logits = mx.concatenate(lines) if len(lines) > 1 else lines[0]
        if any(row.constraint is not None for row in rows):
            may_come = masks.allowed(rows, logits.shape[-1], failed)
            if may_come is not None:
                logits = mx.where(may_come, logits, -mx.inf)
        tokens = sample(logits, rows)
        for line, row in enumerate(rows):
            if row.plan.top_logprobs is not None:
                one = slice(line, line + 1)
                readings[row] = logprobs.reading(logits[one], tokens[one], row.plan.top_logprobs)
        return tokens

    def take(self, other: Group) -> None:
        """Another group's rows, behind one's own. The other is used up."""
        if len(self.rows) == len(other.rows) == 1:
            pairs = zip(self.caches, other.caches, strict=True)
            self.caches = [one.merge([one, two]) for one, two in pairs]
        else:
            self.caches = self._batched()
            for held, new in zip(self.caches, other._batched(), strict=True):
                held.extend(new)
        tokens = mx.concatenate([self.pending.tokens, other.pending.tokens])
        self.pending = Fed(tokens, self.pending.readings | other.pending.readings)
        self.rows = self.rows + other.rows

    def _batched(self) -> list[Any]:
        return [cache.merge([cache]) for cache in self.caches] if len(self.rows) == 1 else self.caches

    def split(self, place: int) -> Group:
        """One row's own group; the others stay here."""
        alone = [cache.extract(place) for cache in self.caches]
        fed = Fed(self.pending.tokens[place : place + 1], self.pending.readings)
        parted = Group([self.rows[place]], alone, fed)
        self.keep([other for other in range(len(self.rows)) if other != place])
        return parted

    def keep(self, places: list[int]) -> None:
        """Drop all other rows; at least one stays."""
        if len(places) == len(self.rows):
            return
        if len(places) == 1:
            self.caches = [cache.extract(places[0]) for cache in self.caches]
        else:
            for cache in self.caches:
                cache.filter(places)
        self.pending = Fed(self.pending.tokens[mx.array(places)], self.pending.readings)
        self.rows = [self.rows[place] for place in places]

    @staticmethod
    def read(rows: Sequence[Row], fed: Fed) -> list[Sampled]:
        """Wait for what was sampled for these rows [tokens]; their values in order."""
        values: Any = fed.tokens.tolist()
        if not fed.readings:
            return [Sampled(row, value, None) for row, value in zip(rows, values, strict=True)]
        return [
            Sampled(row, value, None if row not in fed.readings else np.array(fed.readings[row]))
            for row, value in zip(rows, values, strict=True)
        ]


def _counting(caches: Iterable[Any]) -> Iterator[Any]:
    """Batch versions of caches that keep their offsets in an array, one per row."""
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _counting(cache.caches)
        elif isinstance(getattr(cache, "offset", None), mx.array):
            yield cache
