"""Rounds of a lone row: drafts ahead of it, one pass of the model over all of them, and what the model says.

A round ends with every token of its pass known and told, as an eager step does: the next drafts are of what
follows them.

A row's draw is made of its seed and the token's position (sampler.py), and so is a draft's. The model's own
draw decides: a draft is accepted where it is the token that the model draws there anyhow, and the first one
that isn't gives way to it. For a greedy row that is the argmax. For a sampled one it is speculative sampling
(Leviathan et al., 2023; Chen et al., 2023) whose two sides draw with the same randomness: what comes has the
model's distribution because it is the model's draw, and the same seed gives the same answer with drafts and
without. It costs a few acceptances: at least (1 - d) / (1 + d) of the drafts are accepted at a total
variation distance d (Daliri et al., 2025), where fresh randomness gets 1 - d.

A position is drawn only once the token before it has gone through the row's grammar, its text and its
penalties, as in a step, so nothing of those is ever taken back. The caches are: what the pass wrote for
drafts that did not come is cut off again. What it wrote for those that came is what single steps would have
written, up to the rounding of products of several rows (4e-6 in float32), as between prefill and decode.
Rows whose caches can't be cut exactly, and rows that share passes, are not drafted. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from mlxpool.worker.engine.group import Fed, Group, Sampled
from mlxpool.worker.engine.masks import Masks
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.sampler import Noise, sample
from mlxpool.worker.request.plan import Sampling

# Draws a row's token [1] from the draft's logits [1, vocabulary], `ahead` positions past the next one.
Draw = Callable[[mx.array, int], mx.array]


class Draft(Protocol):
    """Guesses at the next tokens of one row at a time. Engine thread only."""

    @property
    def ahead(self) -> int:
        """How many tokens it guesses at most, 1 or more."""
        ...

    def open(self) -> None:
        """Another row, or one that has gone on without it: what is known of the last one is forgotten."""
        ...

    def propose(self, ids: Sequence[int], count: int, draw: Draw) -> Sequence[int]:
        """At most `count` tokens that may follow `ids`, of which the model's caches hold all but the last.

        The next pass is over that one and these. Of the guesses before, those came that are in `ids`.
        """
        ...

    def close(self) -> None:
        """The row has ended: give back what is held for it."""
        ...


class _Ahead:
    """A row as a draw sees it some positions later."""

    def __init__(self, row: Row, ahead: int) -> None:
        self.sampling: Sampling = row.sampling
        self.xtc_keeps = row.xtc_keeps
        self.noise: Noise = row.noise
        self.sampled = row.sampled + ahead


class Rounds:
    """One model's, one after the other."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._row: Row | None = None  # that the draft is open for
        self._held: tuple[Group, int] | None = None  # a round's, and how many ids its caches hold

    def round(
        self, model: Any, group: Group, masks: Masks, failed: Callable[[Row, Exception], None]
    ) -> Iterator[Sampled]:
        """The tokens of one pass, each drawn when the one before has been told. `settle` must follow.

        group: of one row. Raises what the model and the draft raise; the caches may be half-written then.
        """
        (row,) = group.rows
        self._held = group, len(row.ids) - 1
        if row.sampled > row.emitted:
            # Drawn by a step that others shared, when these ids had all gone through the model.
            self._held = group, len(row.ids)
            yield from Group.read(group.rows, group.pending)
            if row.ended:
                return
        drafts = self._proposed(group, row)
        tokens = [row.ids[-1], *drafts]
        group.pending = Fed(mx.array(tokens[:1], dtype=mx.uint32), {})
        self._held = group, len(row.ids) + len(drafts)
        lines = group.verify(model, tokens)
        faults: list[Exception] = []
        for place in range(len(tokens)):
            if row.ended or row.cancelled:
                return
            group.draw_from(lines[place : place + 1], masks, lambda _, err: faults.append(err))
            if faults:
                failed(row, faults[0])
                return
            (sampled,) = Group.read(group.rows, group.pending)
            comes = place < len(drafts) and sampled.token == drafts[place]
            row.accepted += comes
            yield sampled
            if not comes:
                return

    def _proposed(self, group: Group, row: Row) -> list[int]:
        if not can_rewind(group.caches):
            return []
        row.speculates = True
        # A pass gives one token more than it has drafts.
        count = min(self._draft.ahead, row.plan.max_tokens - row.emitted - 1)
        if self._row is not row:
            self._row = row
            self._draft.open()

        def draw(logits: mx.array, ahead: int) -> mx.array:
            return sample(logits, [_Ahead(row, ahead)])

        drafts = list(self._draft.propose(row.ids, count, draw))
        row.drafted += len(drafts)
        return drafts

    def settle(self) -> None:
        """Cut off what the last round's pass wrote beyond what has been told."""
        if self._held is None:
            return
        (group, held), self._held = self._held, None
        (row,) = group.rows
        row.primed = False
        group.pending = Fed(mx.array(row.ids[-1:], dtype=mx.uint32), {})
        if more := held - (len(row.ids) - 1):
            for cache in group.caches:
                cache.trim(more)

    def part(self, row: Row) -> None:
        """A row leaves, or goes on in steps."""
        if row is self._row:
            self._row = None
            self._draft.close()

    def give_up(self, group: Group) -> None:
        """The round failed."""
        self._held = None
        for row in group.rows:
            self.part(row)


def can_rewind(caches: Sequence[Any]) -> bool:
    """Whether the last tokens of these can be taken back as if they had never been: not out of windows that
    have wrapped, out of states, or out of what is quantised together."""
    return all(
        can_rewind(cache.caches) if isinstance(cache, CacheList) else isinstance(cache, KVCache)
        for cache in caches
    )
