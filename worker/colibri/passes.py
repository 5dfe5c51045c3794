"""One layer's experts over one pass: what is held computes while what is missing is read.

A decode step computes the hits, then the misses as they come. A pass of many rows, or of more experts than
the layer has room for, goes group by group (sweep.py). Rows are put back in order at the end, so that a pass
is a function of its input alone, whatever was held. Everything runs on the engine's thread. What a pass began
it also ends: where it fails or is given up, reads that had not begun are cancelled, the others waited for,
and the table is whole.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxpool.worker.colibri import sweep
from mlxpool.worker.colibri.experts import SORTED_FROM, Activation, Experts
from mlxpool.worker.colibri.faults import Interrupted
from mlxpool.worker.colibri.ledger import Ledger
from mlxpool.worker.colibri.lookahead import Guess
from mlxpool.worker.colibri.reads import Read, Reads
from mlxpool.worker.colibri.residency import Pass
from mlxpool.worker.colibri.slab import STAGED, Slab
from mlxpool.worker.colibri.slots import Slots
from mlxpool.worker.colibri.sweep import Group, Ids

# Activations of a group are computed in blocks of rows that take so much at most.
BLOCK_BYTES = 256 * 1024 * 1024

# Passes over a resident layer whose routed ids wait in MLX's hands before they are counted.
_UNCOUNTED = 64


class Pulse:
    """Shared by all layers. progress: grows with each layer and group; any thread may read it. stop: asked in
    between whether to give the pass up. sync_s: spent waiting for routers."""

    def __init__(self) -> None:
        self.progress = 0
        self.stop: Callable[[], bool] = lambda: False
        self.sync_s = 0.0

    def beat(self) -> None:
        """Raises Interrupted."""
        self.progress += 1
        if self.stop():
            raise Interrupted("the pass was given up")


class Ways(NamedTuple):
    """overlap: compute while reading. prefetch: read what the next layer is likely to need."""

    overlap: bool
    prefetch: bool


class Layer:
    """working: gives the slots that layers of this kind share, made when they are first needed. after: the
    next streamed layer's slots and what tells of its choices."""

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
        self._pulse.beat()
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
        try:
            if ids.size >= SORTED_FROM or planned.late or planned.through:
                y = self._sweep(x, ids, planned)
            elif planned.early or planned.arriving:
                y = self._step(x, ids, planned)
            else:
                self._read_ahead()
                y = self._whole(x, ids)
        except BaseException:
            self.end_reads()
            raise
        held = table.held
        table.touch(sorted((one for one in needed if one in held), key=lambda expert: needed[expert]))
        return y

    def end_reads(self) -> None:
        """Nothing is being read for this layer any more when this returns."""
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

    def _step(self, x: mx.array, ids: Ids, planned: Pass) -> mx.array:
        """Few rows, and all that is missing has a place in the layer."""
        slots = self.slots
        slots.begin(planned.early)
        self._read_ahead()
        coming = [one.expert for one in (*planned.arriving, *planned.early)]
        if not self._ways.overlap:
            slots.finish(coming)
            return self._whole(x, ids)
        flat = ids.reshape(-1).tolist()
        place = {one.expert: one.slot for part in planned[:3] for one in part}
        order: list[int] = []
        products: list[mx.array] = []
        ready = {one.expert for one in planned.hits}
        while True:
            if ready:
                rows = [row for row, expert in enumerate(flat) if expert in ready]
                y = self._rows(x, ids, slots.slab, rows, [place[flat[row]] for row in rows], ordered=False)
                slots.slab.hold(y)
                products.append(y)
                order += rows
                if coming:
                    mx.async_eval(y)  # type: ignore[no-untyped-call]
            if not coming:
                return _in_order(products, np.array(order), ids)
            count = slots.finish_first(coming)
            ready, coming = set(coming[:count]), coming[count:]

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
        self.sweeps += bool(planned.late or planned.through)
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
            working.settle()
            for expert, slot in group.placements:
                self._passing[expert] = self._reads.begin(self.layout, expert, working, slot)

    def _end(self, group: Group) -> None:
        """Wait until the group's experts are where they belong."""
        if group.kind == "through":
            began = time.perf_counter()
            for expert, _ in group.placements:
                self._reads.finish(self.layout, self._passing.pop(expert))
            self._reads.tally.waited(time.perf_counter() - began)
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
