"""A row whose reasoning has a budget: counted, closed as its family closes it, free afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlxpool.shared.prompt.reasoning_families import HARMONY, REASONING_FAMILIES
from mlxpool.worker.grammar.formats import closing_texts
from mlxpool.worker.grammar.thinking_budget import ThinkingBudget, within_budget
from mlxpool.worker.request.plan import ThinkingLimit
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.events import Reasoning, Text, TextEvent
from mlxpool.worker.text.format import AnswerFormat
from mlxpool.worker.text.marks import Marks
from tests.tools.answers import Pieces, merged, special_marks

# Tokens of a model, by their place.
VOCABULARY = (
    "a", "b", "c", "\n", "\n\n", "<think>", "</think>", "</thinking>", "<thinking>", "</", "think", ">",
    "<|end|>", "<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>", "final", "commentary",
)  # fmt: skip
HARMONY_CLOSING = ("<|end|>", "<|start|>", "assistant", "<|channel|>")


def ids(*texts: str) -> tuple[int, ...]:
    return tuple(map(VOCABULARY.index, texts))


class Tokens:
    """An inner grammar: what may come is these tokens, None for all."""

    def __init__(self, *may: str) -> None:
        self.may = ids(*may)
        self.accepted: list[int] = []
        self.released = 0
        self.over = False

    def fill(self, mask: Any) -> bool:
        for token in self.may:
            mask[token // 32] |= np.int32(1 << token % 32)
        return bool(self.may)

    def accept(self, token: int) -> bool:
        self.accepted.append(token)
        return True

    def release(self) -> None:
        self.released += 1


def answer_of(marks: Marks | None, **fields: Any) -> AnswerText:
    marks = marks or Marks()
    return AnswerText(Pieces([marks.form(text) for text in VOCABULARY]), AnswerFormat(**fields), marks)


def generate(
    budget: ThinkingBudget, answer: AnswerText, wanted: Sequence[str]
) -> tuple[list[str], list[TextEvent]]:
    """The tokens that come, and what is said, of a model that wants to write `wanted`: what may not come is
    replaced by the first token that may."""
    came: list[str] = []
    said: list[TextEvent] = []
    mask = np.zeros(-(-len(VOCABULARY) // 32), np.int32)
    left = list(ids(*wanted))
    while left:
        mask[:] = 0
        token = left[0]
        if budget.fill(mask):
            may = [place for place in range(len(VOCABULARY)) if int(mask[place // 32]) >> place % 32 & 1]
            token = token if token in may else may[0]
        if token == left[0]:
            left.pop(0)
        came.append(VOCABULARY[token])
        assert budget.accept(token)
        said += answer.push(token)
    return came, merged([*said, *answer.flush()])


def limit(tokens: int, *closing: str, tag: str = "</think>", not_then: Sequence[str] = ()) -> ThinkingLimit:
    return ThinkingLimit(tokens, {tag: ids(*closing)}, ids(*not_then))


def budgeted(answer: AnswerText, of: ThinkingLimit, inner: Any = None) -> ThinkingBudget:
    made = within_budget(of, answer, inner)
    assert isinstance(made, ThinkingBudget)
    return made


def test_a_row_without_a_budget_keeps_its_own_constraint() -> None:
    inner = Tokens()
    assert within_budget(None, answer_of(None), None) is None
    assert within_budget(None, answer_of(None), inner) is inner


@pytest.mark.parametrize("inner", [None, Tokens(*VOCABULARY)])
def test_a_block_is_closed_after_so_many_tokens_and_the_row_is_free_again(inner: Any) -> None:
    answer = answer_of(None, reasoning="think", starts_inside=True)
    budget = budgeted(answer, limit(3, "\n", "</think>", "\n\n"), inner)
    came, said = generate(budget, answer, ["a", "b", "c", "a", "b", "c", "a", "b"])
    assert came == ["a", "b", "c", "\n", "</think>", "\n\n", "a", "b", "c", "a", "b"]
    assert said == [Reasoning("abc"), Text("abcab")]
    if inner is not None:
        assert [VOCABULARY[token] for token in inner.accepted] == came


def test_only_what_is_thought_counts() -> None:
    answer = answer_of(None, reasoning="think")
    budget = budgeted(answer, limit(2, "</think>"))
    came, said = generate(budget, answer, ["<think>", "a", "</think>", "\n\n", "b", "b", "b", "b"])
    assert came == ["<think>", "a", "</think>", "\n\n", "b", "b", "b", "b"]
    assert said == [Reasoning("a"), Text("bbbb")]


def test_a_second_block_has_what_the_first_left_its_closing_tag_counted() -> None:
    answer = answer_of(None, reasoning="think")
    budget = budgeted(answer, limit(3, "</think>"))
    came, said = generate(budget, answer, ["<think>", "a", "</think>", "<think>", "b", "b", "b", "c"])
    assert said[-1] == Text("bbc")
    assert came == ["<think>", "a", "</think>", "<think>", "b", "</think>", "b", "b", "c"]


def test_a_block_is_closed_by_the_tag_that_the_model_opened_it_for() -> None:
    answer = answer_of(None, reasoning="think")
    closings = {"</think>": ids("</think>"), "</thinking>": ids("</thinking>")}
    budget = budgeted(answer, ThinkingLimit(1, closings))
    assert generate(budget, answer, ["<thinking>", "a", "b"])[1] == [Reasoning("a"), Text("b")]


def test_a_tag_of_several_tokens_comes_one_after_the_other() -> None:
    answer = answer_of(None, reasoning="think", starts_inside=True)
    budget = budgeted(answer, limit(1, "</", "think", ">"))
    assert generate(budget, answer, ["a", "b"])[0] == ["a", "</", "think", ">", "b"]


def test_what_closes_nothing_is_not_tried_for_ever() -> None:
    answer = answer_of(None, reasoning="think", starts_inside=True)
    budget = budgeted(answer, limit(1, "c"))
    assert generate(budget, answer, ["a", "b", "b", "b"])[0] == ["a", "c", "b", "b", "b"]


def test_a_grammar_that_has_no_place_for_the_tag_is_kept_to() -> None:
    answer = answer_of(None, reasoning="think", starts_inside=True)
    budget = budgeted(answer, limit(1, "</think>"), Tokens("a", "b"))
    assert generate(budget, answer, ["a", "b", "a"])[0] == ["a", "b", "a"]


def test_a_tag_waits_for_the_end_of_a_character() -> None:
    answer = answer_of(None, reasoning="think", starts_inside=True)
    inside = iter([True, True, False])
    budget = ThinkingBudget(
        limit(1, "</think>"), lambda: answer.thinks_until, lambda: next(inside, False), None
    )
    assert generate(budget, answer, ["a", "b", "b", "b"])[0] == ["a", "b", "b", "</think>", "b"]


def test_a_character_that_never_ends_is_waited_for_no_longer_than_one_can_be() -> None:
    answer = answer_of(None, reasoning="think", starts_inside=True)
    budget = ThinkingBudget(limit(1, "</think>"), lambda: answer.thinks_until, lambda: True, None)
    came, _ = generate(budget, answer, ["a", *"b" * 9])
    assert came == ["a", *"bbbb", "</think>", *"bbbbb"]


class Turns(Tokens):
    """A grammar that has a place for other tokens at each turn."""

    def __init__(self, *turns: str) -> None:
        super().__init__()
        self.turns = [ids(*turn.split()) for turn in turns]

    def fill(self, mask: Any) -> bool:
        self.may = self.turns[len(self.accepted)]
        return super().fill(mask)


def test_a_tag_that_the_grammar_has_no_place_for_yet_comes_when_it_has() -> None:
    answer = answer_of(None, reasoning="think", starts_inside=True)
    budget = budgeted(answer, limit(1, "</think>"), Turns("a", "b", "b </think>", "b"))
    came, said = generate(budget, answer, ["a", "b", "b"])
    assert came == ["a", "b", "</think>", "b"]
    assert said == [Reasoning("ab"), Text("b")]


def test_a_tag_that_the_grammar_breaks_off_is_not_begun_again() -> None:
    answer = answer_of(None, reasoning="think", starts_inside=True)
    budget = budgeted(answer, limit(1, "</", "think", ">"), Turns("a", "</ b", "b", "</ b", "</ b"))
    assert generate(budget, answer, ["a", "b", "b", "b"])[0] == ["a", "</", "b", "b", "b"]


def test_a_message_of_reasoning_is_followed_by_one_of_another_kind() -> None:
    marks = special_marks()
    answer = answer_of(marks, reasoning=HARMONY)
    of = limit(2, *HARMONY_CLOSING, tag="<|end|>", not_then=["analysis"])
    wanted = ["<|channel|>", "analysis", "<|message|>", "a", "b", "c", "analysis", "<|message|>", "c"]
    budget = budgeted(answer, of)
    mask = np.zeros(1, np.int32)
    for token in ids(*wanted[:5], *HARMONY_CLOSING):
        mask[:] = 0
        budget.fill(mask)
        assert budget.accept(token)
        answer.push(token)
    assert budget.fill(mask)
    assert not int(mask[0]) >> VOCABULARY.index("analysis") & 1
    assert int(mask[0]) >> VOCABULARY.index("final") & 1
    assert budget.accept(VOCABULARY.index("final"))
    mask[:] = 0
    assert not budget.fill(mask)


def test_what_it_wraps_is_released_with_it_and_says_when_the_answer_is_over() -> None:
    inner = Tokens()
    answer = answer_of(None, reasoning="think", starts_inside=True)
    budget = budgeted(answer, limit(1, "</think>"), inner)
    assert not budget.over
    inner.over = True
    assert budget.over
    budget.release()
    assert inner.released == 1
    ThinkingBudget(limit(1), lambda: None, lambda: False).release()


@pytest.mark.parametrize("family", REASONING_FAMILIES.values(), ids=lambda family: family.name)
def test_every_familys_closing_text_closes_its_block(family: Any) -> None:
    closings, then = closing_texts(family.name, in_grammar=False)
    assert then == ""
    for opening, closing in family.tags:
        vocabulary = [opening, "thought", closings[closing], "said"]
        answer = AnswerText(Pieces(vocabulary), AnswerFormat(reasoning=family.name))
        events = [event for token in range(4) for event in answer.push(token)]
        assert merged([*events, *answer.flush()]) == [Reasoning("thought"), Text("said")]
