"""The decode batch: one step gives every row its next token.

Built on the batch versions of mlx-lm's caches (merge, extend, filter, extract) rather than on its
BatchGenerator, for three reasons that showed in measurement. A lone row runs on its plain caches with one
argmax, as a plain mlx-lm loop does, and is merged only when a second row comes. A row that is at its
length limit leaves before the next step, so its last token costs no forward pass. And nothing the answer
doesn't need (log-probabilities of the whole vocabulary) is computed.

A step is a pipeline of depth one: the forward pass that makes the next tokens is started first, then the
tokens of the previous one are read, so the Python between two steps runs beside the computation. The
invariant: the caches hold everything a row has said up to, and without, its `pending` token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx

from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.sampler import sample


def can_batch(caches: Sequence[Any]) -> bool:
    """Whether mlx-lm has a batch version of every one of a row's caches."""
    return all(hasattr(cache, "merge") for cache in caches)


class DecodeBatch:
    """The rows that decode together. Engine thread only."""

    def __init__(self, model: Any) -> None:
        self.rows: list[Row] = []
        self._model = model
        self._caches: list[Any] = []  # plain with one row, batch versions with more
        self._pending: mx.array | None = None  # [rows]

    def join(self, row: Row) -> None:
        """Take a prefilled row with its caches; the prompt's last token is what it feeds first."""
        last = mx.array([row.plan.ids[-1]], dtype=mx.uint32)
        cache, row.cache = row.cache, []
        if not self.rows:
            self._caches, self._pending = cache, last
        else:
            if len(self.rows) == 1:
                self._caches = [one.merge([one, two]) for one, two in zip(self._caches, cache, strict=True)]
            else:
                for held, new in zip(self._caches, cache, strict=True):
                    held.extend(new.merge([new]))
            assert self._pending is not None
            self._pending = mx.concatenate([self._pending, last])
        self.rows.append(row)

    def leave(self, leaving: Collection[Row]) -> None:
        """Drop rows; the others keep their caches and pending tokens."""
        keep = [place for place, row in enumerate(self.rows) if row not in leaving]
        if len(keep) == len(self.rows):
            return
        if not keep:
            self.clear()
            return
        assert self._pending is not None
        if len(keep) == 1:
            self._caches = [cache.extract(keep[0]) for cache in self._caches]
        else:
            for cache in self._caches:
                cache.filter(keep)
        self._pending = self._pending[mx.array(keep)]
        self.rows = [self.rows[place] for place in keep]

    def clear(self) -> None:
        """Drop every row and all state, also after a step that failed half-way."""
        self.rows, self._caches, self._pending = [], [], None

    def take_last(self) -> list[tuple[Row, int]]:
        """Wait for the last tokens of rows that are at their length limit, and drop those rows.

        Before `step`, so that nobody pays for a forward pass after its last token.
        """
        if not any(self._is_last(row) for row in self.rows):
            return []
        last = [(row, token) for row, token in self._read(self._pending) if self._is_last(row)]
        self.leave([row for row, _ in last])
        return last

    def step(self) -> list[tuple[Row, int]]:
        """Advance every row by one token; returns the tokens that became known, with their rows.

        Rows that have just joined have none yet. All rows stay until `leave`.
        """
        fed = self._pending
        assert fed is not None
        logits = self._model(fed[:, None], cache=self._caches)[:, -1, :]
        self._pending = sample(logits, self.rows)
        mx.async_eval(self._pending)  # type: ignore[no-untyped-call]
        known = self._read(fed) if any(row.primed for row in self.rows) else []
        for row in self.rows:
            row.primed = True
            row.sampled += 1
        return known

    def _is_last(self, row: Row) -> bool:
        return row.primed and row.emitted + 1 >= row.plan.max_tokens

    def _read(self, tokens: mx.array | None) -> list[tuple[Row, int]]:
        """Wait for sampled tokens [rows]; those of rows that only fed their prompt are no tokens."""
        assert tokens is not None
        values: Any = tokens.tolist()
        return [(row, value) for row, value in zip(self.rows, values, strict=True) if row.primed]
