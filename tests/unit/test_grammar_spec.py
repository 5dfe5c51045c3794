"""What is enforced, what is asked for in words, and what is refused: one decision per form of answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.shared.api.structure import Structure
from mlxpool.shared.api.tools import Tool, ToolChoice
from mlxpool.shared.errors import ApiError
from mlxpool.worker.grammar import keywords
from mlxpool.worker.grammar.assertions import InvalidSchema
from mlxpool.worker.grammar.formats import BLANKS_HIGH, Format, reasoning_of
from mlxpool.worker.grammar.pattern import unsupported
from mlxpool.worker.grammar.schema import read
from mlxpool.worker.grammar.spec import Demand, Enforced, Instructed, decide, give_up, invalid_text
from mlxpool.worker.text.reasoning import REASONING_FAMILIES
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


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
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
