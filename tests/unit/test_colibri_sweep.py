"""The order of a pass in groups, and when each one's reads may begin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.worker.colibri.residency import Pass, Placement
from mlxpool.worker.colibri.sweep import Group, beginnable, by_group, cuts, groups


def _placed(*pairs: tuple[int, int]) -> list[Placement]:
    return [Placement(*pair) for pair in pairs]


PLANNED = Pass(
    hits=_placed((0, 0), (1, 1)),
    arriving=_placed((2, 2)),
    early=_placed((3, 3), (4, 4)),
    late=_placed((5, 0)),
    through=[9, 8, 7, 6, 10],
)


@pytest.mark.parametrize(
    ("working", "many", "overlap", "staged", "lanes", "width"),
    [
        # A token's experts are computed one by one as they come, or all at the end.
        (8, False, True, None, 8, 1),
        (0, False, True, None, 1, 1),
        (8, False, False, None, 1, None),
        # Buffers on the way into slots are few, and each group of a token waits for its own.
        (8, False, True, 4, 2, None),
        (8, True, True, 3, 2, 3),
        # Many rows: halves of the working slots, quarters of the layer's own.
        (8, True, True, None, 2, 16),
        (48, True, True, None, 2, 24),
        (48, True, False, None, 1, 48),
        (1, True, True, None, 1, 16),
    ],
)
def test_how_a_pass_is_cut(
    working: int, many: bool, overlap: bool, staged: int | None, lanes: int, width: int | None
) -> None:
    assert cuts(working, 64, many=many, overlap=overlap, staged=staged) == (lanes, width)


def test_hits_come_first_and_working_slots_are_used_lane_by_lane() -> None:
    made = groups(PLANNED, working=4, lanes=2, width=1)
    assert [group.kind for group in made] == [
        "held",
        "arriving",
        "early",
        "early",
        "through",
        "through",
        "late",
        "through",
    ]
    through = [group for group in made if group.kind == "through"]
    assert [group.placements for group in through] == [
        _placed((6, 0), (7, 1)),
        _placed((8, 2), (9, 3)),
        _placed((10, 0)),
    ]


def test_reads_begin_as_soon_as_their_slots_are_nobodys() -> None:
    made = groups(PLANNED, working=4, lanes=2, width=None)
    kinds = [group.kind for group in made]
    assert kinds == ["held", "arriving", "early", "through", "through", "late", "through"]
    # At once: everything up to what replaces a hit.
    assert beginnable(made, 0, 0, None) == 5
    # The hits have been computed: up to what waits for a lane.
    assert beginnable(made, 5, 1, None) == 6
    assert beginnable(made, 6, 3, None) == 6
    assert beginnable(made, 6, 4, None) == 7


def test_without_overlap_a_group_is_read_when_its_turn_comes() -> None:
    made = groups(PLANNED, working=4, lanes=1, width=None)
    assert [len(group.placements) for group in made if group.kind == "through"] == [4, 1]
    for turn in range(len(made)):
        assert beginnable(made, turn, turn, 0) == turn + 1
    assert beginnable(made, 0, 0, 1) == 2


@st.composite
def _passes(draw: st.DrawFn) -> tuple[Pass, int, int]:
    experts = draw(st.permutations(range(24)))
    counts = [draw(st.integers(0, 6)) for _ in range(5)]
    parts, start = [], 0
    for count in counts:
        parts.append(experts[start : start + count])
        start += count
    hits, arriving, early, late, through = parts
    late = late[: len(hits)]
    slots = iter(range(99))
    held, coming, missing = (
        [Placement(one, next(slots)) for one in part] for part in (hits, arriving, early)
    )
    planned = Pass(
        held, coming, missing, [Placement(one, held[n].slot) for n, one in enumerate(late)], list(through)
    )
    working = draw(st.integers(1, 6))
    return planned, working, draw(st.integers(1, min(2, working)))


@given(
    case=_passes(),
    width=st.one_of(st.none(), st.integers(1, 4)),
    ahead=st.sampled_from([None, 0, 1]),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_every_row_is_computed_once_out_of_a_slot_that_holds_its_expert(
    case: tuple[Pass, int, int], width: int | None, ahead: int | None, data: st.DataObject
) -> None:
    """By playing the pass: a slot holds what was read into it last, and is read from only then."""
    planned, working, lanes = case
    made = groups(planned, working if planned.through else 0, lanes, width)
    needed = [one.expert for part in planned[:4] for one in part] + planned.through
    if not needed:
        assert made == []
        return
    ids = np.array(data.draw(st.lists(st.sampled_from(needed), min_size=1, max_size=40)) + needed)
    rows, places, starts = by_group(ids, made, 24)
    assert sorted(rows.tolist()) == list(range(len(ids)))
    own = {one.slot: one.expert for one in [*planned.hits, *planned.arriving]}
    shared: dict[int, int] = {}
    begun = 0
    for number, group in enumerate(made):
        upto = beginnable(made, begun, number, ahead)
        for one in made[begun:upto]:
            where = shared if one.kind == "through" else own
            where.update({slot: expert for expert, slot in one.placements})
        begun = upto
        assert begun > number
        span = slice(starts[number], starts[number + 1])
        where = shared if group.kind == "through" else own
        assert [where[place] for place in places[span].tolist()] == ids[rows[span]].tolist()
        assert (np.diff(places[span].astype(int)) >= 0).all()
    assert begun == len(made)


def test_nothing_is_made_of_nothing() -> None:
    assert groups(Pass([], [], [], [], []), 0, 1, None) == []
    assert Group("held", []).after == ()
