"""Stop strings: the earliest match wins, nothing of it is sent, only an ambiguous tail is held."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser
from mlxpool.worker.text.format import AnswerFormat
from mlxpool.worker.text.stops import StopMatcher


def run(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    sent = ""
    for chunk in chunks:
        text, stop = matcher.push(chunk)
        sent += text
        if stop is not None:
            return sent, stop
    return sent + matcher.flush(), None


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def test_a_stop_across_chunks_is_never_sent() -> None:
    assert run(["one ST", "O", "P two"], ["STOP"]) == ("one ", "STOP")


def test_only_the_ambiguous_tail_is_held() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("go ST").text == "go "
    assert matcher.push("ART").text == "START"


def test_the_earliest_match_wins_whatever_the_order_of_the_list() -> None:
    assert run(["a b c"], ["c", "b"]) == ("a ", "b")


def test_a_tail_that_never_became_a_stop_is_text() -> None:
    assert run(["abc\n"], ["\n\n"]) == ("abc\n", None)


@pytest.mark.parametrize("stops", [["ab", "b"], ["aba", "ba"], ["aab", "ab", "b"]])
@settings(deadline=None)
@given(text=st.text("ab", max_size=12), cuts=st.lists(st.integers(0, 12), max_size=6))
def test_every_chunking_stops_at_the_same_place(stops: list[str], text: str, cuts: list[int]) -> None:
    assert run(split(text, cuts), stops) == run(list(text), stops)


@settings(deadline=None)
@given(text=st.text("ab\n", max_size=20), stop=st.text("ab\n", min_size=1, max_size=4))
def test_one_stop_cuts_where_find_does(text: str, stop: str) -> None:
    start = text.find(stop)
    expected = (text, None) if start < 0 else (text[:start], stop)
    assert run(list(text), [stop]) == expected


def test_a_replacement_character_at_the_end_can_complete_a_stop() -> None:
    answer = AnswerText(ByteDetokeniser(lambda token: bytes([token])), AnswerFormat(stops=("x\ufffd",)))
    assert answer.push(ord("x")) == []
    assert answer.push(0xE2) == []
    assert (answer.flush(), answer.over, answer.stop) == ([], True, "x\ufffd")
