"""What goes to disk, when, and in which order: a record's parents before it, states when a talk rests.

The engine's thread decides between its turns and hands over a little at a time; the writer's thread writes.
Only names wait here: what memory has let go of meanwhile is not held for the disk's sake. What the disk
refused is not offered again before a minute has passed.

Owned by the engine thread, but for `queued` and `_refused`, which the writer's thread changes too, by single
calls.
"""

from __future__ import annotations

import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable

from mlxpool.shared.kv.record_file import Tensor
from mlxpool.worker.cache.known import Queued
from mlxpool.worker.cache.layers_memory import alias, dtype_name, of_their_own
from mlxpool.worker.cache.ram import Gone, RamTier
from mlxpool.worker.cache.records import Piece
from mlxpool.worker.cache.ssd import SsdTier
from mlxpool.worker.cache.writer import Waiting, Writer

# What the writer is given at a time: enough to be busy, little enough that what is superseded meanwhile is
# not written.
_OFFERED_BYTES = 64 * 1024 * 1024

# A conversation's next turn makes the states of its last one old: those of one that goes on are not written.
STATE_PATIENCE_S = 20.0

# What a disk had no room for, it may have room for later.
_REFUSED_S = 60.0


class WriteBehind:
    """See the module. wake: makes the engine look again. clock: seconds."""

    def __init__(
        self,
        ram: RamTier,
        tier: SsdTier,
        writer: Writer,
        queued: Queued,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.writer = writer
        self.queued = queued
        self._ram, self._tier, self._wake, self._clock = ram, tier, wake, clock
        self._due_s: OrderedDict[Piece, float] = OrderedDict()
        self._states: OrderedDict[Piece, float] = OrderedDict()
        self._refused: dict[Piece, float] = {}

    @property
    def waits(self) -> bool:
        """Whether something is to be handed over, now or later."""
        return bool(self._due_s or self._states)

    def add(self, piece: Piece) -> None:
        """To be written soon; a state when its conversation has rested."""
        if piece.kind == "state":
            self._states[piece] = self._clock() + STATE_PATIENCE_S
        else:
            self._due_s[piece] = 0.0

    def forget(self, piece: Piece) -> None:
        """Not worth writing any more."""
        self._due_s.pop(piece, None)
        self._states.pop(piece, None)

    def maintain(self) -> None:
        """Hand over what is due, as much as the writer takes."""
        now_s = self._clock()
        while self._states and next(iter(self._states.values())) <= now_s:
            self._due_s[self._states.popitem(last=False)[0]] = now_s
        while self._due_s and self.has_room:
            piece, _ = self._due_s.popitem(last=False)
            part = self._ram.part(piece.record.name, piece.kind)
            ids = self._ram.ids(piece.record)
            if part is not None and ids is not None:
                self.offer(Gone(piece.record, ids, piece.kind, part))

    @property
    def has_room(self) -> bool:
        """Whether the writer takes more now."""
        return self.writer.off is None and self.writer.takes(_OFFERED_BYTES)

    def is_on_disk(self, gone: Gone) -> bool:
        return self._tier.has(Piece(gone.record, gone.kind))

    def offer_some(self, unwritten: list[Gone]) -> int:
        """Hand over the next of these, the last first, as much as the writer takes; returns how many are
        left, 0 where nothing is taken just now."""
        if self.writer.off is not None:
            return 0
        while unwritten and self.has_room:
            self.offer(unwritten.pop(), again=True)
        return len(unwritten)

    def offer(self, gone: Gone, *, again: bool = False) -> None:
        """Hand over a part, behind those slices that it is of no use without. again: also what was refused a
        moment ago."""
        for place, part in enumerate([*reversed(list(self._missing_parents(gone))), gone]):
            # Where the queue is short the beginning of a prefix is worth more than its end.
            if place and not self.writer.takes(sys.maxsize):
                return
            self._offer(part, again)

    def _missing_parents(self, gone: Gone) -> Iterable[Gone]:
        """The slices it stands on that are in memory alone, the nearest first."""
        name = gone.record.parent
        while (held := self._ram.held(name)) is not None and "slice" in held.parts:
            found = Gone(held.record, held.ids, "slice", held.parts["slice"])
            if (name, "slice") in self.queued or self._tier.has_slice(name):
                return
            yield found
            name = held.record.parent

    def _offer(self, gone: Gone, again: bool) -> None:
        piece = Piece(gone.record, gone.kind)
        key = (gone.record.name, gone.kind)
        if key in self.queued or self._tier.has(piece):
            return
        refused_s = self._refused.get(piece)
        if refused_s is not None and not again and self._clock() < refused_s + _REFUSED_S:
            return
        self.forget(piece)
        part = gone.part
        try:
            arrays = part.arrays if part.extent is None else of_their_own(part.arrays)
            buffers = {name: alias(array) for name, array in arrays.items()}
            tensors = {name: Tensor(dtype_name(array.dtype), array.shape) for name, array in arrays.items()}
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            return
        self.queued[key] = gone
        self.writer.offer(Waiting(piece, gone.ids, tensors, buffers, part.scalars))

    def wrote(self, piece: Piece, durable: bool) -> None:
        """The writer is done with a part, or has given it up. Its thread."""
        self.queued.pop((piece.record.name, piece.kind), None)
        if durable:
            self._refused.pop(piece, None)
        else:
            self._refused[piece] = self._clock()
        if self._due_s:
            self._wake()

    def tidy(self) -> None:
        """Forget refusals that are over."""
        until_s = self._clock() - _REFUSED_S
        for piece, refused_s in list(self._refused.items()):
            if refused_s < until_s:
                self._refused.pop(piece, None)
