"""What `mlxpool colibri bench` and `tune` measure: what their processes tell, and what is shown and kept."""

from __future__ import annotations

from typing import Literal

import msgspec

from mlxpool.shared.colibri.launch import IoMode
from mlxpool.shared.colibri.tuned import Tuned

# What `tune` may change, in the order that it does: what most depends on memory and disk comes first.
Name = Literal["slots", "io", "queue_depth", "prefetch", "overlap", "mtp"]

# The most tokens of a decoding before those that count: what fills the slots is no part of a steady rate.
MOST_WARM_TOKENS = 32

Verdict = Literal["kept", "no gain", "unsteady", "slower", "other tokens", "failed"]


class Disk(msgspec.Struct, frozen=True):
    """The disk's own rate, without page cache. read_bytes: of one read, an expert's. depth: reads at once."""

    bytes_per_s: float
    reads: int
    read_bytes: int
    depth: int
    seconds: float
    io: IoMode


class Prefill(msgspec.Struct, frozen=True):
    """needed_bytes: of the experts that a chunk needed and no slot held, each once per chunk."""

    tokens: int
    seconds: float
    tok_per_s: float
    read_bytes: int
    needed_bytes: int


class Decode(msgspec.Struct, frozen=True):
    """Without the first tokens, which fill the slots. hit_rate: experts found in memory. disk_share: of the
    disk's own rate. wait_s: for reads; sync_s: for what routers chose, computing what they are asked about
    included. passes: of the model."""

    tokens: int
    seconds: float
    tok_per_s: float
    hit_rate: float
    read_bytes_per_token: float
    disk_share: float
    wait_s: float
    sync_s: float
    passes: int
    drafted: int
    accepted: int


class Memory(msgspec.Struct, frozen=True):
    """planned_bytes: by the plan, prompt caches left out. footprint_bytes: of the process at the end, as the
    system counts it. mlx_peak_bytes: the most that arrays took, of mlx_limit_bytes."""

    planned_bytes: int
    footprint_bytes: int
    mlx_peak_bytes: int
    mlx_limit_bytes: int


class Bench(msgspec.Struct, frozen=True):
    """slots: of each layer. io, write: in use; io_reason: why not the one that was asked for."""

    form: str
    slots: int
    experts: int
    io: str
    io_reason: str
    write: str
    drafts: int
    load_s: float
    disk: Disk
    prefill: Prefill
    decode: Decode
    memory: Memory


class Trial(msgspec.Struct, frozen=True):
    """A change that was tried, and what became of it. unsteady: faster in one order alone. best_rate, rate:
    tokens a second of the best so far and with the change, 0 where it did not come so far. reason: why it
    failed, or may have had other tokens."""

    name: Name
    value: int | bool | str
    verdict: Verdict
    best_rate: float = 0.0
    rate: float = 0.0
    reason: str = ""


class TuneResult(msgspec.Struct, frozen=True):
    """start_rate: tokens a second as it is without anything measured. left: settings that are chosen, or have
    nothing to choose from. found: to keep."""

    disk: Disk
    start_rate: float
    trials: list[Trial]
    left: list[Name]
    found: Tuned
