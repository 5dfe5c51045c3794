"""A layer's slots with the reads that are under way into them.

Keeps table, memory and reads in step: a slot is overwritten only once everything has run that reads what it
holds, and an expert counts as held only once its read has ended. Owned by the engine's thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future

from mlxpool.shared.colibri.layout import ExpertLayout
from mlxpool.worker.colibri.contract import ReadDone
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.lookahead import Gate
from mlxpool.worker.colibri.reads import Read, Reads
from mlxpool.worker.colibri.residency import Placement, Residency
from mlxpool.worker.colibri.slab import Slab


class Slots:
    """guessed: experts that a guess of what is needed names. issued, used, wasted: of reads ahead."""

    def __init__(self, layout: ExpertLayout, slab: Slab, reads: Reads, guessed: int) -> None:
        self.layout = layout
        self.slab = slab
        self.table = Residency(layout.experts, slab.slots)
        self.gate = Gate(guessed)
        self.issued = self.used = self.wasted = 0
        # Grows whenever an expert comes or goes.
        self.changes = 0
        self._reads = reads
        self._coming: dict[int, Read] = {}
        self._guess: Sequence[int] = ()
        # Read ahead and not yet asked for.
        self._unasked: set[int] = set()

    def begin(self, placements: Iterable[Placement], *, demand: bool = True) -> None:
        """Read these; what their slots held is gone."""
        self.slab.settle()
        for placement in placements:
            expert, slot = placement
            lost = self.table.begin(placement)
            self.changes += 1
            if lost in self._unasked:
                self._unasked.discard(lost)
                self.wasted += 1
            try:
                self._coming[expert] = self._reads.begin(self.layout, expert, self.slab, slot, demand=demand)
            except BaseException:
                self.table.failed(expert)
                raise
            if not demand:
                self._unasked.add(expert)
                self.issued += 1

    def hasten(self, experts: Iterable[int]) -> None:
        """A pass needs these, which are being read: before what it asks for next."""
        for expert in experts:
            self._reads.hasten(self._coming[expert])

    def finish(self, experts: Iterable[int]) -> None:
        """Wait for these, which are being read. Raises ReadFault; those behind it are still being read."""
        began = time.perf_counter()
        try:
            for expert in experts:
                self._finish(expert)
        finally:
            self._reads.tally.waited(time.perf_counter() - began)

    def coming(self, expert: int) -> Future[ReadDone]:
        """The read of an expert that is being read."""
        return self._coming[expert].future

    def is_there(self, expert: int) -> bool:
        """Whether to `finish` this one, which is being read, takes no waiting any more."""
        return self._coming[expert].future.done()

    def _finish(self, expert: int, *, used: bool = True) -> None:
        read = self._coming.pop(expert)
        try:
            self._reads.finish(self.layout, read)
        except BaseException:
            self.table.failed(expert)
            self._unasked.discard(expert)
            raise
        self.table.loaded(expert, used=used)

    def _drop(self, expert: int) -> bool:
        """Give up a read that hasn't begun; whether it is given up."""
        if not self._reads.drop(self.layout, self._coming[expert]):
            return False
        del self._coming[expert]
        self.table.failed(expert)
        if expert in self._unasked:
            self._unasked.discard(expert)
            self.issued -= 1
        return True

    def end_reads(self) -> None:
        """Nothing is being read any more when this returns. Faults are told to nobody: who needs the expert
        asks again."""
        for expert in [one for one in list(self._coming) if not self._drop(one)]:
            with contextlib.suppress(Exception):
                self._finish(expert, used=expert not in self._unasked)

    def expect(self, experts: Sequence[int]) -> None:
        """The next pass is likely to need these, the likeliest first: begin to read them."""
        self._guess = experts
        placements = self.table.ahead(experts, self.gate.most)
        if placements:
            self.begin(placements, demand=False)

    def take_in(self, needed: Collection[int]) -> None:
        """A pass needs these. What was read ahead is counted in, what hadn't its turn is given up, what is
        still being read stays so."""
        ahead = len(self._coming)
        unbegun = 0
        for expert in list(self._coming):
            if self._coming[expert].future.done():
                # If it is needed after all it is read again, and told of then.
                with contextlib.suppress(ReadFault):
                    self._finish(expert, used=expert in needed)
            else:
                unbegun += self._drop(expert)
        if self._guess:
            self.gate.told(self._guess, needed)
            self.gate.turned(ahead, unbegun)
            self._guess = ()
        if self._unasked:
            asked = self._unasked.intersection(needed)
            self.used += len(asked)
            self._unasked -= asked

    def turn_ended(self) -> None:
        """Reads ahead are judged anew. The pass that was guessed at last may never come."""
        self.gate.reset()
        self._guess = ()

    def resize(self, slots: int) -> None:
        """Have so many, at a point where no pass is under way; pins and what was used last stays."""
        self.end_reads()
        if slots == self.table.slots:
            return
        moves = self.table.resize(slots)
        lost = self._unasked.difference(self.table.held)
        self.wasted += len(lost)
        self._unasked -= lost
        self.changes += 1
        self.slab.resize(slots, moves)
