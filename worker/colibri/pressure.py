"""When a streamed model gives memory back, and when it takes it again. Pure.

Slots are the part of a model that it can do without: with fewer it reads more. So where the machine's
available memory falls below a floor, slots go until it would be above it again, one per layer stays; where
there has been room to spare for a while, they come back, never above the plan. Between the floor and what is
room to spare lies a slot of every layer, so that giving one back is no reason to take it again.
"""

from __future__ import annotations

# What the machine is left: below it a system begins to swap or to kill. Of small machines a twentieth.
FLOOR_BYTES = 1024 * 1024 * 1024
FLOOR_SHARE = 1 / 20

# How often the machine's memory is looked at, while a model runs and while it rests.
LOOK_S = 1.0

# A reading follows what was given back only after a moment.
GIVE_AGAIN_S = 3.0
# Memory that is free for so long is free; before that it may be between two of another program's needs.
CALM_S = 20.0


def floor_bytes(total_bytes: int) -> int:
    """What a machine of so much memory must have available."""
    return min(FLOOR_BYTES, int(total_bytes * FLOOR_SHARE))


class Pressure:
    """planned: slots per layer that the plan has. slot_bytes: of one slot in every layer together, 0
    where that is no memory of the machine's: then none go. floor: bytes that must stay available."""

    def __init__(self, planned: int, slot_bytes: int, floor: int) -> None:
        self._planned = planned
        self._slot_bytes = slot_bytes
        self._floor = floor
        self._gave_s: float | None = None
        self._calm_since_s: float | None = None

    def wanted(self, slots: int, available: int, now_s: float) -> int:
        """Slots per layer that there should be. slots: that there are. available: bytes, of the machine."""
        if not self._slot_bytes:
            return slots
        if available < self._floor:
            self._calm_since_s = None
            if slots <= 1 or (self._gave_s is not None and now_s - self._gave_s < GIVE_AGAIN_S):
                return slots
            self._gave_s = now_s
            lacking = -(-(self._floor - available) // self._slot_bytes)
            return max(1, slots - lacking)
        spare = (available - self._floor) // self._slot_bytes - 1
        if slots >= self._planned or spare < 1:
            self._calm_since_s = None
            return slots
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s - self._calm_since_s < CALM_S:
            return slots
        self._calm_since_s = None
        return min(self._planned, slots + spare)
