"""/openapi.json says what there is: compared with the app's router, the tables of fields and a validator."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import MagicMock

import jsonschema
import pytest
from aiohttp import web
from openapi_spec_validator import validate

from mlxpool.parent.edge.app import make_app
from mlxpool.parent.edge.openapi import document
from mlxpool.shared import errors
from mlxpool.shared.api import anthropic_fields, chat_fields, completion_fields, response_fields
from mlxpool.shared.errors import STATUS_OF, error

DOCUMENT = document()
TABLES = {
    "ChatRequest": (chat_fields.FIELDS, {"messages": [{"role": "user", "content": "hi"}]}),
    "CompletionRequest": (completion_fields.FIELDS, {"prompt": "hi"}),
    "MessagesRequest": (
        anthropic_fields.FIELDS,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    ),
    "CountRequest": (anthropic_fields.FIELDS, {"messages": [{"role": "user", "content": "hi"}]}),
    "ResponsesRequest": (response_fields.FIELDS, {"input": "hi"}),
}


def schema(name: str) -> dict[str, Any]:
    """A schema that can be used by itself."""
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


def router() -> set[tuple[str, str]]:
    """(method, path) of every route of the app, written as the document writes them."""

    app = make_app(MagicMock())
    routes = set()
    for route in app.router.routes():
        assert isinstance(route.resource, web.Resource)
        if route.method != "HEAD":
            routes.add((route.method.lower(), re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical)))
    return routes


async def test_every_route_of_the_app_is_there_and_no_other() -> None:
    documented = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert documented == router()


def test_the_document_is_valid_and_each_operation_has_its_own_name() -> None:
    validate(DOCUMENT)
    names = [entry["operationId"] for methods in DOCUMENT["paths"].values() for entry in methods.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", TABLES)
def test_a_body_is_its_tables_fields_and_nothing_else(name: str) -> None:
    table, least = TABLES[name]
    made = DOCUMENT["components"]["schemas"][name]
    assert set(made["properties"]) == set(table)
    jsonschema.validate(least, schema(name))
    jsonschema.validate({**least, "model": None, "keep_alive": "5m"}, schema(name))
    for wrong in ({**least, "no_such_field": 1}, {**least, "model": 5}, {**least, "temperature": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema(name))
    for field in made.get("required", []):
        for missing in ({k: v for k, v in least.items() if k != field}, {**least, field: None}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(missing, schema(name))


def test_errors_are_what_is_said_of_them() -> None:
    for code in STATUS_OF:
        problem = error(code, "why", param="field")
        jsonschema.validate(errors.envelope(problem, "openai"), schema("Error"))
        jsonschema.validate(errors.envelope(problem, "responses"), schema("Error"))
        jsonschema.validate(errors.envelope(problem, "anthropic", "req_1"), schema("AnthropicError"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(errors.envelope(error("not_found", "why")), schema("AnthropicError"))


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/chat/completions", "Error"), ("/v1/messages", "AnthropicError")]
)
def test_a_models_routes_tell_of_everything_that_can_come(path: str, name: str) -> None:
    responses = DOCUMENT["paths"][path]["post"]["responses"]
    assert list(responses) == ["200", "400", "401", "403", "404", "413", "429", "500", "502", "503"]
    for status, told in responses.items():
        if status == "200":
            assert set(told["content"]) == {"application/json", "text/event-stream"}
            continue
        ref = told["content"]["application/json"]["schema"]["$ref"]
        assert ref == f"#/components/schemas/{name}"
        assert ("headers" in told) == (status in ("429", "503"))


def test_what_needs_no_key_says_so() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for entry in methods.values():
            is_open = path in ("/", "/health", "/static/{name}")
            assert (entry.get("security") == []) == is_open, path
            assert ("401" in entry["responses"]) != is_open, path
