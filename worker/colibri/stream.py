"""A model's routed experts, streamed: the slots of all layers, what they share, and what is known of them.

Owned by the engine's thread, which is the only one that calls the model, and between passes `preload`,
`turn_ended`, `resize` and `close`. `stats`, `heat` and `progress` are for any thread at any time: plain
numbers, no mx call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from mlx import nn
from mlx_lm.models.switch_layers import SwiGLU

from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.layout import Artifact, ExpertLayout
from mlxpool.shared.colibri.stats import ColibriStats, HeatMap, LayerHeat, ResidencyStats
from mlxpool.worker.colibri.contract import ExpertReader, ExpertSource
from mlxpool.worker.colibri.experts import Constants, Experts
from mlxpool.worker.colibri.ledger import Ledger
from mlxpool.worker.colibri.load import module_at, put
from mlxpool.worker.colibri.lookahead import guesses
from mlxpool.worker.colibri.passes import Layer, Pulse, Ways
from mlxpool.worker.colibri.reads import Reads, latency
from mlxpool.worker.colibri.residency import Placement, choose_pins
from mlxpool.worker.colibri.slab import STAGED, Slab, Staging, Writing, writing
from mlxpool.worker.colibri.slots import Slots
from mlxpool.worker.colibri.sweep import cut
from mlxpool.worker.colibri.switch import StreamedSwitchGLU


class _Set:
    """The layers of the main model, or of its draft layer. working: slots, 0 where every expert is planned to
    be held; should that change, as few are made as a token needs."""

    def __init__(self, reads: Reads, slots: int, working: int, least: int, mode: Writing) -> None:
        self.reads = reads
        self.planned = slots
        self.slots = slots
        self.working = working
        self.layers: list[Layer] = []
        self._least = least
        self._mode = mode
        self._slabs: dict[tuple[object, ...], Slab] = {}

    def working_of(self, layout: ExpertLayout) -> Callable[[], Slab]:
        """Made now where there are to be any, else when they are first needed."""

        def made() -> Slab:
            slab = self._slabs.get(layout.kind)
            if slab is None:
                slab = Slab(layout, self.working or min(layout.experts, self._least), self._mode)
                self._slabs[layout.kind] = slab
            return slab

        if self.working:
            made()
        return made

    def slab_bytes(self) -> int:
        slabs = [layer.slots.slab for layer in self.layers]
        return sum(slab.held_bytes for slab in [*slabs, *self._slabs.values()])

    def stats(self) -> ResidencyStats:
        layers, tally = self.layers, self.reads.tally
        slots = [layer.slots for layer in layers]
        tables = [one.table for one in slots]
        return ResidencyStats(
            layers=len(layers),
            experts=max((table.experts for table in tables), default=0),
            slots=max((table.slots for table in tables), default=0),
            planned_slots=self.planned,
            working_slots=max((slab.slots for slab in list(self._slabs.values())), default=0),
            resident=sum(len(table.held) for table in tables),
            pinned=sum(len(table.pinned) for table in tables),
            hits=sum(layer.hits for layer in layers),
            misses=sum(layer.misses for layer in layers),
            loads=tally.loads,
            evictions=sum(table.evictions for table in tables),
            read_bytes=tally.read_bytes,
            wait_s=tally.wait_s,
            wait=latency(tally.waits, list(tally.waits_s)),
            service=latency(tally.loads, list(tally.services_s)),
            prefetch_issued=sum(one.issued for one in slots),
            prefetch_used=sum(one.used for one in slots),
            prefetch_wasted=sum(one.wasted for one in slots),
            sweeps=sum(layer.sweeps for layer in layers),
            bytes=self.slab_bytes(),
        )


class ExpertStream:
    """artifact, source: with layouts as this backend's slots hold them. Memory for slots is taken by
    `install`. Raises ValueError where `launch.write` can't be had."""

    def __init__(
        self,
        artifact: Artifact,
        source: ExpertSource,
        reader: ExpertReader,
        launch: StreamLaunch,
        backend: Backend,
    ) -> None:
        self.artifact = source.artifact
        self.launch = launch
        self.backend = backend
        experts = {layer: layout.experts for layer, layout in artifact.layouts.items()}
        self.ledger = Ledger.open(launch.usage_folder, artifact.stamp, experts)
        self._reader = reader
        self._source = source
        self._overwritten: str | None = None
        self._looked_after = 0  # so many reads
        self._mode = writing(launch.write)
        self._pulse = Pulse()
        self._constants = Constants(backend)
        staging = Staging()
        least = 2 * self.artifact.top_k
        self._main = _Set(Reads(reader, staging), launch.slots, launch.working_slots, least, self._mode)
        self._draft = _Set(
            Reads(reader, staging), launch.mtp_slots, launch.mtp_working_slots, least, self._mode
        )

    @property
    def progress(self) -> int:
        """Grows with each layer and group of experts."""
        return self._pulse.progress

    @property
    def stop(self) -> Callable[[], bool]:
        """Asked between layers and groups whether the pass is to be given up."""
        return self._pulse.stop

    @stop.setter
    def stop(self, stop: Callable[[], bool]) -> None:
        self._pulse.stop = stop

    @property
    def slots(self) -> int:
        """Of each of the main model's layers, now; a layer of fewer experts has as many as those."""
        return self._main.slots

    @property
    def slot_bytes(self) -> int:
        """What one slot in each of the main model's layers takes of the machine's memory: nothing where the
        device has its own."""
        if self.backend == "cuda":
            return 0
        return sum(layer.layout.held_bytes for layer in self._main.layers)

    def overwritten(self) -> str | None:
        """A file of experts that is no longer what it was when it was opened, None while what was read is
        sound. Asked after a pass, that holds for all that the pass has read; where nothing was read since,
        no file is looked at. Once found it stays so: nobody knows what was read before a file was put back.
        """
        reads = self._main.reads.tally.ended + self._draft.reads.tally.ended
        if self._overwritten is None and reads != self._looked_after:
            self._looked_after = reads
            self._overwritten = self._source.overwritten()
        return self._overwritten

    def save(self) -> None:
        """Write what was learned."""
        self.ledger.save()

    @property
    def write(self) -> Writing:
        return self._mode

    def install(self, model: nn.Module) -> None:
        """Put streamed experts in the places of the main model's layers."""
        layers = [self._put(model, layout, self._main) for layout in self.artifact.layers]
        # On the processor attention may be computed while its graph is made (cpu_attention.py).
        if hasattr(model, "made") and self.backend != "cpu":
            model.made = self._pulse.finish
            for layer in layers:
                layer.defers = True
        if self.launch.prefetch:
            found = guesses(model, self.artifact.layers, self.artifact.top_k)
            for layer, after in itertools.pairwise(layers):
                guess = found.get(layer.layout.layer)
                if guess is not None:
                    layer.after = (after.slots, guess)

    def install_draft(self, model: nn.Module) -> None:
        """And in the draft layer's, whose place is where its layout says."""
        layout = self.artifact.mtp
        if layout is None:
            raise ValueError(f"{self.artifact.folder} holds no draft layer")
        self._put(model, layout, self._draft)

    def _put(self, model: nn.Module, layout: ExpertLayout, of: _Set) -> Layer:
        activation: Any = getattr(module_at(model, layout.module), "activation", SwiGLU())
        slots = min(of.slots, layout.experts)
        if slots < 1:
            raise ValueError(f"layer {layout.layer}: at least one slot is needed, not {of.slots}")
        layer = Layer(
            Slots(layout, Slab(layout, slots, self._mode), of.reads, max(1, self.artifact.top_k - 1)),
            of.working_of(layout),
            Experts(layout, activation, self._constants),
            of.reads,
            self._pulse,
            self.ledger,
            Ways(self.launch.overlap, self.launch.prefetch),
        )
        of.layers.append(layer)
        put(model, layout.module, StreamedSwitchGLU(layer))
        return layer

    @property
    def _layers(self) -> list[Layer]:
        return [*self._main.layers, *self._draft.layers]

    def preload(self) -> None:
        """Fill free slots: with every expert where all have room, else with what the ledger knows as most
        wanted. A layer's are read while the next one's are asked for. Raises ReadFault, Interrupted."""
        try:
            asked: tuple[Slots, list[int]] | None = None
            for layer in self._layers:
                self._pulse.beat()
                for part in cut(self._first(layer.slots), STAGED if self._mode == "assign" else None):
                    layer.slots.begin(part)
                    if asked is not None:
                        asked[0].finish(asked[1])
                    asked = layer.slots, [one.expert for one in part]
            if asked is not None:
                asked[0].finish(asked[1])
        except BaseException:
            self._end_reads()
            raise

    def _first(self, slots: Slots) -> list[Placement]:
        """What to fill a layer's free slots with, in the order on disk."""
        table, layer = slots.table, slots.layout.layer
        if table.slots == table.experts:
            return table.ahead(range(table.experts), table.free)
        wanted = [one for one in self.ledger.hottest(layer, table.slots) if one not in table.held]
        return table.ahead(sorted(wanted[: table.free]), table.free)

    def turn_ended(self) -> None:
        """A request has ended: count what it asked for, choose who is pinned, judge reads ahead anew. What a
        pass that failed had asked for is not waited for any more."""
        self._pulse.drop()
        for layer in self._layers:
            layer.count_routed()
            slots, table = layer.slots, layer.slots.table
            slots.turn_ended()
            most = int(self.launch.pins * table.slots)
            if most or table.pinned:
                table.pin(choose_pins(self.ledger.counts(slots.layout.layer).tolist(), table.pinned, most))
        self.ledger.turn_ended()

    def resize(self, slots: int) -> None:
        """Give slots of every layer of the main model back, or take more, up to what there are experts."""
        self._main.slots = slots
        for layer in self._main.layers:
            layer.count_routed()
            layer.end_reads()
            layer.slots.resize(min(max(1, slots), layer.layout.experts))
            self._pulse.progress += 1

    def _end_reads(self) -> None:
        self._pulse.drop()
        for layer in self._layers:
            layer.end_reads()

    def close(self) -> None:
        """The ledger is written, and nothing is read any more when this returns."""
        # First, because a disk that went away holds up the rest.
        self.ledger.save()
        self._end_reads()
        self._reader.close()

    def stats(self) -> ColibriStats:
        """What the stream knows; the rest of the fields is others' to fill."""
        source: Any = self._source
        return ColibriStats(
            form=self.artifact.form,
            main=self._main.stats(),
            mtp=self._draft.stats() if self._draft.layers else None,
            io=getattr(source, "io", ""),
            io_reason=getattr(source, "io_reason", ""),
            write=self._mode,
            prefetch=self.launch.prefetch,
            overlap=self.launch.overlap,
            queue_depth=self.launch.queue_depth,
            dsa=self.artifact.has_indexer,
            drafts=self.launch.drafts,
            chunk=self.launch.chunk,
            slab_bytes=self._main.slab_bytes() + self._draft.slab_bytes(),
        )

    @property
    def sync_s(self) -> float:
        """Spent waiting for what routers chose."""
        return self._pulse.sync_s

    def heat(self) -> HeatMap:
        """How wanted each expert is, and what is held of it now."""
        return HeatMap([self._heat(layer.slots) for layer in self._layers])

    def _heat(self, slots: Slots) -> LayerHeat:
        layer, table, pinned = slots.layout.layer, slots.table, slots.table.pinned
        # One by one: the engine's thread may be changing it.
        held = [expert for expert in range(table.experts) if expert in table.held]
        counts = [round(count, 1) for count in self.ledger.counts(layer).tolist()]
        return LayerHeat(layer, counts, held, [expert for expert in held if expert in pinned])
