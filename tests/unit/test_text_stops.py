"""Stop strings: the earliest match wins, nothing of it is sent, only an ambiguous tail is held."""

from __future__ import annotations

import itertools
from typing import SupportsIndex

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


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: read single characters until the text ends with a stop, the longest of those."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=9), min_size=1, max_size=5)


@settings(deadline=None, max_examples=300)
@given(text=st.text("ab\n", max_size=40), stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_any_stops_cut_where_the_definition_does(text: str, stops: list[str], cuts: list[int]) -> None:
    assert run(split(text, cuts), stops) == naive(text, stops)


@settings(deadline=None)
@given(text=st.text("ab\n", max_size=30), stops=STOPS)
def test_what_is_held_is_the_longest_end_that_begins_a_stop(text: str, stops: list[str]) -> None:
    text = naive(text, stops)[0]
    matcher = StopMatcher(stops)
    matcher.push(text)
    beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
    assert matcher.held_chars == max(len(begin) for begin in beginnings if text.endswith(begin))


def test_what_was_let_go_is_no_beginning_of_a_stop_any_more() -> None:
    matcher = StopMatcher(["STOP"])
    matcher.push("ST")
    assert matcher.flush() == "ST"
    assert matcher.push("OP, ST") == ("OP, ", None)


def test_a_character_costs_the_same_whatever_the_stops_are() -> None:
    looks = 0

    class Counted(str):
        def __getitem__(self, key: SupportsIndex | slice) -> str:
            nonlocal looks
            looks += 1
            return super().__getitem__(key)

    stops = ["ab" * place + "a" * (1024 - 2 * place) for place in range(16)]
    matcher = StopMatcher([Counted(stop) for stop in stops])
    # Long beginnings that fail again and again.
    text = ("ab" * 15 + "a" * 990 + "b") * 20
    for at in range(0, len(text), 4):
        matcher.push(text[at : at + 4])
    assert looks < 5 * len(stops) * (len(text) + 1024)


def test_a_replacement_character_at_the_end_can_complete_a_stop() -> None:
    answer = AnswerText(ByteDetokeniser(lambda token: bytes([token])), AnswerFormat(stops=("x\ufffd",)))
    assert answer.push(ord("x")) == []
    assert answer.push(0xE2) == []
    assert (answer.flush(), answer.over, answer.stop) == ([], True, "x\ufffd")
