"""An answer's machines together: what is a stop and what isn't, when the answer is over, markers by token."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser, WindowDetokeniser
from mlxpool.worker.text.events import Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart
from mlxpool.worker.text.format import AnswerFormat, DeclaredTool
from mlxpool.worker.text.marks import Marks, TokenText
from mlxpool.worker.text.model import ModelText
from mlxpool.worker.text.tools.feed import BLANKS_CHARS
from tests.tools.answers import machine, merged, run, seen, split

ANY = DeclaredTool("any", {"type": "object"})
CALL = '<tool_call>{"name": "any", "arguments": {"text": "STOP"}}</tool_call>'

LOST = "\N{REPLACEMENT CHARACTER}"


def tools(**more: object) -> AnswerFormat:
    return AnswerFormat(reasoning="think", tools="json_tools", declared=(ANY,), **more)  # type: ignore[arg-type]


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=20))
def test_a_stop_string_in_reasoning_or_in_a_calls_arguments_is_no_stop(cuts: list[int]) -> None:
    text = f"<think>STOP it?</think>Well.{CALL}So STOP here."
    pieces = split(text, cuts)
    answer = machine(pieces, tools(stops=("STOP",)))
    events = merged(event for token in range(len(pieces)) for event in answer.push(token))
    assert seen(events) == [
        ["reasoning", "STOP it?"],
        ["text", "Well."],
        ["call", "any", {"text": "STOP"}],
        ["text", "So "],
    ]
    assert (answer.over, answer.stop, answer.called) == (True, "STOP", True)
    assert answer.flush() == []


@pytest.mark.parametrize(
    ("stops", "text", "met"),
    [
        (("abc", "zz", "b", "xyz"), "xx a", "b"),
        (("bcd", "abcde", "cd", "d"), "xx abc a", "bcd"),
        (("abcd", "d", "cd", "nowhere"), "xx abc ", "abcd"),
    ],
)
def test_of_four_stops_the_earliest_wins_in_every_split(stops: tuple[str, ...], text: str, met: str) -> None:
    answered = "xx abc abcd"
    for first in range(len(answered)):
        for second in range(first, len(answered)):
            pieces = [answered[:first], answered[first:second], answered[second:]]
            answer = machine(pieces, AnswerFormat(stops=stops))
            events = merged(event for token in range(3) for event in answer.push(token))
            assert (events, answer.stop, answer.over) == ([Text(text)], met, True)


def test_text_before_a_stop_is_kept_and_nothing_behind_it_comes() -> None:
    answer = machine(["one ST", "OP two ", CALL], tools(stops=("STOP",)))
    assert [answer.push(token) for token in range(3)] == [[Text("one ")], [], []]
    assert not answer.called


def test_what_is_held_behind_a_stop_is_gone_with_it() -> None:
    answer = machine(["so STOP <tool"], tools(stops=("STOP",)))
    assert (answer.push(0), answer.flush()) == ([Text("so ")], [])


def test_a_stop_does_not_reach_over_a_call() -> None:
    assert seen(run([f"a ST{CALL}OP b"], tools(stops=("STOP",)))) == [
        ["text", "a ST"],
        ["call", "any", {"text": "STOP"}],
        ["text", "OP b"],
    ]


def test_a_stop_does_not_reach_over_a_block_of_reasoning() -> None:
    marks = Marks(token_id={"<think>": 7}.get, is_special=lambda _: False, ordinary=("<think>",))
    text = f"a\nST\n{marks.form('<think>')}hm</think>OP"
    how = AnswerFormat(reasoning="think", stops=("ST\nOP",))
    assert run(list(text), how, marks) == [Text("a\nST\n"), Reasoning("hm"), Text("OP")]


def test_an_answer_of_one_call_is_over_behind_its_last_brace() -> None:
    answer = machine([CALL[:-14], CALL[-14:] + CALL], tools(one_call=True))
    answer.push(0)
    assert not answer.over
    assert answer.push(1)[-1] == ToolCallEnd(0)
    assert answer.over
    assert answer.called
    assert (answer.push(1), answer.flush()) == ([], [])


def test_a_call_that_the_limit_cut_has_no_end_and_does_not_count() -> None:
    answer = machine([CALL[:-20]], tools())
    events = [*answer.push(0), *answer.flush(cut=True)]
    assert [type(event) for event in events] == [ToolCallStart, ToolCallArguments]
    assert not answer.called


TYPED = DeclaredTool(
    "any",
    {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "b": {"type": "boolean"}}},
)


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("json_tools", '<tool_call>{"name": "any", "arguments": {"s": "ab', {"s": "ab"}),
        ("json_tools", '<tool_call>{"name": "any", "arguments": {"s": "a\\', {"s": "a"}),
        ("json_tools", '<tool_call>{"name": "any", "arguments": {"n": 12', {"n": 12}),
        ("json_tools", '<tool_call>{"name": "any", "arguments": {"n": "12', {"n": 12}),
        ("json_tools", '<tool_call>{"name": "any", "arguments": {"b": tru', {"b": None}),
        ("json_tools", '<tool_call>{"name": "any", "arguments": {"b": true, "s', {"b": True}),
        ("json_tools", '<tool_call>{"name": "any", "arguments": {"s": ', {"s": None}),
        ("json_tools", '<tool_call>{"name": "any", "arguments": {', {}),
        ("qwen3_coder", "<tool_call><function=any><parameter=s>\n1\n</parameter>", {"s": "1"}),
        ("qwen3_coder", "<tool_call><function=any><parameter=s>\n1\n</para", {"s": "1"}),
        ("qwen3_coder", "<tool_call><function=any><parameter=n>\n1\n</para", {"n": 1}),
        ("qwen3_coder", "<tool_call><function=any><parameter=n>\n", {"n": None}),
        ("qwen3_coder", "<tool_call><function=any>", {}),
        ("gemma4", "<|tool_call>call:any{n:12", {"n": 12}),
        ("mistral", '[TOOL_CALLS]any[ARGS]{"n": 1, "s": "x', {"n": 1, "s": "x"}),
        ("json_tools", '<tool_call>{"arguments": {"n": "1"}, "name": "any"', {"n": 1}),
        ("json_tools", '<tool_call>{"function": {"name": "any", "arguments": "{}"}', {}),
        ("pythonic", "<|tool_call_start|>[any(n=1)]", {"n": 1}),
        ("pythonic", "<|tool_call_start|>[any(n=1)]<|tool_call_e", {"n": 1}),
    ],
)
def test_a_call_that_the_model_leaves_open_is_closed_and_counts(
    family: str, text: str, arguments: dict[str, object]
) -> None:
    answer = machine(list(text), AnswerFormat(tools=family, declared=(TYPED,)))
    events = [event for token in range(len(text)) for event in answer.push(token)]
    assert not answer.called
    assert seen([*events, *answer.flush()]) == [["call", "any", arguments]]
    assert answer.called


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("json_tools", '<tool_call>{"name": "any", "argu'),
        ("json_tools", '<tool_call>{"name": "any"'),
        ("json_tools", '<tool_call>{"arguments": {"n": 1}'),
        ("pythonic", "<|tool_call_start|>[any(n=1"),
    ],
)
def test_what_is_no_call_yet_stays_text_when_the_model_ends(family: str, text: str) -> None:
    answer = machine([text], AnswerFormat(tools=family, declared=(ANY,)))
    assert merged([*answer.push(0), *answer.flush()]) == [Text(text)]
    assert not answer.called


def test_arguments_stream_as_they_are_written() -> None:
    pieces = [
        '<tool_call>{"name": "any", "arguments": {"text": "first',
        " second",
        ' third"',
        ', "n": 1',
        "}}",
    ]
    answer = machine(pieces, tools())
    sent = [answer.push(token) for token in range(len(pieces))]
    assert sent == [
        [ToolCallStart(0, "call-0", "any"), ToolCallArguments(0, '{"text": "first')],
        [ToolCallArguments(0, " second")],
        [ToolCallArguments(0, ' third"')],
        [ToolCallArguments(0, ', "n": ')],
        [ToolCallArguments(0, "1}"), ToolCallEnd(0)],
    ]


def test_prose_streams_while_calls_are_looked_for() -> None:
    answer = machine(["I ", "will <", "b> ", "<tool", "box> "], tools())
    assert [merged(answer.push(token)) for token in range(5)] == [
        [Text("I ")],
        [Text("will ")],
        [Text("<b> ")],
        [],
        [Text("<toolbox> ")],
    ]


@pytest.mark.parametrize("closer", ["}", "}}", "}}\n", "}}\n</tool_", "}}</tool_call>\n\n"])
def test_the_end_of_a_calls_markup_is_never_text_wherever_it_is_cut(closer: str) -> None:
    text = '<tool_call>{"name": "any", "arguments": {"a": 1' + closer
    assert seen(run(list(text), tools())) == [["call", "any", {"a": 1}]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=20), JSON, max_size=5),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
    cuts=st.lists(st.integers(0, 500), max_size=20),
)
def test_any_arguments_come_out_as_they_were_meant(
    arguments: dict[str, object], ascii_only: bool, indent: int | None, cuts: list[int]
) -> None:
    written = json.dumps({"name": "any", "arguments": arguments}, ensure_ascii=ascii_only, indent=indent)
    text = f"<tool_call>{written}</tool_call>"
    assert seen(run(split(text, cuts), tools())) == [["call", "any", arguments]]


def test_half_a_character_in_an_escape_becomes_a_replacement() -> None:
    text = '<tool_call>{"name": "any", "arguments": {"a": "\\ud800x", "\\udc00": ["\\ud83d"]}}</tool_call>'
    assert seen(run(list(text), tools())) == [["call", "any", {"a": f"{LOST}x", LOST: [LOST]}]]


@pytest.mark.parametrize("deep", ["[" * 100, '{"a": ' * 100])
def test_arguments_nested_beyond_reason_end_the_call(deep: str) -> None:
    answer = machine([f'<tool_call>{{"name": "any", "arguments": {{"x": {deep}'], tools())
    events = merged([*answer.push(0), *answer.flush()])
    assert isinstance(events[2], ToolCallEnd)
    assert isinstance(json.loads(events[1].text), dict)  # type: ignore[union-attr]


def test_a_key_that_breaks_the_syntax_is_given_back_whole() -> None:
    text = '<tool_call>{"name": "any", "arguments": {"a": 1, "b" 2}} so'
    assert seen(run(list(text), tools())) == [["call", "any", {"a": 1}], ["text", '"b" 2}} so']]


def said_chars(answer: AnswerText, tokens: int) -> int:
    """Characters of text and arguments that come out of so many tokens."""
    return sum(len(getattr(event, "text", "")) for token in range(tokens) for event in answer.push(token))


def test_blanks_are_held_for_a_bounded_length_before_and_behind_a_call() -> None:
    before = machine([" "] * 1000, tools())
    assert said_chars(before, 1000) == 1000
    call = "<tool_call>\n<function=any>\n</function>"
    behind = machine([call, *[" "] * 1000], AnswerFormat(tools="qwen3_coder", declared=(ANY,)))
    assert said_chars(behind, 1001) >= len("{}") + 1000 - 2 * BLANKS_CHARS
    assert behind.held_chars <= BLANKS_CHARS


def test_a_number_without_end_is_none() -> None:
    text = '<tool_call>{"name": "any", "arguments": {"n": ' + "1" * 5000
    assert (
        seen(run(list(text), tools()))
        == seen(run([text], tools()))
        == [
            ["call", "any", {"n": None}],
            ["text", "1" * 5000],
        ]
    )


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, 100_000])
def test_a_text_that_could_have_been_null_may_be_of_any_length(size: int) -> None:
    tool = DeclaredTool("any", {"properties": {"text": {"anyOf": [{"type": "string"}, {"type": "null"}]}}})
    how = AnswerFormat(tools="qwen3_coder", declared=(tool,))
    text = f"<function=any>\n<parameter=text>\n{'x' * size}\n</parameter>\n</function>"
    pieces = [text[at : at + 997] for at in range(0, len(text), 997)]
    assert seen(run(pieces, how)) == seen(run([text], how)) == [["call", "any", {"text": "x" * size}]]


def ids(text: str, family: str) -> list[str]:
    answer = machine([text], AnswerFormat(tools=family, declared=(ANY,)))
    return [event.id for event in answer.push(0) if isinstance(event, ToolCallStart)]


def kimi(*calls: str) -> str:
    body = "".join(
        f"<|tool_call_begin|>{call}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for call in calls
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def test_ids_that_a_models_own_template_expects_are_kept() -> None:
    assert ids(kimi("functions.any:0", "functions.any:1"), "kimi_k2") == [
        "functions.any:0",
        "functions.any:1",
    ]
    assert ids("[TOOL_CALLS]any[CALL_ID]a1B2c3D4e[ARGS]{}", "mistral") == ["a1B2c3D4e"]
    listed = '[TOOL_CALLS][{"name": "any", "arguments": {}, "id": "a1B2c3D4e"}]'
    assert ids(listed, "mistral") == ["call-0"]  # its arguments, and so its start, were sent before the id
    first = '[TOOL_CALLS][{"id": "a1B2c3D4e", "name": "any", "arguments": {}}]'
    assert ids(first, "mistral") == ["a1B2c3D4e"]


def test_ids_differ_where_the_model_repeats_one_or_writes_none() -> None:
    assert ids(kimi("functions.any:0", "functions.any:0", "any"), "kimi_k2") == [
        "functions.any:0", "call-0", "call-1",
    ]  # fmt: skip
    assert ids("[TOOL_CALLS]any[CALL_ID]not nine[ARGS]{}", "mistral") == ["call-0"]
    assert ids('<tool_call>{"id": "1", "name": "any", "arguments": {}}</tool_call>', "json_tools") == [
        "call-0"
    ]


def test_a_json_answer_that_is_no_call_streams_from_its_first_key() -> None:
    answer = machine(['{"title": ', '"x"}'], AnswerFormat(tools="llama3", declared=(ANY,)))
    assert answer.push(0) == [Text('{"title": ')]


def test_what_follows_a_message_that_could_not_be_read_is_read_again() -> None:
    ids_of_tokens = {"<|channel|>": 1, "<|message|>": 2, "<|end|>": 3, "<|start|>": 4}
    marks = Marks(ids_of_tokens, ids_of_tokens.get)
    text = (
        "<|channel|>commentary to=python<|message|>1<|end|>"
        "<|start|>assistant<|channel|>final<|message|>One.<|end|><|message|>"
    )
    assert run(list(marks.form(text)), AnswerFormat(reasoning="harmony"), marks) == [
        Text("<|channel|>commentary to=python<|message|>1<|end|>One.")
    ]


def gemma_tokens() -> tuple[dict[str, int], list[str]]:
    texts = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|im_end|>"]
    return {text: 256 + place for place, text in enumerate(texts)}, texts


def ids_of(text: str, ids: dict[str, int]) -> list[int]:
    """Bytes as tokens, and the markers that `ids` knows."""
    out: list[int] = []
    while text:
        marker = next((marker for marker in ids if text.startswith(marker)), None)
        out += [ids[marker]] if marker is not None else list(text[0].encode())
        text = text[len(marker or text[0]) :]
    return out


def gemma() -> ModelText:
    ids, _ = gemma_tokens()
    return ModelText(
        lambda _: ByteDetokeniser(lambda token: bytes([token]) if token < 256 else b""),
        ids.get,
        lambda token: token >= 256,
        lambda name: pytest.fail(f"no parser is needed, and {name}'s was asked for"),
    )


def test_letters_that_look_like_a_special_token_are_text() -> None:
    how = AnswerFormat(reasoning="gemma4", tools="gemma4", declared=(ANY,))
    text = '<|tool_call>call:any{a:<|"|>x<|"|>}<tool_call|>'
    by_letter = gemma().answer(how)
    events = merged([e for token in text.encode() for e in by_letter.push(token)] + by_letter.flush())
    assert events == [Text(text)]
    by_token = gemma().answer(how)
    ids = ids_of(text, gemma_tokens()[0])
    assert seen([e for token in ids for e in by_token.push(token)]) == [["call", "any", {"a": "x"}]]


def test_a_special_token_that_means_nothing_here_has_no_text() -> None:
    answer = gemma().answer(AnswerFormat(reasoning="gemma4", tools="gemma4", declared=(ANY,)))
    ids = ids_of("Hi<channel|> there<|im_end|><tool_call|>!", gemma_tokens()[0])
    assert merged(e for token in ids for e in answer.push(token)) == [Text("Hi there!")]


def test_a_character_cut_by_a_marker_comes_out_before_it() -> None:
    ids, _ = gemma_tokens()
    answer = gemma().answer(AnswerFormat(reasoning="gemma4", tools="gemma4", declared=(ANY,)))
    tokens = [0xE2, 0x82, *ids_of("<|tool_call>call:any{}<tool_call|>", ids)]
    assert seen([e for token in tokens for e in answer.push(token)]) == [
        ["text", LOST],
        ["call", "any", {}],
    ]


def test_a_marker_takes_no_space_from_the_word_behind_it() -> None:
    words = ["▁Hello", "▁world", "<think>", "</think>", "▁again"]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="▁"))
    tokenizer.add_tokens([AddedToken(word, special=False) for word in words[2:4]])
    tokenizer.decoder = decoders.Metaspace()

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    marks = Marks(
        token_id=tokenizer.token_to_id, is_special=lambda _: False, ordinary=("<think>", "</think>")
    )
    source = TokenText(WindowDetokeniser(decode), marks)
    text = "".join([source.push(token) for token in (0, 1, 2, 1, 3, 4)]) + source.flush()
    assert marks.plain(text) == "Hello world<think> world</think> again"


def test_an_ordinary_token_keeps_its_text_where_it_means_nothing() -> None:
    marks = Marks(token_id={"<think>": 7}.get, is_special=lambda _: False, ordinary=("<think>",))
    text = f"Write {marks.form('<think>')} first."
    assert run(list(text), AnswerFormat(), marks) == [Text("Write <think> first.")]
    assert run(list(text), AnswerFormat(reasoning="think"), marks) == [Text("Write <think> first.")]


def test_a_think_token_opens_a_block_at_the_start_of_a_line() -> None:
    marks = Marks(token_id={"<think>": 7}.get, is_special=lambda _: False, ordinary=("<think>",))
    text = f"One.\n{marks.form('<think>')}hm</think>\nTwo."
    assert run(list(text), AnswerFormat(reasoning="think"), marks) == [
        Text("One.\n"),
        Reasoning("hm"),
        Text("Two."),
    ]
