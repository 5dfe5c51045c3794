"""Which experts of a layer are held, in which slot, and what gives way: the table of one layer. Pure.

A slot is free, being read into, or holds an expert. What a pass needs is told apart into what is held (hits),
what is being read already, and what must be read; the latter goes where nothing that is needed lies: into
free slots, then over what was used longest ago. Where a pass needs more than the layer has room for, the most
routed end up in its slots: those of them that replace an expert of the same pass are read after that one has
been used (`late`), the rest goes through slots that belong to no layer (`through`). So every expert is read
once and none is copied. With equal counts what is held stays.

Owned by the engine's thread. Nothing here waits: the caller says when a read has ended, and how.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

# A favourite must be this much more wanted than a pinned expert to take its place: two of equal worth would
# change places for ever.
PIN_ADVANTAGE = 1.25
# Of a layer and turn: pins follow what a machine is used for, not what one answer was about.
PIN_SWAPS = 4


class Placement(NamedTuple):
    """An expert to be read and the slot it is read into."""

    expert: int
    slot: int


class Pass(NamedTuple):
    """What a pass over the layer does. hits: held, with their slots. arriving: being read since before, with
    their slots. early: to be read at once. late: to be read when the hits have been used. through: to be read
    into slots of no layer."""

    hits: list[Placement]
    arriving: list[Placement]
    early: list[Placement]
    late: list[Placement]
    through: list[int]


class Residency:
    """experts: of the layer. slots: at least one."""

    def __init__(self, experts: int, slots: int) -> None:
        _check(experts, slots)
        self.experts = experts
        self.slots = slots
        # By expert, the one used longest ago first.
        self._held: OrderedDict[int, int] = OrderedDict()
        self._loading: dict[int, int] = {}
        # Taken from the end: the lowest slot first.
        self._free = list(range(slots - 1, -1, -1))
        # By slot: what it holds or is being filled with.
        self._holder: list[int | None] = [None] * slots
        self._pins: list[int] = []
        self._pinned: frozenset[int] = frozenset()
        self.evictions = 0

    @property
    def held(self) -> Mapping[int, int]:
        """Slot by expert, the one used longest ago first."""
        return self._held

    @property
    def loading(self) -> Mapping[int, int]:
        """Slot by expert that is being read."""
        return self._loading

    @property
    def pinned(self) -> frozenset[int]:
        return self._pinned

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def complete(self) -> bool:
        """Every expert is held: nothing can be missed any more."""
        return len(self._held) == self.experts

    def plan(self, needed: Mapping[int, int]) -> Pass:
        """needed: how many rows each expert is needed for. Changes nothing."""
        hits, arriving, missing = [], [], []
        for expert in needed:
            if (slot := self._held.get(expert)) is not None:
                hits.append(Placement(expert, slot))
            elif (slot := self._loading.get(expert)) is not None:
                arriving.append(Placement(expert, slot))
            else:
                missing.append(expert)
        if not missing:
            return Pass(hits, arriving, [], [], [])
        missing.sort(key=lambda expert: -needed[expert])
        room = self._room(needed)
        early = [Placement(expert, slot) for expert, slot in zip(missing, room, strict=False)]
        late, rest = self._late(missing[len(early) :], needed)
        return Pass(hits, arriving, early, late, rest)

    def _room(self, spared: Collection[int]) -> list[int]:
        """Slots that may be read into at once: free ones, then by how long ago they were used."""
        unused = [
            slot for expert, slot in self._held.items() if expert not in spared and expert not in self._pinned
        ]
        return [*reversed(self._free), *unused]

    def _late(self, missing: list[int], needed: Mapping[int, int]) -> tuple[list[Placement], list[int]]:
        """missing: the most needed first. Which of them replace hits, and which are left."""
        if not missing:
            return [], []
        leaving = [expert for expert in self._held if expert in needed and expert not in self._pinned]
        leaving.sort(key=lambda expert: needed[expert])
        late = []
        for expert, left in zip(missing, leaving, strict=False):
            if needed[expert] <= needed[left]:
                break
            late.append(Placement(expert, self._held[left]))
        return late, missing[len(late) :]

    def ahead(self, expected: Sequence[int], most: int) -> list[Placement]:
        """What to read before it is asked for: so many of `expected` at most, over none of them nor a pin."""
        missing = [expert for expert in expected if expert not in self._held and expert not in self._loading]
        if not missing:
            return []
        room = self._room(expected)
        return [Placement(expert, slot) for expert, slot in zip(missing[:most], room, strict=False)]

    def touch(self, experts: Iterable[int]) -> None:
        """Held experts are in use, the last one latest."""
        for expert in experts:
            self._held.move_to_end(expert)

    def begin(self, placement: Placement) -> int | None:
        """A read into the slot begins; what it held is gone. Returns that expert, None where it was free."""
        expert, slot = placement
        if expert in self._held or expert in self._loading:
            raise ValueError(f"expert {expert} is held already")
        lost = self._holder[slot]
        if lost is None:
            self._free.remove(slot)
        elif lost in self._loading:
            raise ValueError(f"slot {slot} is being read into")
        else:
            del self._held[lost]
            self.evictions += 1
        self._loading[expert] = slot
        self._holder[slot] = expert
        return lost

    def loaded(self, expert: int, *, used: bool = True) -> None:
        """The read has ended well. used: a pass has asked for it; what was read ahead of one is the first to
        give way until then."""
        self._held[expert] = self._loading.pop(expert)
        if not used:
            self._held.move_to_end(expert, last=False)

    def failed(self, expert: int) -> None:
        """The read has failed or never began; its slot holds nothing."""
        slot = self._loading.pop(expert)
        self._holder[slot] = None
        self._free.append(slot)

    def pin(self, experts: Iterable[int]) -> None:
        """These keep their slots while they are held, in order of worth; one slot at least stays open."""
        self._pins = list(experts)[: self.slots - 1]
        self._pinned = frozenset(self._pins)

    def resize(self, slots: int) -> list[int]:
        """Have so many slots: pins stay first, then what was used last. Nothing may be being read.

        Returns where what stays lies in the old slots, by new slot.
        """
        _check(self.experts, slots)
        if self._loading:
            raise ValueError(f"experts {sorted(self._loading)} are being read")
        self.slots = slots
        self.pin(self._pins)
        unpinned = [expert for expert in self._held if expert not in self._pinned]
        pinned = [expert for expert in self._held if expert in self._pinned]
        stay = set([*unpinned, *pinned][-slots:])
        self.evictions += len(self._held) - len(stay)
        kept = sorted(stay, key=lambda expert: self._held[expert])
        moves = [self._held[expert] for expert in kept]
        places = {expert: slot for slot, expert in enumerate(kept)}
        self._held = OrderedDict((expert, places[expert]) for expert in self._held if expert in stay)
        self._holder = [*kept, *[None] * (slots - len(kept))]
        self._free = list(range(slots - 1, len(kept) - 1, -1))
        return moves


def _check(experts: int, slots: int) -> None:
    if not 1 <= slots <= experts:
        raise ValueError(f"a layer of {experts} experts can't have {slots} slots")


def choose_pins(counts: Sequence[float], pinned: Collection[int], most: int) -> list[int]:
    """Whom to pin: at most so many, by how often each was routed to, the most wanted first.

    Pins that are there stay unless another is wanted PIN_ADVANTAGE times as much, at most PIN_SWAPS a call.
    """
    if most <= 0:
        return []
    wanted = sorted((expert for expert in range(len(counts)) if counts[expert] > 0), key=lambda e: -counts[e])
    stay = sorted(pinned, key=lambda expert: -counts[expert])[:most]
    others = [expert for expert in wanted if expert not in stay]
    fill = most - len(stay)
    chosen = stay + others[:fill]
    for expert in others[fill:][:PIN_SWAPS]:
        weakest = min(chosen, key=lambda one: counts[one])
        if counts[expert] <= PIN_ADVANTAGE * counts[weakest]:
            break
        chosen[chosen.index(weakest)] = expert
    return sorted(chosen, key=lambda expert: -counts[expert])
