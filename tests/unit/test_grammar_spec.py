"""What is enforced, what is asked for in words, and what is refused: one decision per form of answer."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.shared.api.structure import Structure
from mlxpool.shared.api.tools import Tool, ToolChoice
from mlxpool.shared.errors import ApiError
from mlxpool.shared.prompt.reasoning_families import REASONING_FAMILIES
from mlxpool.worker.grammar import keywords
from mlxpool.worker.grammar.assertions import InvalidSchema
from mlxpool.worker.grammar.formats import BLANKS_HIGH, Format, reasoning_of
from mlxpool.worker.grammar.pattern import unsupported
from mlxpool.worker.grammar.schema import read
from mlxpool.worker.grammar.spec import (
    INSTRUCTION_LIMIT_CHARS,
    TEXT_LIMIT_BYTES,
    Decision,
    Demand,
    Enforced,
    Instructed,
    decide,
    give_up,
    invalid_text,
    unheld,
)
from tests.unit.grammar_world import EOS_ID, MARKERS, UNNAMED_ID, takes

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
UNIQUE = {"type": "array", "uniqueItems": True}


def schema_of(value: Any, strict: bool = False) -> Structure:
    return Structure("json_schema", "response_format", value, strict)


def form_of(demand: Demand) -> Format:
    decision = decide(demand)
    assert isinstance(decision, Enforced)
    form: Format = json.loads(decision.spec.text)["format"]
    return form


def refusal(demand: Demand) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decide(demand)
    return caught.value


def answer_to(ask: Callable[[], Decision | None]) -> Decision | ApiError | None:
    try:
        return ask()
    except ApiError as err:
        return err


def test_an_answer_without_a_form_has_no_grammar() -> None:
    assert decide(Demand()) is None
    tools = (Tool("f", SCHEMA, {}),)
    assert decide(Demand(tools=tools, family="json_tools")) is None
    assert decide(Demand(tools=tools, choice=ToolChoice("none"))) is None


def test_a_schema_is_enforced_and_objects_are_open_where_it_says_nothing() -> None:
    form = form_of(Demand(schema_of(SCHEMA, strict=True)))
    assert takes(form, '{"a": 1}')
    assert takes(form, '{"a": 1, "more": [{"x": 2}]}')
    assert takes(form, '{\n  "a": 1\n}')
    assert not takes(form, '{"b": 1}')
    assert not takes(form, "Sure: 1")
    assert not takes(form, '{"a": 1} and more')


def test_blanks_between_the_parts_of_json_are_bounded() -> None:
    form = form_of(Demand(schema_of(SCHEMA)))
    assert takes(form, "{" + " " * BLANKS_HIGH + '"a": 1}')
    assert not takes(form, "{" + " " * (BLANKS_HIGH + 1) + '"a": 1}')


def test_a_json_object_is_an_object_and_not_any_value() -> None:
    form = form_of(Demand(Structure("json_object", "response_format")))
    assert takes(form, "{}")
    assert takes(form, '{"a": [1, {"b": null}]}')
    assert not takes(form, "[1]")
    assert not takes(form, "1")


CHOICES = ['say "hi"', "back\\slash", "é😀", "line\nbreak", "{", "<think>", " leading", "a", "ab"]


def test_a_choice_is_one_of_the_very_strings() -> None:
    form = form_of(Demand(Structure("choice", "guided_choice", CHOICES)))
    assert [choice for choice in CHOICES if not takes(form, choice)] == []
    assert not takes(form, "abc")
    assert not takes(form, "")
    assert takes(form_of(Demand(Structure("choice", "guided_choice", ["only"]))), "only")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4), st.text(max_size=8))
def test_any_text_can_be_a_choice(choices: list[str], other: str) -> None:
    form = form_of(Demand(Structure("choice", "guided_choice", choices)))
    assert all(takes(form, choice) for choice in choices)
    assert takes(form, other) == (other in choices)


def test_a_regular_expression_matches_the_whole_answer() -> None:
    form = form_of(Demand(Structure("regex", "guided_regex", r'^\d{3}-"[a-z]+"$|x\ny')))
    assert takes(form, '123-"abc"')
    assert takes(form, "x\ny")
    assert not takes(form, '123-"abc" ')
    assert not takes(form, "12")


def test_a_grammar_begins_at_its_root() -> None:
    form = form_of(
        Demand(Structure("grammar", "guided_grammar", 'root ::= "a" more\nmore ::= "b" | "c" more'))
    )
    assert takes(form, "accb")
    assert not takes(form, "acc")


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("a(?=b)", "lookaheads"),
        ("a(?!b)", "lookaheads"),
        ("(?<=a)b", "lookbehinds"),
        (r"(a)\1", "backreferences"),
        (r"(?<n>a)\k<n>", "backreferences"),
        (r"\bword\b", "word boundaries"),
        (r"\p{L}+", "Unicode classes"),
        ("(?i)a", "flags"),
        ("a++", "possessive"),
        (r"\Aa\z", r"the escape \A"),
        ("a^b", "an anchor"),
        ("(a|b$)c", "an anchor"),
        ("[[:alpha:]]", "inside a class"),
        ("a{2", "begins no count"),
    ],
)
def test_a_construct_that_would_be_ignored_is_asked_for_in_words(pattern: str, what: str) -> None:
    decision = decide(Demand(Structure("regex", "guided_regex", pattern)))
    assert isinstance(decision, Instructed)
    assert what in decision.warning
    assert decision.warning.startswith("grammar not enforced: ")
    assert pattern in decision.instruction


@pytest.mark.parametrize("pattern", ["(", "a)", "*a", "[a", "a{3,2}", "a\\", "(?:a"])
def test_what_is_no_regular_expression_is_refused_by_field(pattern: str) -> None:
    err = refusal(Demand(Structure("regex", "guided_regex", pattern)))
    assert (err.status, err.code, err.param) == (400, "invalid_request", "guided_regex")
    in_schema = refusal(Demand(schema_of({"properties": {"a": {"pattern": pattern}}})))
    assert (in_schema.code, in_schema.param) == ("invalid_request", "response_format")
    assert "/properties/a" in in_schema.message


@given(st.text(alphabet='ab^$|()[]{}*+?\\.-,0d"\n', max_size=12))
def test_any_pattern_is_read_without_a_fault(pattern: str) -> None:
    for in_json in (False, True):
        fault = unsupported(pattern, in_json=in_json)
        assert fault is None or fault.what


def test_strict_refuses_what_would_not_be_enforced_and_names_it() -> None:
    err = refusal(Demand(schema_of({"properties": {"a": UNIQUE}}, strict=True)))
    assert (err.status, err.code, err.param) == (400, "unsupported_schema", "response_format")
    assert "uniqueItems at /properties/a" in err.message
    assert "strict: false" in err.message


def test_without_strict_the_model_is_asked_and_the_answer_warns() -> None:
    decision = decide(Demand(schema_of(UNIQUE)))
    assert isinstance(decision, Instructed)
    assert decision.warning == "grammar not enforced: the schema uses uniqueItems"
    assert json.loads(decision.instruction.split("\n", 1)[1]) == UNIQUE


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": 7}, "type"),
        ({"type": "int"}, '"int"'),
        ({"type": []}, "type"),
        ({"properties": []}, "properties"),
        ({"properties": {"a": 1}}, "properties"),
        ({"required": "a"}, "required"),
        ({"enum": []}, "enum"),
        ({"items": {"anyOf": []}}, "/items"),
        ({"minLength": -1}, "minLength"),
        ({"minimum": "5"}, "minimum"),
        ({"$ref": "#/$defs/nope"}, '"#/$defs/nope"'),
        ({"items": {"$ref": "#/x/0"}, "x": [1]}, '"#/x/0"'),
        ({"multipleOf": 0}, "multipleOf"),
        ("not a schema", "not a schema"),
        (None, "null"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_an_invalid_schema_is_a_400_and_never_an_unconstrained_answer(
    schema: Any, named: str, strict: bool
) -> None:
    err = refusal(Demand(schema_of(schema, strict)))
    assert (err.status, err.code, err.param) == (400, "invalid_request", "response_format")
    assert named in err.message


def test_a_grammar_that_the_compiler_cannot_read_is_the_clients_to_mend() -> None:
    grammar = Demand(Structure("grammar", "structured_outputs", "root ::= ("))
    err = invalid_text(grammar, "EBNF parser error at line 1,\n column 11")
    assert err is not None
    assert (err.status, err.code, err.param) == (400, "invalid_request", "structured_outputs")
    assert "EBNF parser error at line 1, column 11" in err.message
    # What we wrote ourselves is not.
    assert invalid_text(Demand(schema_of(SCHEMA)), "any") is None


def test_a_compiler_that_gives_up_is_words_and_a_warning_or_a_400_when_strict() -> None:
    reason = "it takes more than 10 s to compile"
    decision = give_up(Demand(schema_of(SCHEMA)), reason)
    assert isinstance(decision, Instructed)
    assert decision.warning == f"grammar not enforced: {reason}"
    with pytest.raises(ApiError) as caught:
        give_up(Demand(schema_of(SCHEMA, strict=True)), reason)
    assert caught.value.code == "unsupported_schema"
    assert reason in caught.value.message


def test_a_form_and_tools_give_the_form_or_calls() -> None:
    tools = (Tool("f", SCHEMA, {}),)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
    form = form_of(Demand(schema_of(SCHEMA), tools, family="json_tools"))
    assert takes(form, '{"a": 1}')
    assert takes(form, call)
    assert not takes(form, '{"a": 1}' + call)
    assert not takes(form, "no")
    # Tools that may not be called are none.
    assert not takes(form_of(Demand(schema_of(SCHEMA), tools, ToolChoice("none"), family="json_tools")), call)
    # A call that must be made is the whole answer.
    assert not takes(form_of(Demand(schema_of(SCHEMA), tools, ToolChoice("required"))), '{"a": 1}')


@pytest.mark.parametrize("name", ["think", "mistral", "seed", "longcat"])
@pytest.mark.parametrize("markers", [{}, MARKERS], ids=["letters", "tokens"])
def test_reasoning_is_free_text_up_to_its_end_and_then_the_form(name: str, markers: dict[str, int]) -> None:
    opening, closing = REASONING_FAMILIES[name].tags[0]
    opener, closer = (markers[opening], markers[closing]) if markers else (opening, closing)
    form = form_of(Demand(schema_of(SCHEMA), reasoning=reasoning_of(name, False), markers=markers))
    assert takes(form, opener, "Well, {", closer, '{"a": 1}')
    assert takes(form, opener, closer, "\n\n", '{"a": 1}')
    assert takes(form, '{"a": 1}')
    assert not takes(form, opener, "Well", closer, "so it is")
    assert not takes(form, opener, "never closed")
    inside = form_of(Demand(schema_of(SCHEMA), reasoning=reasoning_of(name, True), markers=markers))
    assert takes(inside, "Well, ", closer, '{"a": 1}')
    assert not takes(inside, '{"a": 1}')


def test_no_special_token_is_allowed_in_any_free_text() -> None:
    for name in ("think", "kimi_k3"):
        # think as letters while other markers are special tokens: free text up to a string.
        markers = {text: token for text, token in MARKERS.items() if "think" not in text}
        reasoning = reasoning_of(name, True)
        assert reasoning is not None
        form = form_of(Demand(schema_of(SCHEMA), reasoning=reasoning, markers=markers))
        for token in (MARKERS["<tool_call>"], MARKERS["[ARGS]"], UNNAMED_ID, EOS_ID):
            assert not takes(form, "thinking", token)


def test_harmony_writes_its_headers() -> None:
    form = form_of(Demand(schema_of(SCHEMA), reasoning=reasoning_of("harmony", False)))
    final = '<|channel|>final<|message|>{"a": 1}'
    assert takes(form, final)
    assert takes(form, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + final)
    assert not takes(form, '{"a": 1}')


def test_a_schema_as_deep_as_json_goes_is_read_without_recursion() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    assert read(schema).unenforced == ()
    # Written as text it is too deep for anybody's parser.
    err = refusal(Demand(schema_of(schema)))
    assert (err.code, err.param) == ("invalid_request", "response_format")


def test_a_long_name_above_many_places_is_held_once_and_cut_in_messages() -> None:
    name = "n" * 1_000_000
    inner = {f"p{place}": {"type": "string", "not": {}} for place in range(2000)}
    schema = {"properties": {name: {"properties": inner}}}
    tracemalloc.start()
    try:
        reading = read(schema)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20_000_000
    found = str(reading.unenforced[-1])
    assert found == f"not at /properties/{'n' * 80}…/properties/p0"
    err = refusal(
        Demand(schema_of({"properties": {name: {name * 2: {"type": "int"}}}, name: 1}, strict=True))
    )
    assert len(err.message) < 1000
    with pytest.raises(InvalidSchema) as caught:
        read({"properties": {name: {"type": "int"}}})
    assert len(str(caught.value)) < 1000


LONG = "x" * (TEXT_LIMIT_BYTES + 1)


@pytest.mark.parametrize(
    ("demand", "field"),
    [
        (Demand(Structure("grammar", "guided_grammar", f'root ::= "{LONG}"')), "guided_grammar"),
        (Demand(Structure("regex", "structured_outputs", LONG)), "structured_outputs"),
        (Demand(schema_of({"const": LONG})), "response_format"),
        (Demand(Structure("choice", "guided_choice", (LONG[:700_000], "y" * 700_000))), "guided_choice"),
        (Demand(tools=(Tool("f", {"title": LONG}, {}),), choice=ToolChoice("required")), "tools"),
        (
            Demand(schema_of(SCHEMA), tools=(Tool("f", {"title": LONG}, {}),), family="json_tools"),
            "tools",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_form_too_long_to_look_into_is_refused_with_the_limit(demand: Demand, field: str) -> None:
    err = refusal(demand)
    assert (err.code, err.param) == ("invalid_request", field)
    assert err.message.startswith(f"{field} has ")
    assert f"at most {TEXT_LIMIT_BYTES} work" in err.message


def test_a_form_too_long_for_words_is_refused_with_why_it_was_not_enforced() -> None:
    fits = {**UNIQUE, "title": "t" * (INSTRUCTION_LIMIT_CHARS - 200)}
    assert isinstance(decide(Demand(schema_of(fits))), Instructed)
    err = refusal(Demand(schema_of({**UNIQUE, "title": "t" * INSTRUCTION_LIMIT_CHARS})))
    assert (err.code, err.param) == ("unsupported_schema", "response_format")
    assert err.message.startswith("response_format can't be enforced: the schema uses uniqueItems; nor asked")
    assert f"{INSTRUCTION_LIMIT_CHARS} are allowed" in err.message


def test_what_is_strict_and_taken_up_by_no_grammar_is_warned_of() -> None:
    tools = tuple(Tool(f"f{place}", SCHEMA, {}, strict=place != 1) for place in range(6))
    assert unheld(Demand(tools=tools)) == (
        "grammar not enforced: strict of tools[0], tools[2], tools[3] and 2 more, whose calls no tool_choice "
        "forces",
    )
    assert unheld(Demand(tools=tools[1:2])) == ()
    assert unheld(Demand(tools=tools, choice=ToolChoice("required"))) == ()
    assert unheld(Demand(tools=tools, choice=ToolChoice("none"))) == ()
    # Beside a form that is enforced, calls are too.
    assert unheld(Demand(schema_of(SCHEMA), tools=tools)) == ()
    assert len(unheld(Demand(schema_of(SCHEMA), tools=tools), instructed=True)) == 1
    forced = Demand(schema_of(SCHEMA, strict=True), tools=tools, choice=ToolChoice("required"))
    assert unheld(forced) == ("grammar not enforced: response_format beside a call that must be made",)


MANY = [f"name {place}" for place in range(20_000)]
WIDE: dict[str, Any] = {
    "oneOf of objects that require the same": {
        "oneOf": [{"type": "object", "required": MANY}, {"type": "object", "required": MANY[::-1]}]
    },
    "required beside what may not be there": {
        "type": "object",
        "additionalProperties": False,
        "properties": dict.fromkeys(MANY, False),
        "required": ["z" + name for name in MANY],
    },
    "oneOf of references to the same": {
        "oneOf": [{"$ref": "#/$defs/x"}] * 5000,
        "$defs": {"x": {"enum": MANY}},
    },
    "many oneOfs of references": {
        "anyOf": [{"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]}] * 2000,
        "$defs": {"x": {"enum": MANY}, "y": {"enum": MANY[::-1]}},
    },
    "more schemas than anybody's": {"anyOf": [{}] * 60_000},
}


@pytest.mark.parametrize("name", WIDE)
def test_a_wide_schema_is_read_in_a_moment(name: str) -> None:
    began_s = time.thread_time()
    assert read(WIDE[name]).unenforced
    # Pair by pair it would take minutes.
    assert time.thread_time() - began_s < 3


def test_a_schema_too_wide_to_be_read_is_asked_for_in_words_or_refused_with_the_reason() -> None:
    wide = WIDE["more schemas than anybody's"]
    assert [str(found) for found in read(wide).unenforced] == ["more than 50000 schemas"]
    assert (
        "can't be enforced: the schema uses more than 50000 schemas"
        in refusal(Demand(schema_of(wide, strict=True))).message
    )


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "structure",
    [
        Structure("regex", "guided_regex", f"a{{{DIGITS}}}"),
        Structure("regex", "guided_regex", f"a{{0,{DIGITS}}}"),
        schema_of({"pattern": f"a{{{DIGITS}}}"}),
        schema_of({"anyOf": [{"$ref": f"#/anyOf/{DIGITS}"}]}),
        schema_of({"type": "integer", "minimum": 10**400}),
        schema_of({"type": "number", "exclusiveMaximum": -(10**400)}),
        schema_of({"type": "integer", "multipleOf": 10**400}),
        schema_of({"maxLength": 10**400}),
        schema_of({"oneOf": [{"const": 10**400}, {"const": 10**401}]}),
        schema_of({"oneOf": [{"type": "object", "required": [[1]]}, {"type": "object", "required": [[1]]}]}),
    ],
    ids=str,
)
def test_numbers_too_large_for_python_are_answered_like_others(structure: Structure) -> None:
    answer = answer_to(lambda: decide(Demand(structure)))
    if isinstance(answer, ApiError):
        assert (answer.status, answer.param) == (400, structure.field)
    else:
        assert isinstance(answer, Instructed)
    assert len(answer.message if isinstance(answer, ApiError) else answer.warning) < 1000


def test_leading_zeros_of_a_count_count_nothing() -> None:
    assert unsupported("a{" + "0" * 5000 + "3}") is None
    assert unsupported("a{3," + "0" * 5000 + "2}") is not None


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
SCALARS |= st.sampled_from([10**400, -(10**30), 2**63])
SCALARS |= st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.sampled_from(sorted({*keywords.SHAPES, *keywords.FAMILY_OF, "const"}))
JSON = st.recursive(
    SCALARS | st.sampled_from(["object", "string", "#", "#/items", "^a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_whatever_is_sent_as_a_schema_is_read_or_refused(schema: Any) -> None:
    try:
        reading = read(schema)
    except InvalidSchema:
        return
    json.dumps(reading.schema)


def answered(demand: Demand) -> None:
    """Whatever is decided, it is a decision or a 400."""
    answer = answer_to(lambda: decide(demand))
    assert answer is not None
    if not isinstance(answer, ApiError):
        answer = answer_to(lambda: give_up(demand, "no reason"))
    assert not isinstance(answer, ApiError) or answer.status == 400


@settings(max_examples=300, deadline=None)
@given(JSON, st.booleans())
def test_whatever_is_sent_as_a_schema_is_decided_or_refused(schema: Any, strict: bool) -> None:
    answered(Demand(schema_of(schema, strict)))
    if isinstance(schema, dict):
        tool = Tool("f", schema, {}, strict=strict)
        for family in ("json_tools", "qwen3_coder"):
            answered(Demand(tools=(tool,), choice=ToolChoice("required"), family=family))


PIECES = st.sampled_from([*'abdDwWsSnrtfv0xukpBcQ^$|()[]{}*+?\\.,:<>=!-"19', "9" * 5000, "{9", "é", "\0"])
TEXTS = st.one_of(st.text(min_size=1), st.lists(PIECES, min_size=1).map("".join))


@settings(max_examples=500, deadline=None)
@given(TEXTS)
def test_whatever_is_sent_as_an_expression_or_a_grammar_is_decided_or_refused(text: str) -> None:
    answered(Demand(Structure("regex", "guided_regex", text)))
    answered(Demand(Structure("grammar", "guided_grammar", text)))
    answered(Demand(Structure("choice", "guided_choice", (text,))))
    answered(Demand(schema_of({"pattern": text, "patternProperties": {text: {}}, "$defs": {text: True}})))


@pytest.mark.parametrize("text", ["^a*c{1,129}$", "^[ab]+c{0,300}$", "^(ab){2,}c{200}$", "c{1,129}"])
def test_a_large_count_beside_a_repetition_without_an_end_is_not_enforced_in_a_string(text: str) -> None:
    fault = unsupported(text, in_json=True)
    assert fault is not None
    assert "above 128" in fault.what
    assert not fault.invalid
    assert unsupported(text) is None


@pytest.mark.parametrize("text", ["^a*c{1,128}$", "^[a-z]{1,300}$", "^a?c{1,300}$", "^a*$"])
def test_counts_and_repetitions_are_enforced_apart(text: str) -> None:
    assert unsupported(text, in_json=True) is None
