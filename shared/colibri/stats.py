"""What a worker tells of a model whose experts are streamed: plain numbers since its start."""

from __future__ import annotations

import msgspec


class Latency(msgspec.Struct, frozen=True):
    """Of the latest some thousand, in milliseconds; count: of all."""

    count: int = 0
    p50_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0


class ResidencyStats(msgspec.Struct, frozen=True):
    """One set of layers, the main model's or the draft layer's. slots: of each layer, now. planned_slots: at
    most. working_slots: shared by the layers. experts, layers: what there is. resident: experts held now.
    hits, misses: experts that a pass needed, once each, and found held, or on their way, or not. loads: reads
    that were done, whoever asked. wait: what passes waited for reads. service: the reads themselves.
    prefetch_issued, _used, _wasted: reads ahead of the router, and whether a pass needed them before they
    gave way. sweeps: passes that needed more than a layer holds. bytes: of the slabs."""

    layers: int = 0
    experts: int = 0
    slots: int = 0
    planned_slots: int = 0
    working_slots: int = 0
    resident: int = 0
    pinned: int = 0
    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    read_bytes: int = 0
    wait_s: float = 0.0
    wait: Latency = Latency()
    service: Latency = Latency()
    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_wasted: int = 0
    sweeps: int = 0
    bytes: int = 0


class TurnStats(msgspec.Struct, frozen=True):
    """One request, from its admission to its end. ttft_s: to its first token. read_bytes, wait_s: of experts
    that were read for it, the draft layer's included. drafted, accepted: tokens guessed ahead, and those of
    them that came."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    tokens_per_s: float = 0.0
    hits: int = 0
    misses: int = 0
    hit_rate: float = 0.0
    read_bytes: int = 0
    wait_s: float = 0.0
    drafted: int = 0
    accepted: int = 0


class PressureStats(msgspec.Struct, frozen=True):
    """How often slots were given back because the machine lacked memory, and taken again."""

    given_back: int = 0
    taken_again: int = 0


class ColibriStats(msgspec.Struct, frozen=True):
    """io, write: the modes in use; io_reason: why not the one that was asked for. dsa: sparse attention
    chooses what is attended to. drafts: tokens drafted ahead, 0 for none. resident_bytes: of all that stays
    in memory beside the slabs. slab_bytes: of all slabs. planned_bytes: what the plan counts for the model.
    limit_bytes: what MLX may allocate. chunk: tokens of the widest prefill pass."""

    form: str = ""
    main: ResidencyStats = ResidencyStats()
    mtp: ResidencyStats | None = None
    io: str = ""
    io_reason: str = ""
    write: str = ""
    prefetch: bool = False
    overlap: bool = False
    queue_depth: int = 0
    dsa: bool = False
    drafts: int = 0
    chunk: int = 0
    context: int = 0
    resident_bytes: int = 0
    slab_bytes: int = 0
    planned_bytes: int = 0
    limit_bytes: int = 0
    last_turn: TurnStats | None = None
    pressure: PressureStats = PressureStats()


class LayerHeat(msgspec.Struct, frozen=True):
    """One layer of experts. counts: how often each was routed to, old choices counting less. resident: those
    that a slot holds now, in order. pinned: those of them that stay there."""

    layer: int
    counts: list[float]
    resident: list[int]
    pinned: list[int] = []


class HeatMap(msgspec.Struct, frozen=True):
    """The body of a worker's `GET /experts`: the layers in order, the draft layer's last."""

    layers: list[LayerHeat]


class ExpertSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker has read of experts since its start, in its heartbeats: see ResidencyStats."""

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    wait_s: float = 0.0


def summarise(stats: ColibriStats) -> ExpertSummary:
    """Of all layers, the draft layer's included."""
    sets = [stats.main, *([] if stats.mtp is None else [stats.mtp])]
    return ExpertSummary(
        hits=sum(one.hits for one in sets),
        misses=sum(one.misses for one in sets),
        read_bytes=sum(one.read_bytes for one in sets),
        wait_s=sum(one.wait_s for one in sets),
    )
