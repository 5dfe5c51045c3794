"""Recorded answers of every family: the same events in every chunking, clean at every truncation.

Two vocabularies read each of them: one whose markers are tokens, and one where they are letters.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.prompt.reasoning_families import REASONING_FAMILIES
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser
from mlxpool.worker.text.events import (
    Reasoning,
    Text,
    TextEvent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from mlxpool.worker.text.format import AnswerFormat, DeclaredTool
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.model import ModelText
from mlxpool.worker.text.tools.families import TOOL_FAMILIES, TOOL_FAMILY_NAMES, family_tokens
from mlxpool.worker.text.tools.machine import UNNAMED_CHARS
from tests.tools.answers import (
    Case,
    Recording,
    every_case,
    machine,
    merged,
    parser,
    recordings,
    run,
    seen,
    special_marks,
    split,
)

_VOCABULARIES = {"letters": None, "tokens": special_marks()}
every_family = pytest.mark.parametrize("recording", recordings().values(), ids=list(recordings()))
either_vocabulary = pytest.mark.parametrize("marks", _VOCABULARIES.values(), ids=list(_VOCABULARIES))


def cases_for(recording: Recording, marks: Marks | None) -> list[Case]:
    return [case for case in recording.cases if case.literal or marks is not None]


def written(case: Case, marks: Marks | None) -> str:
    return case.text if marks is None else marks.form(case.text)


def test_every_family_is_recorded() -> None:
    assert set(TOOL_FAMILY_NAMES) <= set(recordings())


@every_family
@either_vocabulary
def test_a_recorded_answer_is_understood(recording: Recording, marks: Marks | None) -> None:
    for case in cases_for(recording, marks):
        assert seen(run([written(case, marks)], recording.answer_format(case), marks)) == case.events, (
            case.name
        )


@every_family
@either_vocabulary
def test_every_chunking_gives_the_same_events(recording: Recording, marks: Marks | None) -> None:
    for case in cases_for(recording, marks):
        text, how = written(case, marks), recording.answer_format(case)
        whole = run([text], how, marks)
        assert run(list(text), how, marks) == whole
        for cut in range(1, len(text)):
            assert run([text[:cut], text[cut:]], how, marks) == whole, (text[:cut], text[cut:])
        chance = random.Random(case.text)
        for _ in range(20):
            pieces = split(text, [chance.randrange(len(text)) for _ in range(chance.randrange(1, 30))])
            assert run(pieces, how, marks) == whole, pieces


@every_family
@either_vocabulary
def test_truncation_at_every_point_is_clean(recording: Recording, marks: Marks | None) -> None:
    for case in cases_for(recording, marks):
        text, how = written(case, marks), recording.answer_format(case)
        whole = run([text], how, marks)
        for end in range(len(text)):
            cut = run([text[:end]], how, marks, cut=True)
            assert_beginning_of(cut, whole, text[:end] if marks is None else marks.spelled(text[:end]))


@every_family
@either_vocabulary
def test_a_call_that_the_model_leaves_open_is_closed_at_every_point(
    recording: Recording, marks: Marks | None
) -> None:
    for case in cases_for(recording, marks):
        text, how = written(case, marks), recording.answer_format(case)
        for end in range(len(text)):
            answer = machine([text[:end]], how, marks)
            pushed = answer.push(0)
            closed = calls_of([*pushed, *answer.flush()])
            cut = calls_of(run([text[:end]], how, marks, cut=True))
            assert [name for name, _, _ in cut] == [name for name, _, _ in closed[: len(cut)]]
            for (_, arguments, _), (_, beginning, _) in zip(closed, cut, strict=False):
                assert arguments.startswith(beginning)
            for _, arguments, ended in closed:
                assert ended
                assert isinstance(json.loads(arguments), dict)
            assert answer.called == bool(closed)


def assert_beginning_of(cut: list[TextEvent], whole: list[TextEvent], given_text: str) -> None:
    """Calls are calls of the whole, as far as they got, and nothing is said that was not written."""
    calls, whole_calls = calls_of(cut), calls_of(whole)
    for index, (name, arguments, ended) in enumerate(calls):
        whole_name, whole_arguments, whole_ended = whole_calls[index]
        assert name == whole_name
        assert whole_arguments.startswith(arguments)
        if ended:
            assert whole_ended
            assert arguments == whole_arguments
            json.loads(arguments)
    for kind in (Text, Reasoning):
        said, whole_said = said_as(kind, cut), said_as(kind, whole)
        common = sum(
            1
            for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said, whole_said, strict=False))
        )
        # Only what was held when the answer was cut may differ: a half marker, a call's beginning.
        assert given_text.endswith(said[common:])


def calls_of(events: Iterable[TextEvent]) -> list[tuple[str, str, bool]]:
    calls: list[tuple[str, str, bool]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append((event.name, "", False))
        elif isinstance(event, ToolCallArguments):
            name, arguments, ended = calls[event.index]
            assert not ended
            calls[event.index] = (name, arguments + event.text, False)
        elif isinstance(event, ToolCallEnd):
            calls[event.index] = (*calls[event.index][:2], True)
    return calls


def said_as(kind: type[Text] | type[Reasoning], events: Iterable[TextEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@every_family
@either_vocabulary
def test_no_event_is_empty_and_ids_differ(recording: Recording, marks: Marks | None) -> None:
    for case in cases_for(recording, marks):
        text = written(case, marks)
        answer = machine(list(text), recording.answer_format(case), marks)
        events = [event for token in range(len(text)) for event in answer.push(token)] + answer.flush()
        assert all(event.text for event in events if isinstance(event, Text | Reasoning | ToolCallArguments))
        ids = [event.id for event in events if isinstance(event, ToolCallStart)]
        assert len(set(ids)) == len(ids)
        assert answer.called == any(isinstance(event, ToolCallEnd) for event in events)


@every_family
@either_vocabulary
def test_no_more_is_held_than_the_bound(recording: Recording, marks: Marks | None) -> None:
    for case in cases_for(recording, marks):
        text = written(case, marks)
        answer = machine(list(text), recording.answer_format(case, stops=("never said",)), marks)
        for token in range(len(text)):
            answer.push(token)
            assert answer.held_chars <= answer.bound_chars


@cache
def byte_level() -> ChatTokenizer:
    """A byte-level vocabulary learnt from the recordings, with every family's markers as tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([case.text for _, case in every_case()], trainer)
    ordinary = {"<think>", "</think>"}
    tokens = family_tokens() | {t for family in REASONING_FAMILIES.values() for t in family.tokens}
    tokenizer.add_special_tokens(sorted(tokens - ordinary))
    tokenizer.add_tokens([AddedToken(token, special=False) for token in sorted(ordinary)])
    return ChatTokenizer(tokenizer, None, {}, frozenset())


@cache
def byte_level_text() -> ModelText:
    tokenizer = byte_level()

    def token_id(text: str) -> int | None:
        ids = tokenizer.encode(text)
        return ids[0] if len(ids) == 1 else None

    return ModelText(
        lambda _: ByteDetokeniser(tokenizer.token_bytes),
        token_id,
        lambda token: not tokenizer.token_bytes(token),
        parser,
    )


@every_family
def test_a_tokenizers_own_tokens_give_the_same_events(recording: Recording) -> None:
    for case in recording.cases:
        answer = byte_level_text().answer(recording.answer_format(case))
        ids = byte_level().encode(case.text)
        events = merged([event for token in ids for event in answer.push(token)] + answer.flush())
        assert seen(events) == case.events, case.name


@pytest.mark.parametrize("family", sorted(recordings()))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_in_any_chunking_gives_the_same_events(family: str, data: st.DataObject) -> None:
    recording = recordings()[family]
    own = [case.text for case in recording.cases]
    fragment = st.one_of(
        st.sampled_from(own).flatmap(
            lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
                lambda cut: text[min(cut) : max(cut)]
            )
        ),
        st.sampled_from(["\n", " ", '"', "\\", "{", "}", "<", ">", "é", "😀", "STOP", "\n" * 70, "</think>"]),
    )
    text = "".join(data.draw(st.lists(fragment, max_size=8)))
    marks = special_marks() if data.draw(st.booleans()) else None
    text = text if marks is None else marks.form(text)
    how = recording.answer_format(recording.cases[0], stops=("STOP", "\n\n\n"))
    whole = run([text], how, marks)
    cuts = data.draw(st.lists(st.integers(0, max(1, len(text))), max_size=12))
    assert run(list(text), how, marks) == whole
    assert run(split(text, cuts), how, marks) == whole
    for _, arguments, ended in calls_of(whole):
        assert not ended or isinstance(json.loads(arguments), dict)
    assert not any(0xD800 <= ord(char) < 0xE000 for event in whole for char in texts_of(event))


def texts_of(event: TextEvent) -> str:
    return getattr(event, "text", "")


# A reader's opener and what follows it, and never its end.
_ENDLESS = {
    "json_tools": '<tool_call>{"arguments": {"city": "',
    "qwen3_coder": "<tool_call>\n<function=",
    "minicpm5": "<function name=",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get',
    "glm47": "<tool_call>",
    "laguna": "<tool_call>",
    "longcat": "<longcat_tool_call>",
    "gemma4": "<|tool_call>call:",
    "mistral": "[TOOL_CALLS]",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "kimi_k3": "<|open|>tools<|sep|>",
    "llama3": '{"name": "',
    "pythonic": "<|tool_call_start|>",
    "muse_spark": "<atem:function_calls>",
    "function_gemma": "<start_function_call>",
    "harmony": "<|channel|>",
}


@pytest.mark.parametrize("family", sorted(_ENDLESS))
@pytest.mark.parametrize("filler", ["lorem ipsum, ", "word", "   "])
def test_an_opener_that_never_closes_is_held_for_a_bounded_length(family: str, filler: str) -> None:
    recording = recordings()[family]
    marks = special_marks()
    text = marks.form(_ENDLESS[family])
    pieces = [*text, *itertools.repeat(filler * 10, 100_000 // (len(filler) * 10))]
    answer = machine(pieces, recording.answer_format(recording.cases[0]), marks)
    came = said = 0
    for token, piece in enumerate(pieces):
        came += len(marks.spelled(piece))
        said += sum(len(texts_of(event)) for event in answer.push(token))
        assert answer.held_chars <= answer.bound_chars
        assert came - said <= answer.bound_chars
    said += sum(len(texts_of(event)) for event in answer.flush())
    assert said == came


@pytest.mark.parametrize("family", sorted(_ENDLESS))
def test_prose_behind_an_opener_is_waited_for_no_longer_than_a_few_seconds(family: str) -> None:
    recording = recordings()[family]
    marks = special_marks()
    pieces = [marks.form(_ENDLESS[family]), *["lorem ipsum, "] * 1000]
    answer = machine(pieces, recording.answer_format(recording.cases[0]), marks)
    worst = 0
    for token in range(len(pieces)):
        answer.push(token)
        worst = max(worst, answer.held_chars)
    # With a name that nobody declared, or none, a thousand tokens at most.
    assert worst <= UNNAMED_CHARS + 300


@pytest.mark.parametrize(
    ("family", "before"),
    [
        ("json_tools", '<tool_call>{"name": "any", "arguments": "'),
        ("pythonic", '<|tool_call_start|>[any(x="'),
    ],
)
def test_long_arguments_are_waited_for_once_a_declared_name_is_known(family: str, before: str) -> None:
    how = AnswerFormat(tools=family, declared=(DeclaredTool("any", {}),))
    long = "lorem ipsum " * 2000
    closer = '"}' if family == "json_tools" else '")]<|tool_call_end|>'
    inner = json.dumps(json.dumps({"x": long}))[1:-1] if family == "json_tools" else long
    assert seen(run([before, *split(inner, [9000]), closer], how)) == [["call", "any", {"x": long}]]


def test_the_families_that_need_a_parser_say_so() -> None:
    declared = tuple(recordings()["pythonic"].declared)
    with pytest.raises(ValueError, match="parser"):
        AnswerText(ByteDetokeniser(lambda _: b""), AnswerFormat(tools="pythonic", declared=declared))


def test_a_familys_name_is_mlx_lms_where_it_needs_its_parser() -> None:
    assert all(callable(parser(family.name)) for family in TOOL_FAMILIES.values() if family.needs_parser)
