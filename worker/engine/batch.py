"""The decode batch: one step gives every row its next token.

Built on the batch versions of mlx-lm's caches (merge, extend, filter, extract) rather than on its
BatchGenerator, for three reasons that showed in measurement. A lone row runs on its plain caches with one
argmax, as a plain mlx-lm loop does, and is merged only when a second row comes. A row that is at its
length limit leaves before the next step, so its last token costs no forward pass. And nothing the answer
doesn't need (log-probabilities of the whole vocabulary) is computed.

Rows share a forward pass in groups: `grouping` says which. Rows of a model that can't share one
(`shares_passes`) are groups of one each, and still get their tokens in turns.

A step is a pipeline of depth one: the forward pass that makes the next tokens is started first, then the
tokens of the previous one are read, so the Python between two steps runs beside the computation. The
invariant: the caches hold everything a row has said up to, and without, its `pending` token.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import mlx.core as mx

from mlxpool.worker.engine import grouping
from mlxpool.worker.engine.admission import KvCost
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.sampler import sample

# Prompts of the probe; every vocabulary has these ids, and the padding between the two is most of it.
_PROBE_SHORT = (5, 3)
_PROBE_LONG = (7, 2, 11, 4, 13, 6, 1, 9, 8, 10, 12, 14)

# Largest difference between shared and lone logits, as a share of that between the two prompts' own: far
# above what rounding does in 16 bits, far below what reading a wrong mask does (Gemma 2: 1).
_PROBE_TOLERANCE = 0.2


def shares_passes(model: Any, make_cache: Callable[[], list[Any]]) -> bool:
    """Whether rows of different lengths in one forward pass get the logits that each gets alone.

    Not every cache has a batch version, and not every model of mlx-lm reads those rightly: some take the
    offset for one number, and Gemma 2 takes the mask of rows for one of heads, without an error. So it is
    tried, once, when a second row comes.
    """
    prompts = (_PROBE_SHORT, _PROBE_LONG)
    try:
        alone = mx.concatenate([model(mx.array([ids]), cache=make_cache())[:, -1] for ids in prompts])
        prefilled = [make_cache() for _ in prompts]
        for ids, caches in zip(prompts, prefilled, strict=True):
            model(mx.array([ids[:-1]]), cache=caches)
            mx.eval([cache.state for cache in caches])
        merged = [one.merge([one, two]) for one, two in zip(*prefilled, strict=True)]
        shared = model(mx.array([ids[-1:] for ids in prompts]), cache=merged)[:, -1]
        apart = mx.abs(alone[0] - alone[1]).max()
        same = bool((mx.abs(shared - alone).max() <= _PROBE_TOLERANCE * apart).item())
    except Exception:
        traceback.print_exc()
        same = False
    if not same:
        sys.stderr.write("rows of this model can't share a forward pass: each gets one of its own\n")
        sys.stderr.flush()
    return same


class _Group:
    """Rows that share a forward pass. caches: plain with one row, batch versions with more. pending: [rows],
    what is fed next."""

    def __init__(self, rows: list[Row], caches: list[Any], pending: mx.array) -> None:
        self.rows, self.caches, self.pending = rows, caches, pending

    def take(self, other: _Group) -> None:
        """Another group's rows, behind one's own. The other is used up."""
        if len(self.rows) == len(other.rows) == 1:
            pairs = zip(self.caches, other.caches, strict=True)
            self.caches = [one.merge([one, two]) for one, two in pairs]
        else:
            self.caches = self._batched()
            for held, new in zip(self.caches, other._batched(), strict=True):
                held.extend(new)
        self.pending = mx.concatenate([self.pending, other.pending])
        self.rows = self.rows + other.rows

    def _batched(self) -> list[Any]:
        return [cache.merge([cache]) for cache in self.caches] if len(self.rows) == 1 else self.caches

    def split(self, place: int) -> _Group:
        """One row's own group; the others stay here."""
        alone = [cache.extract(place) for cache in self.caches]
        parted = _Group([self.rows[place]], alone, self.pending[place : place + 1])
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
        self.pending = self.pending[mx.array(places)]
        self.rows = [self.rows[place] for place in places]

    def read(self, tokens: mx.array) -> list[tuple[Row, int]]:
        """Wait for sampled tokens [rows]; those of rows that have only just joined are no tokens."""
        if not any(row.primed for row in self.rows):
            return []
        values: Any = tokens.tolist()
        return [(row, value) for row, value in zip(self.rows, values, strict=True) if row.primed]


class DecodeBatch:
    """The rows that decode. Engine thread only."""

    def __init__(self, model: Any, make_cache: Callable[[], list[Any]], cost: KvCost) -> None:
        self._model = model
        self._make_cache = make_cache
        self._cost = cost
        self._shares: bool | None = None  # not tried yet
        self._groups: list[_Group] = []

    @property
    def rows(self) -> list[Row]:
        return [row for group in self._groups for row in group.rows]

    @property
    def held_bytes(self) -> int:
        """What the rows' caches take now, padding included."""
        lengths = [[len(row.ids) for row in group.rows] for group in self._groups]
        return grouping.held_bytes(lengths, self._cost)

    def join(self, row: Row) -> None:
        """Take a prefilled row with its caches; the last of its ids is what it feeds first."""
        cache, row.cache = row.cache, []
        self._groups.append(_Group([row], cache, mx.array([row.ids[-1]], dtype=mx.uint32)))

    def leave(self, leaving: Collection[Row]) -> None:
        """Drop rows; the others keep their caches and pending tokens."""
        staying = []
        for group in self._groups:
            places = [place for place, row in enumerate(group.rows) if row not in leaving]
            if places:
                group.keep(places)
                staying.append(group)
        self._groups = staying

    def clear(self) -> None:
        """Drop every row and all state, also after a step that failed half-way."""
        self._groups = []

    def take_last(self) -> list[tuple[Row, int]]:
        """Wait for the last tokens of rows that are at their length limit, and drop those rows.

        Before `step`, so that nobody pays for a forward pass after its last token.
        """
        last = [
            (row, token)
            for group in self._groups
            if any(_is_last(row) for row in group.rows)
            for row, token in group.read(group.pending)
            if _is_last(row)
        ]
        self.leave([row for row, _ in last])
        return last

    def step(self, pool_bytes: int) -> list[tuple[Row, int]]:
        """Advance every row by one token; returns the tokens that became known, with their rows.

        Rows that have just joined have none yet. All rows stay until `leave`. pool_bytes: what all caches
        together may grow to.
        """
        self._arrange(pool_bytes)
        fed = [self._advance(group) for group in self._groups]
        known = [pair for group, tokens in zip(self._groups, fed, strict=True) for pair in group.read(tokens)]
        for row in self.rows:
            row.primed = True
            row.sampled += 1
        return known

    def _advance(self, group: _Group) -> mx.array:
        """Start a group's forward pass; returns what it was fed."""
        fed = group.pending
        logits = self._model(fed[:, None], cache=group.caches)[:, -1, :]
        group.pending = sample(logits, group.rows)
        # Layers without rotary embedding never read their offset: unevaluated, it would gather a graph node
        # (1.6 KB) per layer and step.
        mx.async_eval(group.pending, *_offsets(group.caches))  # type: ignore[no-untyped-call]
        return fed

    def _arrange(self, pool_bytes: int) -> None:
        """Groups as few as the pool allows."""
        if self._shares is False or len(self.rows) < 2:
            return
        while split := grouping.to_split(self._lengths(), self._cost, pool_bytes):
            group, place = split
            self._groups.append(self._groups[group].split(place))
        while merge := grouping.to_merge(self._lengths(), self._cost, pool_bytes):
            if self._shares is None:
                self._shares = shares_passes(self._model, self._make_cache)
            if not self._shares:
                return
            into, other = merge
            self._groups[into].take(self._groups.pop(other))

    def _lengths(self) -> list[list[int]]:
        return [[row.projection().tokens() for row in group.rows] for group in self._groups]


def _offsets(caches: Iterable[Any]) -> Iterator[mx.array]:
    """The offsets that batch versions of caches keep as arrays, one per row."""
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _offsets(cache.caches)
        elif isinstance(offset := getattr(cache, "offset", None), mx.array):
            yield offset


def _is_last(row: Row) -> bool:
    return row.primed and row.emitted + 1 >= row.plan.max_tokens
