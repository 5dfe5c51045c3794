"""How a worker is to stream a model's experts: decided by the parent from settings, plan and `tune`."""

from __future__ import annotations

from typing import Literal

import msgspec

# auto: direct on Linux and uncached on macOS where the disk takes it, else buffered.
IoMode = Literal["auto", "direct", "uncached", "buffered"]
# How a read gets into MLX's memory. direct: read straight into the array. assign: through a buffer and an
# assignment on the engine's thread, for a backend whose arrays can't be written from outside.
WriteMode = Literal["auto", "direct", "assign"]


class StreamLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """slots: per layer of experts. working_slots: shared by all layers of a kind, for what a pass needs
    beyond them, and swept through in prefill. mtp_slots, mtp_working_slots: the same of the draft layer.
    drafts: tokens drafted ahead, 0 without the draft layer. draft_confidence: the least probability of a
    draft by the draft layer, 0 for any; the first that lacks it ends the drafting. chunk: widest prefill
    chunk, in tokens.
    queue_depth: reads at once. in_flight_bytes: of them together, always one. prefetch: read what the next
    layer's router is likely to ask for. overlap: compute hits while misses are read. pins: share of the slots
    that learned favourites may keep, 0 for none. reserve_bytes: what MLX may hold in buffers beyond arrays
    that stay. planned_bytes: what the plan counts for the model in all.
    usage_folder: where the ledger of routed choices is kept, None for nowhere.
    """

    slots: int
    working_slots: int
    mtp_slots: int = 0
    mtp_working_slots: int = 0
    drafts: int = 0
    draft_confidence: float = 0.0
    chunk: int = 2048
    io: IoMode = "auto"
    write: WriteMode = "auto"
    queue_depth: int = 8
    in_flight_bytes: int = 512 * 2**20
    prefetch: bool = True
    overlap: bool = True
    pins: float = 0.0
    reserve_bytes: int = 0
    planned_bytes: int = 0
    usage_folder: str | None = None
