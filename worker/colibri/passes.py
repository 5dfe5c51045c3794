"""One layer's experts over one pass: what is held computes while what is missing is read.

A decode step computes the hits, then the misses as they come. A pass of many rows, or of more experts than
there are slots for, goes group by group (sweep.py). Rows are put back in order at the end, so that a pass is
a function of its input alone, whatever was held. Everything runs on the engine's thread. What a pass began it
also ends: where it fails or is given up, reads that had not begun are cancelled, the others waited for, and
the table is whole.

Python makes a step's graph while its experts are read: its own products, and where the model allows it
(`defers`) the next layer's attention. MLX computes nothing of that before the next layer asks its router,
which waits for the experts first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxpool.worker.colibri import sweep
from mlxpool.worker.colibri.experts import SORTED_FROM, Activation, Experts
from mlxpool.worker.colibri.faults import Interrupted
from mlxpool.worker.colibri.ledger import Ledger
from mlxpool.worker.colibri.lookahead import Guess
from mlxpool.worker.colibri.reads import Read, Reads
from mlxpool.worker.colibri.residency import Pass, Placement
from mlxpool.worker.colibri.slab import STAGED, Slab
from mlxpool.worker.colibri.slots import Slots
from mlxpool.worker.colibri.sweep import Group, Ids

# Activations of a group are computed in blocks of rows that take so much at most.
BLOCK_BYTES = 256 * 1024 * 1024

# How long a step waits for its first expert before it makes the graphs of all.
BEGIN_S = 0.001

# Passes over a resident layer whose routed ids wait in MLX's hands before they are counted.
_UNCOUNTED = 64


class Pulse:
    """Shared by all layers. progress: grows with each layer and group; any thread may read it. stop: asked in
    between whether to give the pass up. sync_s: spent waiting for routers. unfinished: the layer whose step
    was given to the model before its experts were there."""

    def __init__(self) -> None:
        self.progress = 0
        self.stop: Callable[[], bool] = lambda: False
        self.sync_s = 0.0
        self.unfinished: Layer | None = None

    def beat(self) -> None:
        """Raises Interrupted."""
        self.progress += 1
        if self.stop():
            raise Interrupted("the pass was given up")

    def reach(self, layer: int) -> None:
        """A pass has come to this layer, and what it was given may be computed after this. What this layer
        or one behind it has left is of a pass that failed: nobody wants it. Raises ReadFault."""
        if self.unfinished is not None and self.unfinished.layout.layer >= layer:
            self.drop()
        self.finish()

    def finish(self) -> None:
        """What the model has been given may be computed after this. Raises ReadFault."""
        layer, self.unfinished = self.unfinished, None
        if layer is not None:
            layer.finish()

    def drop(self) -> None:
        """Nobody wants it any more."""
        layer, self.unfinished = self.unfinished, None
        if layer is not None:
            layer.end_reads()


class _Coming(NamedTuple):
    """An expert that is being read into a slot, and the product that may be computed then."""

    expert: int
    slab: Slab
    product: mx.array


class _Step(NamedTuple):
    """A step that lacks experts. y: of all its rows. used: to be counted as used when they are there."""

    coming: list[_Coming]
    y: mx.array
    used: list[int]


class Ways(NamedTuple):
    """overlap: compute while reading. prefetch: read what the next layer is likely to need."""

    overlap: bool
    prefetch: bool


class Layer:
    """working: gives the slots that layers of this kind share, made when they are first needed. after: the
    next streamed layer's slots and what tells of its choices. defers: whether a step may be given to the
    model before its experts are there; whoever sets it has `Pulse.finish` called before anything is computed
    of that."""

    def __init__(
        self,
        slots: Slots,
        working: Callable[[], Slab],
        experts: Experts,
        reads: Reads,
        pulse: Pulse,
        ledger: Ledger,
        ways: Ways,
    ) -> None:
        self.slots = slots
        self.layout = slots.layout
        self.after: tuple[Slots, Guess] | None = None
        self.defers = False
        self.hits = self.misses = self.sweeps = 0
        self._working = working
        self._experts = experts
        self._reads = reads
        self._pulse = pulse
        self._ledger = ledger
        self._ways = ways
        # Guessed for the next layer in this pass.
        self._guessed: list[int] = []
        # On their way into working slots.
        self._passing: dict[int, Read] = {}
        self._unfinished: _Step | None = None
        # Slots by expert for `_resident`, of the state of the table at `changes`.
        self._order: mx.array | None = None
        self._ordered_at = -1
        self._uncounted: list[mx.array] = []
        hidden = next(one.shape[0] for one in self.layout.parts if one.projection == "gate_proj")
        inputs = next(one.shape[0] for one in self.layout.parts if one.projection == "down_proj")
        self._block = max(SORTED_FROM, BLOCK_BYTES // (4 * (2 * inputs + 3 * hidden)))

    @property
    def activation(self) -> Activation:
        return self._experts.activation

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """x [B, T, D], indices [B, T, K]: [B, T, K, D]. Raises ReadFault, Interrupted."""
        try:
            self._pulse.beat()
            self._pulse.reach(self.layout.layer)
        except BaseException:
            self._pulse.drop()
            raise
        table = self.slots.table
        if table.complete:
            return self._resident(x, indices)
        ids = self._routed(x, indices)
        if ids.size >= SORTED_FROM:
            # What the router was asked with is all of a wide chunk's attention.
            self._pulse.beat()
        self._ledger.add(self.layout.layer, ids)
        needed = _counted(ids)
        self.slots.take_in(needed)
        planned = table.plan(needed)
        self.slots.hasten(one.expert for one in planned.arriving)
        self.misses += len(planned.early) + len(planned.late) + len(planned.through)
        self.hits += len(planned.hits) + len(planned.arriving)
        self.sweeps += bool(planned.late or planned.through)
        few = ids.size < SORTED_FROM
        # The most needed are used last.
        used = sorted(needed, key=lambda expert: needed[expert])
        try:
            if few and not (planned.arriving or planned.early or planned.late or planned.through):
                self._read_ahead()
                y = self._whole(x, ids)
            elif few and self._has_room(planned):
                return self._step(x, ids, planned, used)
            else:
                y = self._sweep(x, ids, planned)
        except BaseException:
            self.end_reads()
            raise
        self._touch(used)
        return y

    def _has_room(self, planned: Pass) -> bool:
        """Whether all that is missing may be read at once."""
        if planned.late:
            return False
        if not planned.through:
            return True
        together = self._ways.overlap and self.slots.slab.mode == "direct"
        return together and len(planned.through) <= self._working().slots

    def _touch(self, used: list[int]) -> None:
        """Those of them that are held."""
        table = self.slots.table
        table.touch([expert for expert in used if expert in table.held])

    def finish(self) -> None:
        """Wait for what the step lacks, each computed as soon as it is there. Raises ReadFault."""
        step, self._unfinished = self._unfinished, None
        if step is None:
            return
        begun: list[_Coming] = []
        left = step.coming
        try:
            while left:
                count = self._finish_first(left)
                now, left = left[:count], left[count:]
                if left:
                    mx.async_eval([one.product for one in now])  # type: ignore[no-untyped-call]
                    begun += now
        except BaseException:
            self.end_reads()
            for one in begun:
                one.slab.hold(one.product)
            raise
        for slab in {id(one.slab): one.slab for one in step.coming}.values():
            slab.hold(step.y)
        self._touch(step.used)

    def _finish_first(self, coming: Sequence[_Coming]) -> int:
        """Wait for the first of these; how many from there on are there now."""
        slab = coming[0].slab
        own = slab is self.slots.slab
        count = 1
        while count < len(coming) and coming[count].slab is slab:
            expert = coming[count].expert
            if not (self.slots.is_there(expert) if own else self._passing[expert].future.done()):
                break
            count += 1
        experts = [one.expert for one in coming[:count]]
        if own:
            self.slots.finish(experts)
        else:
            self._finish_passing(experts)
        return count

    def end_reads(self) -> None:
        """Nothing is being read for this layer any more when this returns, and no step waits for it."""
        self._unfinished = None
        self.slots.end_reads()
        for read in self._passing.values():
            if not self._reads.drop(self.layout, read):
                with contextlib.suppress(Exception):
                    self._reads.finish(self.layout, read)
        self._passing.clear()

    def _resident(self, x: mx.array, indices: mx.array) -> mx.array:
        """As mlx-lm does it, without knowing here what was routed to."""
        self._uncounted.append(indices)
        # The last layer of a long prompt's chunk is computed for nobody; what waits keeps its inputs alive.
        if len(self._uncounted) > _UNCOUNTED or indices.size >= SORTED_FROM:
            self.count_routed(but_last=True)
        if self._ordered_at != self.slots.changes:
            held = self.slots.table.held
            order = [held[expert] for expert in range(self.layout.experts)]
            self._order = None if order == sorted(order) else mx.array(order, dtype=mx.uint32)
            self._ordered_at = self.slots.changes
        return self._product(x, indices if self._order is None else self._order[indices])

    def count_routed(self, *, but_last: bool = False) -> None:
        """Count what resident passes asked for. but_last: the last one's graph is still being built."""
        kept = self._uncounted[-1:] if but_last else []
        for indices in self._uncounted[: len(self._uncounted) - len(kept)]:
            ids = np.array(indices)
            self._ledger.add(self.layout.layer, ids)
            self.hits += len(np.unique(ids))
        self._uncounted = kept

    def _routed(self, x: mx.array, indices: mx.array) -> Ids:
        """What the router chose; and in the same wait, what the next one is likely to."""
        self._guessed = []
        likely = None
        if self.after is not None and self._ways.prefetch and indices.size < SORTED_FROM:
            slots, guess = self.after
            if slots.gate.open and not slots.table.complete:
                likely = guess(x)
        began = time.perf_counter()
        if likely is None:
            mx.eval(indices)
        else:
            mx.eval(indices, likely)
            # Every token's likeliest before any token's second.
            self._guessed = list(dict.fromkeys(np.array(likely)[0].T.reshape(-1).tolist()))
        self._pulse.sync_s += time.perf_counter() - began
        ids: Ids = np.array(indices)
        return ids

    def _read_ahead(self) -> None:
        if self.after is not None and self._guessed:
            self.after[0].expect(self._guessed)

    def _step(self, x: mx.array, ids: Ids, planned: Pass, used: list[int]) -> mx.array:
        """Few rows, and all that is missing has a place. used: as of `_Step`."""
        slots, slab = self.slots, self.slots.slab
        slots.begin(planned.early)
        through = [Placement(expert, slot) for slot, expert in enumerate(sorted(planned.through))]
        working = self._working() if through else slab
        self._pass_through(working, through)
        self._read_ahead()
        coming = [*planned.arriving, *planned.early]
        if not self._ways.overlap:
            slots.finish([one.expert for one in coming])
            y = self._whole(x, ids)
            self._touch(used)
            return y
        flat = ids.reshape(-1).tolist()
        order: list[int] = []
        products: list[mx.array] = []

        def product(of: Slab, placements: Sequence[Placement]) -> mx.array:
            place = dict(placements)
            rows = [row for row, expert in enumerate(flat) if expert in place]
            y = self._rows(x, ids, of, rows, [place[flat[row]] for row in rows], ordered=False)
            products.append(y)
            order.extend(rows)
            return y

        if planned.hits:
            hits = product(slab, planned.hits)
            mx.async_eval(hits)  # type: ignore[no-untyped-call]
            slab.hold(hits)
        if slab.mode == "assign":
            # What is assigned is another array: nothing can be made of it beforehand.
            slots.finish([one.expert for one in coming])
            product(slab, coming)
            y = _in_order(products, np.array(order), ids)
            slab.hold(y)
            self._touch(used)
            return y
        self._let_begin((coming or through)[0].expert)
        awaited = [_Coming(one.expert, slab, product(slab, [one])) for one in coming]
        awaited += [_Coming(one.expert, working, product(working, [one])) for one in through]
        y = _in_order(products, np.array(order), ids)
        self._unfinished = _Step(awaited, y, used)
        if self.defers:
            self._pulse.unfinished = self
        else:
            self.finish()
        return y

    def _let_begin(self, first: int) -> None:
        """Python makes what follows on one processor at a time: the readers' requests go first. first: the
        expert that is read first."""
        read = self._passing.get(first)
        futures.wait([self.slots.coming(first) if read is None else read.future], BEGIN_S)

    def _whole(self, x: mx.array, ids: Ids) -> mx.array:
        held = self.slots.table.held
        places = self.slots.slab.places([held[expert] for expert in ids.reshape(-1).tolist()])
        y = self._product(x, places.reshape(ids.shape))
        self.slots.slab.hold(y)
        return y

    def _product(self, x: mx.array, places: mx.array) -> mx.array:
        """One product of all rows out of the layer's slots, sorted where mlx-lm would."""
        x = mx.expand_dims(x, (-2, -3))
        slab = self.slots.slab
        if places.size < SORTED_FROM:
            return self._experts(slab, x, places, False).squeeze(-2)
        flat = places.flatten()
        order = mx.argsort(flat)
        y = self._experts(slab, x.flatten(0, -3)[order // places.shape[-1]], flat[order], True)
        return mx.unflatten(y[mx.argsort(order)], 0, places.shape).squeeze(-2)

    def _rows(
        self,
        x: mx.array,
        ids: Ids,
        slab: Slab,
        rows: Sequence[int] | Ids,
        places: list[int] | Ids,
        ordered: bool,
    ) -> mx.array:
        """Products of these routed rows, whose experts lie at `places` of a slab: [rows, D]."""
        flat = x.reshape(-1, 1, x.shape[-1])
        if flat.shape[0] > 1:
            flat = flat[mx.array(np.asarray(rows) // ids.shape[-1])]
        return self._experts(slab, flat, slab.places(places), ordered).squeeze(-2)

    def _sweep(self, x: mx.array, ids: Ids, planned: Pass) -> mx.array:
        """Group by group."""
        many = ids.size >= SORTED_FROM
        overlap = self._ways.overlap
        working = self._working() if planned.through else None
        shared = 0 if working is None else working.slots
        staged = STAGED if self.slots.slab.mode == "assign" else None
        lanes, width = sweep.cuts(shared, self.slots.table.slots, many=many, overlap=overlap, staged=staged)
        made = sweep.groups(planned, shared, lanes, width)
        rows, places, starts = sweep.by_group(ids, made, self.layout.experts)
        ahead = 0 if not overlap else 1 if staged is not None else None
        begun, products = 0, []
        for number, group in enumerate(made):
            upto = sweep.beginnable(made, begun, number, ahead)
            for one in made[begun:upto]:
                self._begin(one, working)
            begun = upto
            if number == 0 and not many:
                self._read_ahead()
            self._end(group)
            span = slice(starts[number], starts[number + 1])
            slab = working if group.kind == "through" and working is not None else self.slots.slab
            products += self._blocks(x, ids, slab, rows[span], places[span], many)
            self._pulse.beat()
        return _in_order(products, rows, ids)

    def _begin(self, group: Group, working: Slab | None) -> None:
        if group.kind in ("early", "late"):
            self.slots.begin(group.placements)
        elif group.kind == "through" and working is not None:
            self._pass_through(working, group.placements)

    def _pass_through(self, working: Slab, placements: Sequence[Placement]) -> None:
        """Read these into slots of no layer."""
        if placements:
            working.settle()
        for expert, slot in placements:
            self._passing[expert] = self._reads.begin(self.layout, expert, working, slot)

    def _finish_passing(self, experts: Sequence[int]) -> None:
        """Wait for these, which are being read into slots of no layer. Raises ReadFault."""
        began = time.perf_counter()
        try:
            for expert in experts:
                self._reads.finish(self.layout, self._passing.pop(expert))
        finally:
            self._reads.tally.waited(time.perf_counter() - began)

    def _end(self, group: Group) -> None:
        """Wait until the group's experts are where they belong."""
        if group.kind == "through":
            self._finish_passing([one.expert for one in group.placements])
        elif group.kind != "held":
            self.slots.finish([one.expert for one in group.placements])

    def _blocks(
        self, x: mx.array, ids: Ids, slab: Slab, rows: Ids, places: Ids, many: bool
    ) -> list[mx.array]:
        """Products of a group's rows. Of many they have been computed when this returns."""
        products = []
        for start in range(0, len(rows), self._block):
            span = slice(start, start + self._block)
            y = self._rows(x, ids, slab, rows[span], places[span], many)
            if many:
                mx.eval(y)
            else:
                mx.async_eval(y)  # type: ignore[no-untyped-call]
                slab.hold(y)
            products.append(y)
        return products


def _counted(ids: Ids) -> dict[int, int]:
    """Rows by expert."""
    if ids.size < SORTED_FROM:
        found: dict[int, int] = {}
        for expert in ids.reshape(-1).tolist():
            found[expert] = found.get(expert, 0) + 1
        return found
    experts, counts = np.unique(ids, return_counts=True)
    return dict(zip(experts.tolist(), counts.tolist(), strict=True))


def _in_order(products: list[mx.array], rows: Ids, ids: Ids) -> mx.array:
    """Products of routed rows, `rows` in the order of the products, as [B, T, K, D]."""
    y = products[0] if len(products) == 1 else mx.concatenate(products)
    back = np.empty(ids.size, np.uint32)
    back[rows] = np.arange(ids.size)
    return y[mx.array(back)].reshape(*ids.shape, -1)
