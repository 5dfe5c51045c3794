"""Reasoning is split off in every chunking; blanks beside its tags are nobody's."""

from __future__ import annotations

import itertools

import pytest

from mlxpool.shared.prompt.reasoning_families import REASONING_FAMILIES
from mlxpool.worker.text.events import Reasoning, Text
from mlxpool.worker.text.find import Finder, Found
from mlxpool.worker.text.format import AnswerFormat
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.reasoning import BLANKS_CHARS
from tests.tools.answers import machine, run

THINK = AnswerFormat(reasoning="think")
INSIDE = AnswerFormat(reasoning="think", starts_inside=True)


def test_an_implicit_opener_splits_alike_in_all_chunkings() -> None:
    text = "weighing it</think>Answer."
    edges = range(1, len(text))
    chunkings = [*itertools.combinations(edges, 1), *itertools.combinations(edges, 2), tuple(edges)]
    for cuts in chunkings:
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert run(pieces, INSIDE) == [Reasoning("weighing it"), Text("Answer.")], pieces


@pytest.mark.parametrize("family", sorted(REASONING_FAMILIES))
def test_every_family_splits_its_own_tags_by_letter(family: str) -> None:
    opening, closing = REASONING_FAMILIES[family].tags[0]
    text = f"{opening} a < b {closing}Answer {opening} here."
    assert run(list(text), AnswerFormat(reasoning=family)) == [
        Reasoning(" a < b "),
        Text(f"Answer {opening} here."),
    ]


def test_reasoning_streams_as_it_comes() -> None:
    answer = machine(["<th", "ink>\n", "so ", "it", " is\n", "</thi", "nk>\n\n", "Yes"], THINK)
    assert [answer.push(token) for token in range(8)] == [
        [], [], [Reasoning("so ")], [Reasoning("it")], [Reasoning(" is")], [], [], [Text("Yes")],
    ]  # fmt: skip


def test_a_block_of_blanks_is_no_reasoning_and_a_longer_one_is() -> None:
    assert run(list("<think>\n \n</think>Yes"), THINK) == [Text("Yes")]
    blanks = "\n" * (BLANKS_CHARS + 10)
    assert run([f"<think>{blanks}</think>Yes"], THINK) == [Reasoning(blanks[2:]), Text("Yes")]
    assert run(list(f"<think>{blanks}</think>Yes"), THINK) == [Reasoning(blanks[2:]), Text("Yes")]


def test_blanks_in_a_block_are_held_for_a_bounded_length() -> None:
    answer = machine(["<think>", *"\n" * 1000], THINK)
    said = sum(len(event.text) for token in range(1001) for event in answer.push(token))  # type: ignore[union-attr]
    assert said >= 1000 - answer.bound_chars


def test_many_blanks_before_a_tag_make_it_text() -> None:
    text = " " * (BLANKS_CHARS + 1) + "<think>x</think>"
    assert run([text], THINK) == run(list(text), THINK) == [Text(text)]


@pytest.mark.parametrize("rest", ["", "\n", "\n\n", " \n\n\n "])
def test_an_answer_that_ends_behind_its_reasoning_is_empty(rest: str) -> None:
    assert run(list(f"<think>hm</think>{rest}"), THINK) == [Reasoning("hm")]


def test_an_answer_cut_in_the_blanks_of_a_block_says_nothing() -> None:
    assert run(list("<think>\n"), THINK) == []
    assert run(list("\n"), INSIDE) == []


def test_an_answer_of_blanks_alone_is_kept() -> None:
    assert run(list("\n\n"), THINK) == [Text("\n\n")]
    assert run(["\n\n"], AnswerFormat(reasoning="think", tools="json_tools")) == [Text("\n\n")]


def test_half_an_opening_tag_is_text_where_the_answer_ends() -> None:
    assert run(list("<thin"), THINK) == [Text("<thin")]


def test_half_a_closing_tag_is_reasoning_where_the_answer_ends() -> None:
    assert run(list("<think>hm</thi"), THINK) == [Reasoning("hm</thi")]


def test_a_tool_calls_special_token_ends_the_reasoning_and_its_letters_do_not() -> None:
    how = AnswerFormat(reasoning="think", tools="json_tools")
    special = Marks(("<tool_call>", "</tool_call>"), {"<tool_call>": 1, "</tool_call>": 2}.get)
    text = "<think>maybe <tool_call>\nno"
    assert run(list(text), how) == [Reasoning("maybe <tool_call>\nno")]
    assert run(list(special.form(text)), how, special) == [Reasoning("maybe "), Text("<tool_call>\nno")]


def test_the_earliest_string_is_found_and_of_two_at_one_place_the_longest() -> None:
    finder = Finder(["bc", "abcd", "ab", "d"])
    assert finder.find("xxabcd") == Found(2, "abcd")
    assert finder.find("xxabce") == Found(2, "ab")
    assert finder.find("xxbcd") == Found(2, "bc")
    assert finder.find("xxabcd", 3) == Found(3, "bc")
    assert Finder(["long", "xlo"]).find("xlong") == Found(0, "xlo")
    assert Finder(["longest", "ng"]).find("a longest") == Found(2, "longest")
    assert Finder(["longest one", "st"]).find("longest") == Found(5, "st")
    assert Finder(["abc", "b"]).find("abc") == Found(0, "abc")
    assert (finder.tail("xxabc"), finder.tail("xxa"), finder.tail("xx"), finder.tail("abc", 1)) == (
        3,
        1,
        0,
        0,
    )
