"""What form an answer must have: read from whichever field, the first by rank wins, all are checked."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.shared.api.structure import Structure, read_structure
from mlxpool.shared.errors import ApiError

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}

# In the order of precedence, each with what it means alone.
BY_RANK: list[tuple[dict[str, object], Structure]] = [
    ({"guided_grammar": "root ::= 'a'"}, Structure("grammar", "guided_grammar", "root ::= 'a'")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        Structure("json_schema", "response_format", SCHEMA),
    ),
    ({"response_format": {"type": "json_object"}}, Structure("json_object", "response_format")),
    (
        {"structured_outputs": {"choice": ["a", "b"]}},
        Structure("choice", "structured_outputs", ("a", "b")),
    ),
    ({"guided_json": SCHEMA}, Structure("json_schema", "guided_json", SCHEMA)),
    ({"guided_regex": "a+"}, Structure("regex", "guided_regex", "a+")),
    ({"guided_choice": ["x"]}, Structure("choice", "guided_choice", ("x",))),
]


def test_the_first_by_rank_wins_whatever_comes_with_it() -> None:
    for place, (fields, structure) in enumerate(BY_RANK):
        assert read_structure(fields) == structure
        losers: dict[str, object] = {}
        for lower, _ in BY_RANK[place + 1 :]:
            losers = {**lower, **losers}
            assert read_structure({**losers, **fields}) == structure


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "description": "d", "strict": None}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": None},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": False},
        {"type": "json_object", "schema": SCHEMA},
    ],
)
def test_a_schema_is_found_wherever_clients_put_it(response_format: object) -> None:
    assert read_structure({"response_format": response_format}) == Structure(
        "json_schema", "response_format", SCHEMA
    )


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "schema": SCHEMA, "strict": True},
    ],
)
def test_only_a_schemas_own_flag_makes_it_strict(response_format: object) -> None:
    structure = read_structure({"response_format": response_format})
    assert structure is not None
    assert structure.strict
    assert not any(by_rank.strict for _, by_rank in BY_RANK)


@pytest.mark.parametrize(
    ("given", "structure"),
    [
        ({"json": SCHEMA}, Structure("json_schema", "structured_outputs", SCHEMA)),
        ({"json": '{"type": "array"}'}, Structure("json_schema", "structured_outputs", {"type": "array"})),
        ({"json": True}, Structure("json_schema", "structured_outputs", True)),
        ({"regex": "a", "choice": None}, Structure("regex", "structured_outputs", "a")),
        ({"grammar": "root ::= 'a'"}, Structure("grammar", "structured_outputs", "root ::= 'a'")),
        ({"json_object": True, "disable_fallback": False}, Structure("json_object", "structured_outputs")),
    ],
)
def test_structured_outputs_ask_in_each_of_their_ways(given: object, structure: Structure) -> None:
    assert read_structure({"structured_outputs": given}) == structure


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_plain_text_is_no_structure(value: object) -> None:
    assert read_structure({"response_format": value}) is None
    assert read_structure({name: None for fields, _ in BY_RANK for name in fields}) is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": "json"}, "response_format", 'like {"type": "json_object"}, not "json"'),
        ({"response_format": {}}, "response_format.type", "text, json_object, json_schema, not null"),
        ({"response_format": {"type": "xml"}}, "response_format.type", 'not "xml"'),
        ({"response_format": {"type": ["text"]}}, "response_format.type", 'not ["text"]'),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "send guided_grammar instead"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "schema"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema", "not 5"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            'is missing; it must be a JSON schema like {"type": "object"}',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": 5}},
            "response_format.json_schema",
            "not 5",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}},
            "response_format.schema",
            "send one of them",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strct": True}}},
            "response_format.json_schema.strct",
            "did you mean strict?",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
            'true or false, not "yes"',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}},
            "response_format.json_schema.name",
            "a string, not 1",
        ),
        ({"guided_json": "{"}, "guided_json", 'not "{"'),
        ({"guided_json": "[" * 100_000}, "guided_json", "JSON schema like"),
        ({"guided_json": '{"a":' * 901 + "1" + "}" * 901}, "guided_json", "at most 900 levels"),
        ({"guided_json": 5}, "guided_json", "not 5"),
        ({"guided_grammar": ""}, "guided_grammar", "non-empty string"),
        ({"guided_grammar": {}}, "guided_grammar", "non-empty string, not {}"),
        ({"guided_regex": 5}, "guided_regex", "non-empty string, not 5"),
        ({"guided_choice": []}, "guided_choice", "non-empty list of strings, not []"),
        ({"guided_choice": "a"}, "guided_choice", 'not "a"'),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "non-empty string"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "not 1"),
        ({"guided_choice": ["a", "b", "a"]}, "guided_choice", '"a" twice'),
        ({"guided_choice": [str(i) for i in range(1025)]}, "guided_choice", "1025 strings; at most 1024"),
        ({"structured_outputs": "json"}, "structured_outputs", "an object like"),
        ({"structured_outputs": {}}, "structured_outputs", "it holds none of them"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "holds json and regex"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "must be true"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "non-empty list"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "not 5"),
        (
            {"structured_outputs": {"regex": "a", "structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "structural_tag",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "not supported",
        ),
    ],
)
def test_a_form_of_a_wrong_shape_is_refused_also_where_another_wins(
    fields: dict[str, object], param: str, says: str
) -> None:
    for beside in ({}, {"guided_grammar": "root ::= 'a'"}):
        with pytest.raises(ApiError) as caught:
            read_structure({**beside, **fields})
        assert (caught.value.status, caught.value.param) == (400, param)
        assert says in caught.value.message
        assert len(caught.value.message) < 400
