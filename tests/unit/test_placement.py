"""The memory decision on slots made by hand: states that the scheduler passes through too quickly."""

from __future__ import annotations

import pytest

from mlxpool.parent.pool.placement import place
from mlxpool.parent.pool.state import Slot, Ticket
from mlxpool.shared.control import Phase
from tests.unit.pool_world import model


def resident(name: str, phase: Phase, reserved: int = 10) -> Slot:
    return Slot(name, model(name, reserved), phase=phase, worker=1, told_go=True, reserved=reserved)


def wanting(name: str, number: int, planned: int = 10) -> Slot:
    slot = Slot(name, model(name, planned))
    slot.waiting.append(Ticket(number, name, 0.0))
    return slot


def test_an_idle_ready_model_is_drained_for_a_demand():
    assert place([resident("a", "ready"), wanting("b", 1)], 10, 2).drain == ["a"]


@pytest.mark.parametrize("phase", ["starting", "loading", "draining", "stopping"])
def test_only_a_ready_model_is_a_victim(phase: Phase):
    move = place([resident("a", phase), wanting("b", 1)], 10, 2)
    assert (move.drain, move.closing, move.start) == ([], {}, [])


def test_what_is_being_released_is_promised_to_the_oldest_demand_alone():
    slots = [resident("a", "stopping"), resident("c", "ready"), wanting("young", 2), wanting("old", 1)]
    move = place(slots, 20, 3)
    assert move.blocked["old"] == ("a",)
    assert move.drain == ["c"]  # for the younger one: the older has a's room already


def test_no_victim_is_taken_when_all_together_would_not_be_enough():
    slots = [resident("a", "ready", 5), resident("b", "loading", 10), wanting("c", 1, 12)]
    assert place(slots, 20, 2).drain == []


def spare_slot(reserved: int = 2) -> Slot:
    return Slot("", model("", reserved), phase="starting", worker=9, reserved=reserved)


def test_the_spare_counts_for_one_demand_alone():
    move = place([wanting("a", 1), wanting("b", 2)], 20, 3, spare_slot())
    assert (move.start, move.adopt) == (["a", "b"], "a")
    move = place([wanting("a", 1), wanting("b", 2)], 19, 3, spare_slot())
    assert (move.start, move.adopt) == (["a"], "a")


def test_the_spare_is_a_victim_before_any_model():
    importing = Slot("b", model("b", 10), phase="starting", worker=2, reserved=1)
    importing.waiting.append(Ticket(1, "b", 0.0))
    move = place([resident("a", "ready", 9), importing], 20, 2, spare_slot())
    assert move.drain == [""]


def busy(name: str, running: int, *queued: int) -> Slot:
    slot = resident(name, "ready")
    slot.running[running] = Ticket(running, name, 0.0)
    slot.waiting.extend(Ticket(number, name, 0.0) for number in queued)
    return slot


def test_tickets_that_are_queued_when_an_eviction_becomes_needed_are_served_before_it():
    assert place([busy("a", 1, 3), wanting("b", 2)], 10, 4).closing == {"a": 4}


def test_an_eviction_that_was_needed_for_long_still_waits_for_older_tickets_of_its_victim():
    victim, demand = resident("d", "ready"), wanting("b", 4)
    victim.waiting.append(Ticket(3, "d", 0.0))
    demand.evicts_from = 2  # since an older ticket of b's, which is gone
    move = place([victim, demand], 10, 5)
    assert (move.drain, move.closing) == ([], {"d": 4})


def test_a_model_is_no_victim_before_it_has_served_what_it_was_loaded_for():
    victim, demand = resident("d", "ready"), wanting("b", 4)
    victim.waiting.append(Ticket(8, "d", 0.0))
    victim.serves_before = 9
    demand.evicts_from = 5
    move = place([victim, demand], 10, 10)
    assert move.drain == []
