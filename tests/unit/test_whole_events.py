"""Whole events out of pieces, cut anywhere."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from mlxpool.parent.edge.whole_events import WholeEvents

ROLE = b'data: {"role":"assistant"}\n\n'
REST = b'data: {"role":"assistant","index":1}\n\n' + b"data: a\n\ndata: [DONE]\n\n"


def fed(events: WholeEvents, pieces: list[bytes]) -> bytes:
    """What comes out, which must be whole events each time."""
    given = [events.feed(piece) for piece in pieces]
    assert all(data == b"" or data.endswith(b"\n\n") for data in given)
    return b"".join(given)


def every_split(data: bytes) -> list[list[bytes]]:
    """The data in one, two and three pieces, cut at every place."""
    cuts = [(), *combinations(range(1, len(data)), 1), *combinations(range(1, len(data)), 2)]
    edges = [(0, *cut, len(data)) for cut in cuts]
    return [[data[a:b] for a, b in pairwise(edge)] for edge in edges]


ALL = ROLE + REST


@pytest.mark.parametrize(
    ("left_out", "start"),
    [(0, b""), (1, ROLE), (2, ROLE + b'data: {"role":"assistant","index":1}\n\n'), (9, ALL)],
)
def test_as_many_events_as_asked_are_left_out_whatever_the_pieces(left_out: int, start: bytes) -> None:
    for pieces in every_split(ALL):
        assert fed(WholeEvents(left_out), pieces) == ALL.removeprefix(start)


def test_an_event_goes_on_with_the_piece_that_completes_it() -> None:
    events = WholeEvents(1)
    assert events.feed(ROLE[:-1]) == b""
    assert events.feed(ROLE[-1:]) == b""
    assert events.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert events.feed(b"\n\n") == b"data: b\n\n"


def test_half_an_event_is_never_passed_on() -> None:
    assert fed(WholeEvents(), [ROLE, b"data: a"]) == ROLE
    assert fed(WholeEvents(1), [ROLE[:9]]) == b""
