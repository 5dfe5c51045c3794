"""The table of one layer's slots, against a plain simulator and under faults, cancels and shrinking."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxpool.worker.colibri.residency import PIN_SWAPS, Pass, Placement, Residency, choose_pins

EXPERTS = 12


def _take(table: Residency, needed: dict[int, int]) -> Pass:
    """A pass whose reads all end well, as the stream does it."""
    planned = table.plan(needed)
    table.touch(one.expert for one in sorted(planned.hits, key=lambda one: needed[one.expert]))
    for one in [*planned.early, *planned.late]:
        table.begin(one)
        table.loaded(one.expert)
    return planned


def test_what_was_used_longest_ago_gives_way() -> None:
    table = Residency(EXPERTS, 3)
    for expert in (0, 1, 2, 0):
        _take(table, {expert: 1})
    assert _take(table, {5: 1}).early == [Placement(5, 1)]
    assert list(table.held) == [2, 0, 5]
    assert table.evictions == 1


def test_a_pass_that_needs_more_than_there_is_keeps_the_most_routed_and_copies_nothing() -> None:
    table = Residency(EXPERTS, 3)
    _take(table, {0: 1, 1: 1, 2: 1})
    planned = _take(table, {0: 9, 1: 2, 2: 1, 3: 5, 4: 1, 5: 2, 6: 7})
    assert [one.expert for one in planned.hits] == [0, 1, 2]
    assert planned.early == []
    assert [one.expert for one in planned.late] == [6, 3]
    assert planned.through == [5, 4]
    assert set(table.held) == {0, 6, 3}


def test_with_equal_counts_what_is_held_stays() -> None:
    table = Residency(EXPERTS, 2)
    _take(table, {0: 1, 1: 1})
    planned = _take(table, dict.fromkeys(range(6), 1))
    assert (planned.early, planned.late, planned.through) == ([], [], [2, 3, 4, 5])
    assert set(table.held) == {0, 1}


def test_what_is_not_needed_goes_before_anything_that_is() -> None:
    table = Residency(EXPERTS, 3)
    _take(table, {0: 1, 1: 1, 2: 1})
    planned = table.plan({0: 1, 7: 3, 8: 2, 9: 1})
    assert [one.expert for one in planned.early] == [7, 8]
    assert planned.late == []
    assert planned.through == [9]


def test_pins_stay_and_leave_a_slot_open() -> None:
    table = Residency(EXPERTS, 2)
    _take(table, {0: 1, 1: 1})
    table.pin([0, 1])
    assert table.pinned == {0}
    for expert in range(2, 9):
        _take(table, {expert: 4})
    assert 0 in table.held
    single = Residency(EXPERTS, 1)
    _take(single, {0: 1})
    single.pin([0])
    assert _take(single, {1: 1}).early == [Placement(1, 0)]


def test_what_was_read_ahead_and_not_asked_for_is_the_first_to_give_way() -> None:
    table = Residency(EXPERTS, 3)
    _take(table, {0: 1, 1: 1, 2: 1})
    ahead = table.ahead([1, 4], 7)
    assert ahead == [Placement(4, 0)]
    table.begin(ahead[0])
    assert table.ahead([4, 5], 7) == [Placement(5, 1)]
    assert table.plan({4: 1}).arriving == [Placement(4, 0)]
    table.loaded(4, used=False)
    assert table.plan({6: 1}).early == [Placement(6, 0)]


def test_what_is_being_read_is_no_victim_and_more_goes_through() -> None:
    table = Residency(EXPERTS, 2)
    table.begin(table.ahead([3, 4], 1)[0])
    planned = table.plan({5: 1, 6: 1, 7: 1})
    assert [one.expert for one in planned.early] == [5]
    assert planned.through == [6, 7]


def test_a_failed_read_frees_its_slot() -> None:
    table = Residency(EXPERTS, 1)
    table.begin(Placement(3, 0))
    with pytest.raises(ValueError, match="are being read"):
        table.resize(1)
    table.failed(3)
    assert table.free == 1
    assert table.plan({3: 1}).early == [Placement(3, 0)]


def test_shrinking_keeps_pins_and_what_was_used_last_and_says_where_it_lay() -> None:
    table = Residency(EXPERTS, 5)
    for expert in (4, 3, 2, 1, 0):
        _take(table, {expert: 1})
    table.pin([4])
    lay = dict(table.held)
    moves = table.resize(3)
    assert set(table.held) == {4, 1, 0}
    assert dict(enumerate(moves)) == {slot: lay[expert] for expert, slot in table.held.items()}
    assert list(table.held) == [4, 1, 0]
    assert table.evictions == 2
    moves = table.resize(12)
    assert moves == [0, 1, 2]
    assert table.free == 9


@pytest.mark.parametrize("slots", [0, -1, 13])
def test_a_number_of_slots_that_cannot_be_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=f"12 experts can't have {slots} slots"):
        Residency(EXPERTS, slots)
    with pytest.raises(ValueError, match=f"can't have {slots} slots"):
        Residency(EXPERTS, 1).resize(slots)


class _Simulator:
    """Least recently used, in the fewest words."""

    def __init__(self, slots: int) -> None:
        self.slots, self.hits, self.held = slots, 0, OrderedDict[int, None]()

    def take(self, needed: list[int]) -> None:
        for expert in needed:
            if expert in self.held:
                self.hits += 1
                self.held.move_to_end(expert)
        for expert in needed:
            if expert not in self.held:
                if len(self.held) == self.slots:
                    self.held.popitem(last=False)
                self.held[expert] = None


@given(
    slots=st.integers(4, EXPERTS),
    passes=st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4, unique=True), max_size=60),
)
@settings(deadline=None, max_examples=60)
def test_hits_are_those_of_a_plain_simulator(slots: int, passes: list[list[int]]) -> None:
    table, plain, hits = Residency(EXPERTS, slots), _Simulator(slots), 0
    for needed in passes:
        hits += len(_take(table, dict.fromkeys(needed, 1)).hits)
        plain.take(needed)
        assert list(table.held) == list(plain.held)
    assert hits == plain.hits


class Machine(RuleBasedStateMachine):
    """Passes cut anywhere, reads that end in any order or fail, reads ahead, pins, other numbers of slots."""

    @initialize(slots=st.integers(1, EXPERTS))
    def start(self, slots: int) -> None:
        self.table = Residency(EXPERTS, slots)

    @rule(
        needed=st.dictionaries(st.integers(0, EXPERTS - 1), st.integers(1, 5), min_size=1),
        cut=st.integers(0, EXPERTS),
    )
    def a_pass_begins(self, needed: dict[int, int], cut: int) -> None:
        table = self.table
        before, pinned = dict(table.held), table.pinned
        planned = table.plan(needed)
        told = [one.expert for part in planned[:4] for one in part] + planned.through
        assert Counter(told) == Counter(needed.keys())
        assert all(before[one.expert] == one.slot for one in planned.hits)
        taken = [one.slot for one in planned.early]
        assert len(set(taken)) == len(taken)
        assert not set(taken) & {one.slot for one in [*planned.hits, *planned.arriving]}
        assert not set(taken) & set(table.loading.values())
        if planned.late or planned.through:
            assert len(planned.early) == table.slots - len(table.loading) - len(
                [expert for expert in before if expert in needed or expert in pinned]
            )
        table.touch(one.expert for one in planned.hits)
        for one in [*planned.early, *planned.late][:cut]:
            lost = table.begin(one)
            assert lost is None or lost not in pinned
        for one in planned.early[:cut]:
            assert table.loading[one.expert] == one.slot

    @rule(expected=st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=6), most=st.integers(0, 7))
    def something_is_read_ahead(self, expected: list[int], most: int) -> None:
        kept = set(self.table.pinned) | set(expected)
        still = {expert for expert in self.table.held if expert in kept}
        placed = self.table.ahead(expected, most)
        assert len(placed) <= most
        for one in placed:
            self.table.begin(one)
        assert still <= set(self.table.held)

    @precondition(lambda self: self.table.loading)
    @rule(data=st.data(), well=st.booleans(), used=st.booleans())
    def a_read_ends(self, data: st.DataObject, well: bool, used: bool) -> None:
        expert = data.draw(st.sampled_from(sorted(self.table.loading)))
        if well:
            self.table.loaded(expert, used=used)
            assert next(iter(reversed(self.table.held) if used else iter(self.table.held))) == expert
        else:
            self.table.failed(expert)
            assert expert not in self.table.held

    @rule(experts=st.lists(st.integers(0, EXPERTS - 1), unique=True))
    def favourites_change(self, experts: list[int]) -> None:
        self.table.pin(experts)
        assert len(self.table.pinned) <= self.table.slots - 1

    @precondition(lambda self: not self.table.loading)
    @rule(slots=st.integers(1, EXPERTS))
    def the_number_of_slots_changes(self, slots: int) -> None:
        before = dict(self.table.held)
        held = len(before)
        moves = self.table.resize(slots)
        assert len(self.table.held) == min(held, slots)
        assert {expert: moves[slot] for expert, slot in self.table.held.items()} == {
            expert: before[expert] for expert in self.table.held
        }

    @invariant()
    def every_slot_is_in_one_state(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        used = [*table.held.values(), *table.loading.values()]
        assert len(set(used)) == len(used)
        assert len(used) + table.free == table.slots
        assert all(0 <= slot < table.slots for slot in used)
        assert not set(table.held) & set(table.loading)


TestMachine = Machine.TestCase
TestMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def test_favourites_are_the_most_routed() -> None:
    assert choose_pins([0, 5, 3, 9, 0], [], 2) == [3, 1]
    assert choose_pins([0, 0, 0], [], 2) == []
    assert choose_pins([1, 2], [0], 0) == []


def test_a_favourite_is_replaced_by_one_that_is_wanted_much_more() -> None:
    assert choose_pins([10, 12, 0], [0], 1) == [0]
    assert choose_pins([10, 13, 0], [0], 1) == [1]


def test_only_some_favourites_change_at_once() -> None:
    counts = [1.0] * 8 + [100.0] * 8
    chosen = choose_pins(counts, range(8), 8)
    assert len([expert for expert in chosen if expert >= 8]) == PIN_SWAPS
