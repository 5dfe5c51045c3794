"""What a plan's slots are worth: how often an expert is found in memory, and how fast text then comes. Pure.

The curve of hits is one that others have published for GLM-5.2 (256 experts, the least recently used goes),
over a layer's share of experts in memory; between its points it is straight. It is a forecast: what `tune`
measures on a machine replaces the disk's rate, and counters tell the hits themselves.
"""

from __future__ import annotations

import itertools

import msgspec

# (slots of 256, share of an answer's experts that were found in them).
_CURVE = (
    (0, 0.0),
    (1, 0.0166),
    (12, 0.24),
    (19, 0.40),
    (22, 0.44),
    (25, 0.46),
    (31, 0.51),
    (38, 0.55),
    (47, 0.60),
    (51, 0.63),
    (256, 1.0),
)
_CURVE_EXPERTS = 256


class Demand(msgspec.Struct, frozen=True):
    """One token's. layers: with routed experts. record_bytes: of one expert on disk. memory_bytes: what
    computing it goes through, experts included."""

    layers: int
    top_k: int
    experts: int
    record_bytes: int
    memory_bytes: int = 0


class Forecast(msgspec.Struct, frozen=True):
    """reads, read_bytes: of one decoded token. first_chunk_s: of a prompt of a whole chunk that finds nothing
    of it in the prompt cache, its reads alone."""

    hit_rate: float
    reads: float
    read_bytes: float
    tokens_per_s: float
    first_chunk_s: float


def hit_rate(slots: int, experts: int) -> float:
    """The share of routed experts that is found in memory. Exactly 1 where all of a layer's are."""
    if slots >= experts:
        return 1.0
    at = max(slots, 0) * _CURVE_EXPERTS / experts
    for (left, low), (right, high) in itertools.pairwise(_CURVE):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return 1.0


def touched(tokens: int, top_k: int, experts: int) -> float:
    """How many of a layer's experts so many tokens ask for, were each as likely as any other."""
    return float(experts * (1 - (1 - top_k / experts) ** tokens))


def forecast(
    demand: Demand,
    slots: int,
    chunk: int,
    disk_bytes_per_s: float,
    memory_bytes_per_s: float | None = None,
) -> Forecast:
    """At a disk's rate for reads of an expert's size. memory_bytes_per_s: None leaves computing out, and the
    forecast is an upper bound."""
    hits = hit_rate(slots, demand.experts)
    routed = demand.layers * demand.top_k
    reads = routed * (1 - hits)
    read_s = reads * demand.record_bytes / disk_bytes_per_s
    compute_s = 0.0
    if memory_bytes_per_s is not None:
        compute_s = demand.memory_bytes / memory_bytes_per_s
    whole_s = read_s + compute_s
    swept = demand.layers * touched(chunk, demand.top_k, demand.experts)
    missing = swept * (1 - min(slots / demand.experts, 1.0))
    return Forecast(
        hit_rate=hits,
        reads=reads,
        read_bytes=reads * demand.record_bytes,
        tokens_per_s=1 / whole_s if whole_s else float("inf"),
        first_chunk_s=missing * demand.record_bytes / disk_bytes_per_s,
    )
