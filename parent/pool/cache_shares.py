"""Who may keep how many bytes of prompts in memory: one total, split equally over the workers. Pure.

A worker is told its share with its Launch and may be told another one later, if its socket answers. Shares
that shrink are asked for first, and a share grows only by what is free by then, so that the shares told never
pass the total, at no moment: a newcomer may begin with less than its part, and is raised once the others have
given theirs up. One that does not answer is taken at its word from then on; nobody waits for it.

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
        self._asked: dict[int, int] = {}
        self._reachable: set[int] = set()

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
        self._reachable.discard(worker)

    def moves(self) -> list[Move]:
        """What is to be told to whom now. Each is out until `answered`."""
        target = self._target
        free = [worker for worker in sorted(self._reachable) if worker not in self._asked]
        shrinking = [Move(worker, target) for worker in free if self._held[worker] > target]
        self._asked.update(shrinking)
        if any(share < self._held[worker] for worker, share in self._asked.items()):
            return shrinking
        growing = []
        for worker in free:
            more = min(target - self._held[worker], self._total - self.held_bytes)
            if more > 0:
                self._held[worker] += more
                growing.append(Move(worker, self._held[worker]))
        self._asked.update(growing)
        return growing

    def answered(self, worker: int) -> None:
        """The worker holds no more than it was told, or does not answer."""
        if (share := self._asked.pop(worker, None)) is not None:
            self._held[worker] = share

    @property
    def _target(self) -> int:
        return self._total // max(1, len(self._held))
