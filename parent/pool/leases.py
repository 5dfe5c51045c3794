"""Whose turn the GPU is: one line, first come, first served, of those who share it and who want it alone.

Places are numbers that only grow, and tickets and exclusive asks draw theirs from one counter. Every ticket
shares from its admission to its end. The oldest exclusive ask is the *gate*: those before it go on as ever,
those behind it get nothing and start nothing, so that neither side can starve the other. It is an ask's turn
once nobody older is left; what is done for it then is lending.py's.

Plain data, owned and mutated by `Scheduler` alone. Every question that a decision asks is one look at the
front of an ordered dictionary, however many wait: a plain one would walk over all that have left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# The gate where nobody wants the GPU alone: behind every number.
OPEN = 1 << 62


@dataclass(eq=False)
class Lease:
    """One exclusive ask: waiting → held → over.

    number: its place in the line. holder: who it is, for people. memory_bytes: what it needs beside the
    models; `reserved` is what the budget is charged for it right now, once `has_room`.
    """

    number: int
    holder: str
    memory_bytes: int
    since: float
    state: Literal["waiting", "held", "over"] = "waiting"
    has_room: bool = False

    @property
    def reserved(self) -> int:
        """Bytes that nothing else may have."""
        return self.memory_bytes if self.has_room else 0


class Leases:
    """The line."""

    def __init__(self) -> None:
        self._shared: OrderedDict[int, None] = OrderedDict()
        self._exclusive: OrderedDict[int, Lease] = OrderedDict()

    def share(self, number: int) -> None:
        """Somebody who shares joins, younger than all who are there."""
        self._shared[number] = None

    def leave(self, number: int) -> None:
        """Somebody who shares is done, served or not. Harmless for one who has left."""
        self._shared.pop(number, None)

    def ask(self, lease: Lease) -> None:
        """An exclusive ask joins, younger than all who are there."""
        self._exclusive[lease.number] = lease

    def end(self, lease: Lease) -> None:
        """It is given back, given up, or refused. Harmless for one that is over."""
        lease.state, lease.has_room = "over", False
        self._exclusive.pop(lease.number, None)

    @property
    def front(self) -> Lease | None:
        """The oldest exclusive ask, held or not."""
        return next(iter(self._exclusive.values()), None)

    @property
    def gate(self) -> int:
        """Tickets numbered below this may be served now; `OPEN` where all may."""
        return next(iter(self._exclusive), OPEN)

    @property
    def turn(self) -> Lease | None:
        """The ask before which nobody is left, held or not."""
        front = self.front
        if front is None:
            return None
        return front if next(iter(self._shared), OPEN) > front.number else None

    @property
    def reserved(self) -> int:
        """Bytes that the budget is charged for the one whose turn it is."""
        front = self.front
        return 0 if front is None else front.reserved

    def asks(self) -> list[Lease]:
        """Every exclusive ask, oldest first."""
        return list(self._exclusive.values())

    def counts(self) -> tuple[int, int, int]:
        """(tickets that share, exclusive holders, tickets and asks that wait). Walks the line: for people."""
        gate, front = self.gate, self.front
        sharing = sum(1 for _ in self._before(gate))
        held = int(front is not None and front.state == "held")
        return sharing, held, len(self._shared) - sharing + len(self._exclusive) - held

    def _before(self, gate: int) -> Iterator[int]:
        for number in self._shared:
            if number >= gate:
                return
            yield number
