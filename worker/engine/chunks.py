"""How wide a prefill chunk is, where it is cut, and whose turn it is. Pure.

A running eval can't be interrupted, so a chunk is what a decode step and another row wait for: it should take
at most TARGET_S. Where no other row is there a cancellation alone waits for it, and it may take ALONE_S: wide
chunks cost less a token, on a CPU with a long context a third. What width that is depends on the model, the
backend and the length of the context so far, so it is measured, for each stretch of context by itself: a
rung of a fixed ladder of powers of two, one step at a time. Cuts lie on an absolute grid (multiples of the
rung, from position 0), so equal prompts prefilled at equal rungs run the same kernels in the same order and
give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxpool.shared.backend import Backend
from mlxpool.shared.memory import PREFILL_CHUNK_TOKENS

# What running streams notice as a stutter.
TARGET_S = 0.4

# Inside the second that a cancellation may take.
ALONE_S = 0.8

# The lowest are for the end of a long prompt on the CPU: 4 tokens after 6,000 take 0.3 s there.
LADDER_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# A chunk is as long as the last one of its width, give or take: what comes nearer than this is narrowed.
_ROOM = 0.9

# Doubling a chunk at most doubles its time as long as attention is not all of it; a margin for that.
_GROWTH_LIMIT = 0.45

# Contexts of one stretch are as dear as each other, within a rung.
_STRETCH_TOKENS = 1024

# A stretch that begins further from any measured one than the next is taken for dearer, at most by so many
# rungs: tokens after 4,000 cost six times those at the start on a CPU.
_UNKNOWN_RUNGS = 3

# Where the search begins: on the CPU a chunk of 64 of a 135M model takes 0.3 s, on a GPU 512 tokens of an
# 8B model take 20 to 200 ms.
START_TOKENS: dict[Backend, int] = {"cpu": 64, "metal": 512, "cuda": 1024, "none": 64}


class ChunkWidth:
    """The rungs. Owned by the engine thread. `fixed` turns the search off.

    The top rung is the width that the memory plan has reserved for. flat: a chunk takes as long however short
    it is (its experts are read from disk), so those of a prompt that goes on from a cached prefix are counted
    from there, not on the grid, which could make two of what is one.
    """

    def __init__(self, backend: Backend, fixed: int | None = None, flat: bool = False) -> None:
        self._fixed = fixed
        self._flat = flat
        start = LADDER_TOKENS.index(START_TOKENS[backend])
        # By whether a row is alone, then by stretch.
        self._rungs: dict[bool, dict[int, int]] = {False: {0: start}, True: {0: start}}
        self._top = LADDER_TOKENS.index(PREFILL_CHUNK_TOKENS[backend])

    @property
    def tokens(self) -> int:
        """The width at the start of a prompt, in company."""
        return self.at(0)

    def at(self, start: int, alone: bool = False) -> int:
        """The width of a chunk that begins at `start`, in tokens."""
        return self._fixed or LADDER_TOKENS[self._rung(start // _STRETCH_TOKENS, alone)]

    def _rung(self, stretch: int, alone: bool) -> int:
        rungs = self._rungs[alone]
        known = max(one for one in rungs if one <= stretch)
        return max(rungs[known] - min(max(stretch - known - 1, 0), _UNKNOWN_RUNGS), 0)

    def end(self, start: int, last: int, alone: bool = False) -> int:
        """Where a chunk that begins at `start` ends: the next multiple of the width, at most `last`."""
        width = self.at(start, alone)
        return min(start + width if self._flat else (start // width + 1) * width, last)

    def observe(self, start: int, tokens: int, elapsed_s: float, alone: bool = False) -> None:
        """A chunk of `tokens` that began at `start` took `elapsed_s`. Shorter ones than the width say nothing
        about it, unless even they took too long."""
        stretch, target_s = start // _STRETCH_TOKENS, ALONE_S if alone else TARGET_S
        rung = self._rung(stretch, alone)
        if elapsed_s > target_s * _ROOM:
            rung = max(rung - 1, 0)
        elif tokens >= self.at(start, alone) and elapsed_s < target_s * _GROWTH_LIMIT:
            rung = min(rung + 1, self._top)
        self._rungs[alone][stretch] = rung


def next_turn(remaining: Sequence[int], passed_over: Sequence[int], width: int) -> int:
    """Index of the row whose chunk is next: shortest remaining first, with ageing.

    remaining: prompt tokens still to prefill, per row. passed_over: turns since the row's last one. Each
    turn a row is passed over counts as one chunk less that it needs, so a row waits at most about as many
    turns as it has chunks, however many short ones keep coming. First come first served between equals.
    """
    return min(range(len(remaining)), key=lambda row: remaining[row] - passed_over[row] * width)


def company(length: int, others: Sequence[int], width: int) -> list[int]:
    """Which other prompts may share the pass of one that fits into a chunk, by their lengths in tokens.

    Shortest first, first come first served between equals. Padded to the longest of them they fit into the
    chunk too, and at most half of it is padding: a pass of more is dearer than two.
    """
    taken: list[int] = []
    rows, held, longest = 1, length, length
    for place in sorted(range(len(others)), key=lambda place: others[place]):
        longest = max(longest, others[place])
        padded = (rows + 1) * longest
        if padded > width or padded > 2 * (held + others[place]):
            break
        taken.append(place)
        rows, held = rows + 1, held + others[place]
    return taken
