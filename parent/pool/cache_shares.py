"""Who may keep how many bytes of prompts in memory: one total, split equally over the workers. Pure.

A worker is told its share with its Launch and may be told another one later, if its socket answers. Shares
that shrink are asked for first, and a share grows only by what is free by then, so that the shares told never
pass the total, at no moment: a newcomer may begin with less than its part, and is raised once the others have
given theirs up.

What is told may get lost. Then the worker holds what it held, or, where it may have heard, the larger of the
two, and is told again after a rest. One that is slow to give up its part is late: what is free without it is
handed out meanwhile. One that does not answer at all is taken at its word in the end.

`CacheShares` is owned and mutated by `PromptCaches`, on the event loop.
"""

from __future__ import annotations

from typing import NamedTuple


class Move(NamedTuple):
    """A worker is to be told this share."""

    worker: int
    ram_bytes: int


class CacheShares:
    """The shares of all workers that have a model. A worker is known by its number."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        # What each may hold: its share, or the larger one that it has not given up yet.
        self._held: dict[int, int] = {}
        self._asked: dict[int, Move] = {}
        self._before: dict[int, int] = {}  # what those that were asked held
        self._reachable: set[int] = set()
        self._late: set[int] = set()
        self._resting: set[int] = set()
        self._in_doubt: set[int] = set()  # may have heard of what they hold, or not

    @property
    def held_bytes(self) -> int:
        """What all together may hold now."""
        return sum(self._held.values())

    def of(self, worker: int) -> int:
        """What a worker may hold now, 0 where it is not known."""
        return self._held.get(worker, 0)

    def resize(self, total_bytes: int) -> None:
        """Another total from now on."""
        self._total = total_bytes

    def join(self, worker: int) -> int:
        """A worker is launched: what it may hold to begin with."""
        self._held[worker] = 0
        self._held[worker] = max(0, min(self._target, self._total - self.held_bytes))
        return self._held[worker]

    def reach(self, worker: int) -> None:
        """The worker's socket answers: it can be told another share."""
        if worker in self._held:
            self._reachable.add(worker)

    def settle(self, worker: int) -> None:
        """The worker is on its way out: it keeps what it has until it leaves."""
        self._reachable.discard(worker)

    def leave(self, worker: int) -> None:
        """The worker is gone, and its bytes with it."""
        self._held.pop(worker, None)
        self._asked.pop(worker, None)
        self._before.pop(worker, None)
        for those in (self._reachable, self._late, self._resting, self._in_doubt):
            those.discard(worker)

    def moves(self) -> list[Move]:
        """What is to be told to whom now. Each is out until `answered` or `failed`."""
        target = self._target
        free = [w for w in sorted(self._reachable) if w not in self._asked and w not in self._resting]
        moves = [self._ask(worker, target) for worker in free if self._held[worker] > target]
        comes = any(
            move.ram_bytes < self._held[worker] and worker not in self._late
            for worker, move in self._asked.items()
        )
        for worker in free:
            left, wanted = self._total - self.held_bytes, target - self._held[worker]
            if worker in self._asked or (comes and left < wanted):
                continue  # raised by a part now, it would only be asked twice
            more = max(0, min(wanted, left))
            if more or worker in self._in_doubt:
                moves.append(self._ask(worker, self._held[worker] + more))
        return moves

    def _ask(self, worker: int, ram_bytes: int) -> Move:
        self._before[worker] = self._held[worker]
        # A larger share may be used as soon as it is heard of.
        self._held[worker] = max(self._held[worker], ram_bytes)
        self._asked[worker] = Move(worker, ram_bytes)
        return self._asked[worker]

    def answered(self, worker: int) -> None:
        """The worker holds no more than it was told, or was given long enough to."""
        if (move := self._asked.pop(worker, None)) is not None:
            self._held[worker] = move.ram_bytes
            self._late.discard(worker)
            self._in_doubt.discard(worker)

    def failed(self, worker: int, *, unheard: bool) -> None:
        """What the worker was told is lost; it is told nothing until `again`. unheard: it never arrived."""
        if self._asked.pop(worker, None) is None:
            return
        self._late.discard(worker)
        self._resting.add(worker)
        if unheard:
            self._held[worker] = self._before[worker]
        else:
            self._in_doubt.add(worker)

    def again(self, worker: int) -> None:
        """A worker that something was lost to has rested."""
        self._resting.discard(worker)

    def late(self, worker: int) -> None:
        """The worker takes its time: others are raised by what is free without it."""
        if worker in self._asked:
            self._late.add(worker)

    @property
    def _target(self) -> int:
        return self._total // max(1, len(self._held))
