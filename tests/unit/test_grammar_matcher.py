"""A row's place in a grammar that is slow, complete or a dead end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from mlxpool.shared.errors import ApiError
from mlxpool.worker.grammar import formats
from mlxpool.worker.grammar.formats import Format
from mlxpool.worker.grammar.matcher import SLOW_S, MatcherConstraint, OpenCount
from mlxpool.worker.grammar.messages import Vocabulary
from mlxpool.worker.grammar.runtime import tokenizer_info, xgrammar

LETTERS = [bytes([byte]) for byte in range(256)]


class Matcher:
    """One whose calls take as long as they are told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.fill_s = 0.0
        self.accept_s = 0.0

    def fill_next_token_bitmask(self, mask: Any) -> bool:
        self.now_s += self.fill_s
        mask[:] = -1
        return True

    def accept_token(self, _token: int) -> bool:
        self.now_s += self.accept_s
        return True

    def is_terminated(self) -> bool:
        return False


def timed() -> tuple[Matcher, MatcherConstraint, Any]:
    matcher = Matcher()
    constraint = MatcherConstraint(matcher, [0], OpenCount(), "guided_grammar", lambda: matcher.now_s)
    return matcher, constraint, np.zeros(8, np.int32)


def follow(constraint: MatcherConstraint, mask: Any, tokens: Iterable[int]) -> None:
    for token in tokens:
        constraint.fill(mask)
        constraint.accept(token)


@pytest.mark.parametrize("call", ["fill", "accept"])
def test_a_grammar_that_becomes_slow_ends_its_row_and_says_where(call: str) -> None:
    matcher, constraint, mask = timed()
    for token in range(7):
        assert constraint.fill(mask)
        assert constraint.accept(token)
    setattr(matcher, f"{call}_s", SLOW_S * 2)
    with pytest.raises(ApiError) as caught:
        follow(constraint, mask, [1, 2])
    assert (caught.value.status, caught.value.code) == (400, "unsupported_schema")
    assert caught.value.param == "guided_grammar"
    assert caught.value.message.startswith(
        "guided_grammar became too slow to follow at token 8 of the answer"
    )


def test_one_slow_call_is_forgiven_and_quick_ones_never_add_up() -> None:
    matcher, constraint, mask = timed()
    matcher.fill_s = 1.0
    assert constraint.fill(mask)
    matcher.fill_s = matcher.accept_s = SLOW_S * 0.9
    for token in range(1000):
        assert constraint.accept(token)
        assert constraint.fill(mask)


def test_a_grammar_that_can_be_read_in_many_ways_takes_no_seconds() -> None:
    long = 256
    tokens = [*LETTERS, b"a" * 24, b""]
    info = tokenizer_info(Vocabulary(tokens, [257], 288))
    form = {"type": "grammar", "grammar": "root ::= root root root | root root | [a-z ]"}
    compiler = xgrammar().GrammarCompiler(info, max_threads=1, cache_enabled=False)
    matcher = xgrammar().GrammarMatcher(
        compiler.compile_structural_tag({"type": "structural_tag", "format": form})
    )
    constraint = MatcherConstraint(matcher, [257], OpenCount(), "guided_grammar")
    mask = np.zeros(9, np.int32)
    with pytest.raises(ApiError, match="too slow to follow"):
        follow(constraint, mask, [long] * 40)


@pytest.fixture(scope="module")
def without_eos() -> Callable[[Format], MatcherConstraint]:
    """Constraints of a model that has no token to end an answer with."""
    info = tokenizer_info(Vocabulary(LETTERS, [], 256))
    compiler = xgrammar().GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def make(form: Format) -> MatcherConstraint:
        tag = compiler.compile_structural_tag({"type": "structural_tag", "format": form})
        return MatcherConstraint(xgrammar().GrammarMatcher(tag), [], OpenCount(), "guided_regex")

    return make


def test_a_complete_grammar_is_over_where_no_token_can_say_so(
    without_eos: Callable[[Format], MatcherConstraint],
) -> None:
    constraint = without_eos(formats.regex("a{1,3}"))
    mask = np.zeros(8, np.int32)
    ends = []
    for token in b"aaa":
        assert constraint.fill(mask)
        assert constraint.accept(token)
        ends.append(constraint.over)
    # One more letter may come until none may.
    assert ends == [False, False, True]


def test_a_dead_end_is_told_where_no_token_can_end_it(
    without_eos: Callable[[Format], MatcherConstraint],
) -> None:
    constraint = without_eos({"type": "grammar", "grammar": "root ::= root"})
    with pytest.raises(ApiError, match="guided_regex leads nowhere: after 0 tokens"):
        constraint.fill(np.zeros(8, np.int32))
