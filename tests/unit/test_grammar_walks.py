"""Whatever comes out of a schema's grammar conforms to the schema: random schemas, random answers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mlxpool.worker.grammar import formats
from mlxpool.worker.grammar.schema import read
from tests.unit.grammar_world import text_of, walk

NAMES = st.sampled_from(["a", "b", "xa", "not", 'q"'])
SMALL = st.integers(0, 3)


def _some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


STRINGS = _some(
    minLength=SMALL,
    maxLength=st.integers(3, 5),
    pattern=st.sampled_from(["^a", "b$", "^[0-9]{2}$", "x", "a|^b$", "^[^a]*$"]),
    format=st.sampled_from(["date", "ipv4", "int32"]),
    enum=st.lists(st.sampled_from(["a", "é", 1, None]), min_size=1, unique=True),
).map(lambda schema: {"type": "string", **schema})
NUMBERS = st.tuples(
    st.sampled_from(["integer", "number", ["integer", "null"]]),
    _some(
        minimum=st.sampled_from([-3, 0, 1.5, 10]),
        maximum=st.sampled_from([10, 11.5, 200]),
        exclusiveMinimum=st.sampled_from([-1, 2.5]),
        exclusiveMaximum=st.sampled_from([12, 30.25]),
        multipleOf=st.sampled_from([2, 5, 0.5]),
    ),
).map(lambda pair: {"type": pair[0], **pair[1]})
LEAVES = st.one_of(
    STRINGS,
    NUMBERS,
    st.sampled_from(
        [True, {}, {"type": "boolean"}, {"const": [1]}, {"$ref": "#/$defs/leaf"}, {"minLength": 2}]
    ),
)


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return _some(
        items=inner,
        prefixItems=st.lists(inner, min_size=1, max_size=2),
        minItems=SMALL,
        maxItems=st.integers(3, 4),
        uniqueItems=st.just(False),
    ).map(lambda schema: {"type": "array", **schema})


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return _some(
        properties=st.dictionaries(NAMES, inner, max_size=3),
        required=st.lists(NAMES, max_size=2),
        additionalProperties=st.one_of(st.booleans(), inner),
        patternProperties=st.dictionaries(st.sampled_from(["^x", "a"]), inner, min_size=1, max_size=1),
        propertyNames=st.sampled_from([{"pattern": "^x"}, {"maxLength": 3}, {"enum": ["a", "b"]}]),
        minProperties=SMALL,
        maxProperties=st.integers(3, 4),
    ).map(lambda schema: {"type": "object", **schema})


def _choices(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda schemas: {"anyOf": schemas}),
        several.map(lambda schemas: {"oneOf": schemas}),
        several.map(lambda schemas: {"allOf": schemas, "title": "t"}),
    )


SCHEMAS = st.recursive(
    LEAVES, lambda inner: st.one_of(_arrays(inner), _objects(inner), _choices(inner)), max_leaves=6
)


# How the compiler says that no value fits.
IMPOSSIBLE = ("greater than", "less than", "cannot accept any value")


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, STRINGS, st.integers(0, 2**32))
def test_every_answer_of_an_enforced_schema_conforms_to_it(schema: Any, leaf: Any, seed: int) -> None:
    whole = {**schema, "$defs": {"leaf": leaf}} if isinstance(schema, dict) else schema
    reading = read(whole)
    assume(not reading.unenforced)
    form = formats.json_schema(reading.schema)
    try:
        answer = walk(form, seed)
    except RuntimeError as err:
        # No value fits such a schema, and the compiler says so.
        if not any(words in str(err) for words in IMPOSSIBLE):
            raise
        return
    if answer is not None:
        jsonschema.Draft202012Validator(whole).validate(json.loads(text_of(answer)))
