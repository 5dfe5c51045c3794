"""The plan of a model whose experts are streamed: from headers alone, before a byte of its weights is read.

Pure. `plan` finds how many slots each layer of experts gets in a limit: as many as fit, or as many as were
asked for, and at least one; a model that can't have one is refused with what it lacks and what would fit. As
with other models (memory.py) only a limit or a context that the user chose lowers the context.
"""

from __future__ import annotations

import msgspec

from mlxpool.shared import memory
from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import forecast
from mlxpool.shared.colibri.layout import Artifact
from mlxpool.shared.colibri.needs import Item, Needs, needs
from mlxpool.shared.colibri.reserves import WIDEST_CHUNK_TOKENS, Reserves, process_bytes, reserves
from mlxpool.shared.memory import (
    MIN_CONTEXT_TOKENS,
    PREFILL_CHUNK_TOKENS,
    MemoryPlan,
    Verdict,
    largest,
)
from mlxpool.shared.units import format_size, parse_size, size_to_ask_for

# What the draft layer proposes ahead of each pass where it is used.
DRAFTS = 3
# With fewer of them a token's own experts push each other out.
FEW_SLOTS = 8
# A shorter context is no advice to anybody.
_USEFUL_CONTEXT_TOKENS = 2048

_KV_ITEMS = ("target_kv", "indexer_kv", "mtp_kv")
_SLAB_ITEMS = ("main_slab", "mtp_slab")


class Wishes(msgspec.Struct, frozen=True):
    """What was asked for. context: tokens, None for the usual. slots: per layer, None for as many as fit,
    up to `most_slots`. drafts: 0 without the draft layer. reserve_bytes: all reserves together, None for the
    usual. prefill_chunk: widest, in tokens."""

    context: int | None = None
    slots: int | None = None
    most_slots: int | None = None
    drafts: int = 0
    reserve_bytes: int | None = None
    batch: int = 1
    prefill_chunk: int | None = None


class StreamPlan(msgspec.Struct, frozen=True):
    """What a worker reserves, line by line, and how its experts are held.

    planned_bytes: the sum of the items. slots: per layer of experts. working_slots: shared by the layers of a
    kind. unique_experts: the most that one step asks of a layer. slot_bytes: of one slot in every layer;
    record_bytes: what one miss reads. artifact_bytes: of its files on disk. context: tokens, already lowered
    where the verdict says so; the longest that may be generated is `generation_limit`. short_by_bytes: from
    the limit to `fitting_bytes`. fitting_context: the most tokens that would fit, 0 for none.
    fitting_bytes: the least limit that would do, 0 where this one does; where
    it doesn't the items are those of a plan in that limit. fits_without_mtp: whether it would
    with the draft layer left out. fitting_slots: as many of those that were asked for as would fit at the
    wanted context, 0 for none or where they do. roomy_context, roomy_bytes: where few slots fit, the context
    and the limit that would leave FEW_SLOTS, 0 for none. hit_rate: forecast, of decoding.
    sparse_attention: whether its architecture has indexers; has_indexer: whether the folder has.
    asked_context: as of any plan (memory.py).
    """

    items: tuple[Item, ...]
    planned_bytes: int
    verdict: Verdict
    limit_bytes: int | None
    short_by_bytes: int
    fitting_context: int
    fitting_bytes: int
    fits_without_mtp: bool
    fitting_slots: int
    roomy_context: int
    roomy_bytes: int
    context: int
    chunk: int
    kv_bytes_per_token: int
    experts: int
    layers: int
    top_k: int
    slots: int
    working_slots: int
    unique_experts: int
    mtp_slots: int
    mtp_working_slots: int
    drafts: int
    slot_bytes: int
    record_bytes: int
    artifact_bytes: int
    hit_rate: float
    has_indexer: bool
    sparse_attention: bool
    asked_context: int = 0

    @property
    def generation_limit(self) -> int:
        """Tokens that an answer without `max_tokens` may have: what its prompt leaves of the context."""
        return self.context

    @property
    def slabs_bytes(self) -> int:
        return sum(item.bytes for item in self.items if item.name in _SLAB_ITEMS)

    @property
    def arrays_bytes(self) -> int:
        """What MLX may allocate: all but what is left to the process. MLX would fill that with freed buffers,
        of which every sweep through the experts leaves some."""
        return self.planned_bytes - self.bytes_of("runtime_reserve", "safety_reserve")

    def bytes_of(self, *names: str) -> int:
        """The sum of these items."""
        return sum(item.bytes for item in self.items if item.name in names)

    @property
    def explanation(self) -> str:
        """The verdict and its numbers, for a person."""
        parts = (
            f"{memory.at_context(self.context, self.asked_context)}, {self.slots} of {self.experts}"
            f" experts per layer in memory (resident {format_size(self.bytes_of('resident'))},"
            f" slots {format_size(self.slabs_bytes)}, KV {format_size(self.bytes_of(*_KV_ITEMS))},"
            f" prefill {format_size(self.bytes_of('reconstructed_kv', 'rows'))},"
            f" reserves {format_size(self._reserved_bytes)})"
        )
        if self.limit_bytes is None:
            return f"fits: {format_size(self.planned_bytes)} {parts}"
        limit = format_size(self.limit_bytes)
        if self.verdict == "does_not_fit":
            # As the advice says it, which is rounded up.
            needed = parse_size(size_to_ask_for(self.fitting_bytes))
            short_by = format_size(needed - self.limit_bytes)
            return (
                f"does not fit in {limit} by {short_by}: needs {format_size(needed)} {parts}{self._way_out}"
            )
        parts = f"{format_size(self.planned_bytes)} {parts}"
        few = f"; fewer than {self._few} slots read most experts of every token{self._more_room}"
        few = few if self.is_slow else ""
        if self.verdict == "fits_with_context":
            return f"fits in {limit} with context {self.context}: {parts}{few}"
        return f"fits: {parts}{few}"

    @property
    def is_slow(self) -> bool:
        """Whether so few slots fit that hardly anything is found in memory."""
        return self.slots < self._few

    @property
    def _few(self) -> int:
        return min(FEW_SLOTS, self.experts)

    @property
    def _reserved_bytes(self) -> int:
        return self.bytes_of("allocator_reserve", "runtime_reserve", "safety_reserve")

    @property
    def _way_out(self) -> str:
        ways = [f"a budget of {size_to_ask_for(self.fitting_bytes)}"]
        if self.fitting_context:
            ways.append(f"context = {self.fitting_context}")
        if self.fits_without_mtp:
            ways.append('mtp = "off"')
        if self.fitting_slots:
            ways.append(f"slots = {self.fitting_slots}")
        return f"; {' or '.join(ways)} would do"

    @property
    def _more_room(self) -> str:
        ways = [f"context = {self.roomy_context}"] if self.roomy_context else []
        if self.roomy_bytes:
            ways.append(f"a budget of {size_to_ask_for(self.roomy_bytes)}")
        return f"; {' or '.join(ways)} leaves room for {self._few}" if ways else ""

    @property
    def memory_plan(self) -> MemoryPlan:
        """The same in the shape of other models' plans. Process and safety are one line there."""
        return MemoryPlan(
            weights_bytes=self.bytes_of("resident") + self.slabs_bytes,
            overhead_bytes=self.bytes_of("runtime_reserve", "safety_reserve") - memory.GRAMMAR_BYTES,
            grammar_bytes=memory.GRAMMAR_BYTES,
            prefill_bytes=self.bytes_of("reconstructed_kv", "rows"),
            allocator_bytes=self.bytes_of("allocator_reserve"),
            kv_pool_bytes=self.bytes_of(*_KV_ITEMS),
            kv_bytes_per_token=self.kv_bytes_per_token,
            context=self.context,
            planned_bytes=self.planned_bytes,
            verdict=self.verdict,
            limit_bytes=self.limit_bytes,
            short_by_bytes=self.short_by_bytes,
            fitting_context=self.fitting_context,
            told=self.explanation,
            asked_context=self.asked_context,
        )


def plan(
    artifact: Artifact,
    wishes: Wishes,
    *,
    backend: Backend,
    limit_bytes: int | None,
    limit_is_explicit: bool = True,
) -> StreamPlan:
    """The plan of an artifact whose layouts are as `backend` holds them. limit_bytes: the most it may take,
    None for no limit. limit_is_explicit: whether that limit may lower the context.

    Raises CheckpointError where the folder can't be planned for, or has not what was asked for.
    """
    held = needs(artifact, backend)
    _check(artifact, wishes, backend)
    wanted, asked = memory.wanted_context(held.facts.max_context, wishes.context)
    bill = _Bill(held, wishes, limit_bytes)

    def fits(context: int, drafts: int = wishes.drafts) -> bool:
        return limit_bytes is None or bill.least(context, drafts) <= limit_bytes

    verdict: Verdict = "fits"
    context, short_by, fitting, fitting_bytes = wanted, 0, 0, 0
    shown = bill
    if limit_bytes is not None and not fits(wanted):
        fitting = largest(min(MIN_CONTEXT_TOKENS, wanted), wanted, fits)
        if fitting and limit_is_explicit:
            verdict, context = "fits_with_context", fitting
        else:
            verdict, fitting_bytes = "does_not_fit", _least_limit(held, wishes, wanted)
            short_by = fitting_bytes - limit_bytes
            shown = _Bill(held, wishes, fitting_bytes)
    slots = shown.slots(context)
    fitting_slots = roomy_context = roomy_bytes = 0
    if limit_bytes is not None and verdict == "does_not_fit" and wishes.slots is not None:
        fitting_slots = largest(
            1, bill.slots(wanted), lambda n: bill.total(wanted, n, wishes.drafts) <= limit_bytes
        )
    elif limit_bytes is not None and wishes.slots is None and slots < (few := min(FEW_SLOTS, held.experts)):
        roomy_context = largest(
            min(_USEFUL_CONTEXT_TOKENS, context),
            context,
            lambda n: bill.total(n, few, wishes.drafts) <= limit_bytes,
        )
        roomy_bytes = _least_limit(held, msgspec.structs.replace(wishes, slots=few), context)
    items, reserve = shown.lines(context, slots, wishes.drafts)
    return StreamPlan(
        items=items,
        planned_bytes=sum(item.bytes for item in items),
        verdict=verdict,
        limit_bytes=limit_bytes,
        short_by_bytes=short_by,
        fitting_context=fitting,
        fitting_bytes=fitting_bytes,
        fits_without_mtp=verdict == "does_not_fit" and wishes.drafts > 0 and fits(wanted, 0),
        fitting_slots=fitting_slots,
        roomy_context=roomy_context,
        roomy_bytes=roomy_bytes,
        context=context,
        chunk=reserve.chunk,
        kv_bytes_per_token=held.kv_bytes_per_token(wishes.drafts),
        experts=held.experts,
        layers=len(held.layers),
        top_k=held.top_k,
        slots=slots,
        working_slots=held.working_slots(slots, wishes.drafts),
        unique_experts=held.unique_experts(wishes.drafts),
        mtp_slots=held.mtp_slots(slots, wishes.drafts),
        mtp_working_slots=held.mtp_working_slots(slots, wishes.drafts),
        drafts=wishes.drafts,
        slot_bytes=sum(layout.slot_bytes for layout in held.layers),
        record_bytes=max(layout.record_bytes for layout in held.layers),
        artifact_bytes=artifact_bytes(artifact),
        hit_rate=forecast.hit_rate(slots, held.experts),
        has_indexer=artifact.has_indexer,
        sparse_attention=artifact.has_indexer or artifact.config.get("index_topk") is not None,
        asked_context=asked,
    )


def artifact_bytes(artifact: Artifact) -> int:
    """Of all its tensors on disk."""
    dense = sum(place.size_bytes for part in (artifact.dense, artifact.mtp_dense) for place in part.values())
    return dense + sum(layout.experts * layout.record_bytes for layout in artifact.layouts.values())


def _check(artifact: Artifact, wishes: Wishes, backend: Backend) -> None:
    if wishes.drafts and artifact.mtp is None:
        raise CheckpointError('holds no draft layer, which mtp = "on" needs; use mtp = "off"')
    process = process_bytes(backend)
    if wishes.reserve_bytes is not None and wishes.reserve_bytes < process:
        raise CheckpointError(
            f"reserve = {wishes.reserve_bytes} is less than a worker's process takes without a model; "
            f"use {process} bytes or more"
        )


def _least_limit(held: Needs, wishes: Wishes, context: int) -> int:
    """The least limit that holds this context. A larger limit has larger reserves, but by less."""
    low, high = 0, 2 * _Bill(held, wishes, None).least(context, wishes.drafts)
    while low < high:
        middle = (low + high) // 2
        if _Bill(held, wishes, middle).least(context, wishes.drafts) <= middle:
            high = middle
        else:
            low = middle + 1
    return low


class _Bill:
    """What it comes to at one setting or another."""

    def __init__(self, held: Needs, wishes: Wishes, limit_bytes: int | None) -> None:
        self._held, self._wishes, self._limit_bytes = held, wishes, limit_bytes

    def lines(self, context: int, slots: int, drafts: int) -> tuple[tuple[Item, ...], Reserves]:
        """Every item, and how the reserves were chosen."""
        wishes, held = self._wishes, self._held
        # Where nothing is read a chunk has only to keep the device busy.
        usual = PREFILL_CHUNK_TOKENS[held.backend] if slots >= held.experts else WIDEST_CHUNK_TOKENS
        widest = min(wishes.prefill_chunk or usual, context)
        fixed = held.items(context, slots, drafts, wishes.batch, widest)
        chosen = reserves(
            sum(item.bytes for item in fixed),
            lambda chunk: held.transient(chunk, context, wishes.batch),
            held.backend,
            context=context,
            limit_bytes=self._limit_bytes,
            widest_chunk=widest,
            asked_bytes=wishes.reserve_bytes,
        )
        reserved = (
            Item("allocator_reserve", "allocator reserve", chosen.allocator_bytes),
            Item("runtime_reserve", "runtime reserve", chosen.runtime_bytes),
            Item("safety_reserve", "safety reserve", chosen.safety_bytes),
        )
        return (*fixed, *reserved), chosen

    def total(self, context: int, slots: int, drafts: int) -> int:
        return sum(item.bytes for item in self.lines(context, slots, drafts)[0])

    def least(self, context: int, drafts: int) -> int:
        """With the slots that were asked for, or as few as there can be."""
        experts, asked = self._held.experts, self._wishes.slots
        if asked is not None:
            return self.total(context, min(asked, experts), drafts)
        # A layer that holds all of its experts needs no working slots: with few experts that is less.
        return min(self.total(context, slots, drafts) for slots in {1, experts})

    def slots(self, context: int) -> int:
        """As many as were asked for, else as fit; one where none does."""
        wishes, limit, experts = self._wishes, self._limit_bytes, self._held.experts
        if wishes.slots is not None:
            return min(wishes.slots, experts)
        most = min(wishes.most_slots or experts, experts)
        if limit is None or self.total(context, most, wishes.drafts) <= limit:
            return most
        if self.total(context, 1, wishes.drafts) > limit >= self.total(context, experts, wishes.drafts):
            return experts
        return max(1, largest(1, most, lambda slots: self.total(context, slots, wishes.drafts) <= limit))
