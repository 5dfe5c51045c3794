"""From tokens to a row's events: how an answer ends, and what its reason says."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.worker.engine.answering import events_of
from mlxpool.worker.engine.group import Sampled
from mlxpool.worker.engine.row import Row
from mlxpool.worker.request.plan import Plan, Sampling
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser
from mlxpool.worker.text.events import (
    Event,
    Finish,
    Lane,
    Logprobs,
    Prefilled,
    Text,
    ToolCallArguments,
    ToolCallEnd,
    Usage,
)
from mlxpool.worker.text.format import AnswerFormat, DeclaredTool
from mlxpool.worker.text.marks import Marks, TokenText
from tests.tools.answers import machine

EOS = 1000
_GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=1)
_FORMATS = {
    family: AnswerFormat(tools=family, declared=(DeclaredTool("f", {}),))
    for family in ("qwen3_coder", "json_tools")
}


def answered(pieces: Sequence[str], how: AnswerFormat, max_tokens: int) -> list[Event]:
    """All events of a row whose tokens are these pieces and then an eos, with log-probabilities."""
    plan = Plan((1, 2), max_tokens, True, _GREEDY, frozenset({EOS}), how)
    row = Row(plan, machine(pieces, how), lambda _: None, token_bytes=lambda token: pieces[token].encode())
    reading = np.zeros(1, np.float32)
    events: list[Event] = []
    for token in (*range(len(pieces)), EOS):
        said, over = events_of(Sampled(row, token, reading), "batch")
        events += said
        if over:
            break
    return events


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("qwen3_coder", "<tool_call><function=f><parameter=x>\n1\n</parameter>", {"x": "1"}),
        ("json_tools", '<tool_call>{"name": "f", "arguments": {"x": "ab', {"x": "ab"}),
    ],
)
def test_an_eos_closes_an_open_call_and_a_length_limit_does_not(
    family: str, text: str, arguments: dict[str, str]
) -> None:
    def written(events: list[Event]) -> str:
        return "".join(event.text for event in events if isinstance(event, ToolCallArguments))

    ended = answered(list(text), _FORMATS[family], max_tokens=len(text) + 1)
    assert json.loads(written(ended)) == arguments
    assert ended[-1] == Finish("tool_calls")
    cut = answered(list(text), _FORMATS[family], max_tokens=len(text))
    assert written(ended).startswith(written(cut))
    assert not any(isinstance(event, ToolCallEnd) for event in cut)
    assert cut[-1] == Finish("length")


def spelled(events: list[Event]) -> str:
    return "".join(event.chosen.token for event in events if isinstance(event, Logprobs))


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def test_a_stop_string_is_not_spelled_by_log_probabilities_either() -> None:
    events = answered(["hi", " ", "SEC", "RET", " x"], AnswerFormat(stops=("SECRET",)), 9)
    assert (said(events), spelled(events), events[-1]) == ("hi ", "hi ", Finish("stop", "SECRET"))


def test_a_token_that_reaches_into_a_stop_has_no_log_probability() -> None:
    events = answered(["hi", " SEC", "RET"], AnswerFormat(stops=("SECRET",)), 9)
    assert (said(events), spelled(events)) == ("hi ", "hi")


def test_log_probabilities_come_with_their_text_and_not_before_it() -> None:
    plain = answered(["a", "S", "b"], AnswerFormat(stops=("SX",)), 9)
    assert [type(event) for event in plain[:-2]] == [Prefilled, Logprobs, Text, Logprobs, Logprobs, Text]
    assert (said(plain), spelled(plain)) == ("aSb", "aSb")


def test_a_stop_inside_of_a_call_that_can_not_be_read_is_not_spelled() -> None:
    how = AnswerFormat(tools="json_tools", declared=(DeclaredTool("f", {}),), stops=("STOP",))
    pieces = ["so ", "<tool_call>", '{"name"', ': "f" ', "STO", "P", " }", " on"]
    events = answered(pieces, how, 20)
    assert said(events) == 'so <tool_call>{"name": "f" '
    assert spelled(events) == said(events)


_TOKENS = {0: b"Hi", 1: b"", 2: b"\xf0\x9f", 3: b"\x98\x80", 4: b"!"}
_NO_TOP = np.zeros(1, np.float32)


def byte_row(stops: tuple[str, ...]) -> Row:
    """A row whose tokens are _TOKENS, the empty one special."""
    how = AnswerFormat(stops=stops)
    plan = Plan((1, 2), 99, True, _GREEDY, frozenset({EOS}), how)
    text = AnswerText(TokenText(ByteDetokeniser(_TOKENS.__getitem__), Marks()), how)
    return Row(plan, text, lambda _: None, token_bytes=lambda token: _TOKENS[token] or b"<|pad|>")


@pytest.mark.parametrize("stops", [(), ("ZZ",)])
@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (0, 1, 2, 3, 4)])
def test_log_probabilities_say_what_their_tokens_added_and_come_no_later_than_it(
    stops: tuple[str, ...], ids: tuple[int, ...]
) -> None:
    row = byte_row(stops)
    heard = b""
    added: list[int] = []
    for token in ids:
        for event in events_of(Sampled(row, token, _NO_TOP), "batch")[0]:
            if isinstance(event, Logprobs):
                heard += event.chosen.data
                added.append(event.chars)
            elif isinstance(event, Text):
                assert heard.endswith(event.text.encode())
    assert added == [2, 0, 0, 1, 1][: len(ids)]


def test_half_a_character_of_a_stop_string_has_no_log_probability() -> None:
    row = byte_row(("😀",))
    events = [one for token in (0, 2, 3) for one in events_of(Sampled(row, token, _NO_TOP), "batch")[0]]
    assert (spelled(events), said(events), events[-1]) == ("Hi", "Hi", Finish("stop", "😀"))


@pytest.mark.parametrize("lane", ["batch", "turns"])
def test_the_first_word_of_a_row_says_how_it_runs(lane: Lane) -> None:
    row = Row(
        Plan((1, 2), 9, True, _GREEDY, frozenset({EOS})), machine(["a"], AnswerFormat()), lambda _: None
    )
    row.cached_tokens = 1
    events, _ = events_of(Sampled(row, 0, None), lane)
    assert events == [Prefilled(2, 1, lane), Text("a")]


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("abS\n", min_size=1, max_size=3), min_size=1, max_size=12),
    stops=st.lists(st.text("abS\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_log_probabilities_spell_whole_tokens_of_what_is_said(pieces: list[str], stops: list[str]) -> None:
    events = answered(pieces, AnswerFormat(stops=tuple(stops)), 99)
    shown = [event.chosen.token for event in events if isinstance(event, Logprobs)]
    text = said(events)
    assert shown == pieces[: len(shown)]
    assert text.startswith("".join(shown))
    # Every token that is wholly said has its entry.
    assert len(shown) == len(pieces) or len("".join(pieces[: len(shown) + 1])) > len(text)
    seen = ""
    for event in events:
        seen += event.chosen.token if isinstance(event, Logprobs) else ""
        assert not any(stop in seen for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "inside", "reasoning"),
    [
        (["<think>", "hm", "m", "</think>", "So", "."], False, 3),
        (["hm", "</think>", "So"], True, 1),
        (["hm", " <", "x"], True, 3),
        (["So", "."], False, 0),
        (["<think>", "hm", "</think>"], False, 2),
    ],
)
def test_tokens_of_reasoning_are_counted_and_a_tag_counts_with_what_follows(
    pieces: list[str], inside: bool, reasoning: int
) -> None:
    how = AnswerFormat(reasoning="think", starts_inside=inside)
    (used,) = [event for event in answered(pieces, how, 99) if isinstance(event, Usage)]
    assert (used.completion_tokens, used.reasoning_tokens) == (len(pieces) + 1, reasoning)
