"""The decode batch: one step gives every row its next token.

Built on the batch versions of mlx-lm's caches (merge, extend, filter, extract) rather than on its
BatchGenerator, for three reasons that showed in measurement. A lone row runs on its plain caches with one
argmax, as a plain mlx-lm loop does, and is merged only when a second row comes. A row that is at its
length limit leaves before the next step, so its last token costs no forward pass. And nothing the answer
doesn't need (log-probabilities of the whole vocabulary) is computed.

Rows share a forward pass in groups: `grouping` says which. Rows of a model that can't share one
(`shares_passes`) are groups of one each, and rows of different sets of adapters are in different groups; all
of them still get their tokens in turns, one each in every step. A group that fails is dropped with its rows;
the others notice nothing.

A step is a pipeline of depth one: the forward pass that makes the next tokens is started first, then the
tokens of the previous one are read, so the Python between two steps runs beside the computation. Where a
grammar decides what may come next, a draw must wait until the token before it has been read: there the step
starts the forward pass without the draw, and `finish` adds it once the token has gone through the matcher,
which happens beside the forward pass as well. The invariant between steps: the caches hold everything a row
has said up to, and without, its `pending` token.

Where a pass takes seconds (experts that are read from disk) there is nothing to hide beside it and much to
lose: a token would be told one pass late, and a pass after the last token be for nothing. Such a batch is
`eager`: a step is forward pass, draw and reading, in this order, so `pending` is known and among the row's
ids when the next one begins.

A lone row goes in rounds (`speculation`) where there is a draft for the model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from mlxpool.shared.errors import ApiError
from mlxpool.worker.adapters.layers import Switch
from mlxpool.worker.colibri.faults import Interrupted, ReadFault
from mlxpool.worker.engine import grouping
from mlxpool.worker.engine.admission import KvCost
from mlxpool.worker.engine.group import Fed, Group, Sampled
from mlxpool.worker.engine.masks import Masks
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.sharing import shares_passes
from mlxpool.worker.engine.speculation import Draft, Rounds

# Copying the keys and values of more tokens into other rows' caches takes longer than a pass of their own:
# 6,000 beside a short row took 0.6 s on a CPU, where a pass takes 0.1.
DEAR_TOKENS = 1024


class Failed(NamedTuple):
    """Rows that a fault took out of the batch."""

    rows: list[Row]
    error: Exception


class DecodeBatch:
    """The rows that decode. Engine thread only. No call raises: what failed is in `take_failed`.

    switch: over the model, whose passes are those of its rows' adapters. parting: called with each row that
    leaves, its group's caches, its place in them (None for a row that has them alone), and how many of its
    ids they hold. eager: see above. draft: of a lone row's tokens, None for none.
    """

    def __init__(
        self,
        switch: Switch,
        make_cache: Callable[[], list[Any]],
        cost: KvCost,
        parting: Callable[[Row, list[Any], int | None, int], None] = lambda *_: None,
        eager: bool = False,
        draft: Draft | None = None,
    ) -> None:
        self._switch = switch
        self._eager = eager
        self._make_cache = make_cache
        self._cost = cost
        self._parting = parting
        self._rounds = None if draft is None else Rounds(draft)
        self.shares: bool | None = None  # not tried yet
        self._masks = Masks()
        self._groups: list[Group] = []
        self._drawing: list[Group] = []  # between `step` and `finish`
        self._failed: list[Failed] = []
        self._arranged_for: int | None = None  # the pool's bytes that the groups fit

    @property
    def rows(self) -> list[Row]:
        if len(self._groups) == 1:
            return self._groups[0].rows
        return [row for group in self._groups for row in group.rows]

    @property
    def held_bytes(self) -> int:
        """What the rows' caches take now, padding included."""
        lengths = [[len(row.ids) for row in group.rows] for group in self._groups]
        return grouping.held_bytes(lengths, self._cost)

    def take_failed(self) -> list[Failed]:
        """What failed since the last call; those rows are no longer in the batch."""
        failed, self._failed = self._failed, []
        return failed

    def join(self, row: Row) -> None:
        """Take a prefilled row with its caches; the last of its ids is what it feeds first."""
        cache, row.cache = row.cache, []
        self.unsettle()
        fed = Fed(mx.array([row.ids[-1]], dtype=mx.uint32), {})
        self._groups.append(Group([row], cache, fed))

    def unsettle(self) -> None:
        """Rows have come, left or grown by a block: the groups are arranged anew."""
        self._arranged_for = None

    def leave(self, leaving: Collection[Row]) -> None:
        """Drop rows; the others keep their caches and pending tokens."""
        if not leaving:
            return
        self.unsettle()
        for group in list(self._groups):
            places = [place for place, row in enumerate(group.rows) if row not in leaving]
            self._part(group, leaving)
            if not places:
                self._groups.remove(group)
                continue
            try:
                group.keep(places)
            except Exception as err:
                # Those that leave have ended already: this fault is not theirs.
                group.rows = [group.rows[place] for place in places]
                self._drop(group, err)

    def _part(self, group: Group, leaving: Collection[Row]) -> None:
        for place, row in enumerate(group.rows):
            if row not in leaving:
                continue
            if self._rounds is not None:
                self._rounds.part(row)
            # The last of the ids it came with is fed by its first step, and by each where steps are eager.
            held = len(row.ids) if row.primed and not self._eager else len(row.ids) - 1
            try:
                self._parting(row, group.caches, place if len(group.rows) > 1 else None, held)
            except Exception as err:
                # What could not be kept is the next prompt's loss, not this one's.
                traceback.print_exception(err)

    def take_last(self) -> list[Sampled]:
        """Wait for the last tokens of rows that are at their length limit, and drop those rows.

        Before `step`, so that nobody pays for a forward pass after its last token. None where steps are
        eager: there such rows have left.
        """
        if self._eager:
            return []
        ending = [group for group in self._groups if any(map(_is_last, group.rows))]
        last: list[Sampled] = []
        for group in ending:
            sampled = self._read(group, group.rows, group.pending)
            last += [one for one in sampled if _is_last(one.row)]
        self.leave([one.row for one in last])
        return last

    def step(self, pool_bytes: int) -> Iterable[Sampled]:
        """Advance every row by one token; returns the tokens that became known, with their rows.

        Rows that have just joined have none yet, unless steps are eager. A round's tokens are drawn while
        they are taken, each once the one before has been accepted. All rows stay until `leave`. pool_bytes:
        what all caches together may grow to. `finish` must follow, once the tokens have been accepted by
        their constraints.
        """
        self._arrange(pool_bytes)
        if self._rounds is not None:
            if len(rows := self.rows) == 1:
                return self._round(self._rounds, self._groups[0])
            for row in rows:
                self._rounds.part(row)
        if len({group.namespace for group in self._groups}) > 1:
            for row in self.rows:
                row.took_turns = True
        started: list[tuple[Group, list[Row], Fed]] = []
        for group in list(self._groups):
            primed = [row for row in group.rows if row.primed]
            try:
                fed = group.forward(self._switch.under(group.adapters))
                if group.constrained and not self._eager:
                    group.start()
                    self._drawing.append(group)
                else:
                    group.draw(self._masks, self._fail_row)
                if self._eager:
                    primed, fed = group.rows, group.pending
                started.append((group, primed, fed))
            except Exception as err:
                self._drop(group, err)
        known: list[Sampled] = []
        for group, primed, fed in started:
            if primed:
                read = self._read(group, group.rows, fed)
                known += read if len(primed) == len(read) else [one for one in read if one.row in primed]
        return known

    def _round(self, rounds: Rounds, group: Group) -> Iterator[Sampled]:
        try:
            yield from rounds.round(self._switch.under(group.adapters), group, self._masks, self._fail_row)
        except Exception as err:
            rounds.give_up(group)
            self._drop(group, err)

    def finish(self) -> None:
        """Start the draws that had to wait for the tokens of `step`; the round that it was is over."""
        if self._rounds is not None:
            self._rounds.settle()
        drawing, self._drawing = self._drawing, []
        for group in drawing:
            if group in self._groups:
                try:
                    group.draw(self._masks, self._fail_row)
                except Exception as err:
                    self._drop(group, err)

    def _read(self, group: Group, rows: list[Row], fed: Fed) -> list[Sampled]:
        try:
            return Group.read(rows, fed)
        except Exception as err:
            self._drop(group, err)
            return []

    def _drop(self, group: Group, err: Exception) -> None:
        """A step of this group failed: its caches may be half-written."""
        if not isinstance(err, Interrupted | ReadFault):
            traceback.print_exception(err)
        if group in self._groups:
            self._groups.remove(group)
        self._failed.append(Failed([row for row in group.rows if not row.ended], err))

    def _fail_row(self, row: Row, err: Exception) -> None:
        if not isinstance(err, ApiError):
            traceback.print_exception(err)
        self._failed.append(Failed([row], err))

    def try_sharing(self) -> None:
        """Find out whether rows may share passes, once: best while nothing runs, for it takes several."""
        if self.shares is None:
            self.shares = shares_passes(self._switch.under(None), self._make_cache)

    def _arrange(self, pool_bytes: int) -> None:
        """Groups as few as the pool allows."""
        if self.shares is False or pool_bytes == self._arranged_for:
            return
        self._arranged_for = pool_bytes
        while split := grouping.to_split(self._lengths(), self._cost, pool_bytes):
            place, row = split
            group = self._groups[place]
            try:
                self._groups.append(group.split(row))
            except Exception as err:
                self._drop(group, err)
        while merge := grouping.to_merge(
            self._lengths(),
            self._cost,
            pool_bytes,
            self._apart(),
            [group.namespace for group in self._groups],
        ):
            self.try_sharing()
            if not self.shares:
                return
            into, other = (self._groups[place] for place in merge)
            try:
                into.take(other)
                self._groups.remove(other)
            except Exception as err:
                self._drop(into, err)
                if other in self._groups:
                    self._drop(other, err)

    def _apart(self) -> set[int]:
        """Groups that would be copied into another for one token."""
        return {
            place
            for place, group in enumerate(self._groups)
            if sum(len(row.ids) for row in group.rows) > DEAR_TOKENS
            and all(row.emitted + 1 >= row.plan.max_tokens for row in group.rows)
        }

    def _lengths(self) -> list[list[int]]:
        return [[row.projection().tokens() for row in group.rows] for group in self._groups]


def _is_last(row: Row) -> bool:
    return row.primed and row.emitted + 1 >= row.plan.max_tokens
