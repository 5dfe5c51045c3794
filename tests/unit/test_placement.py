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
