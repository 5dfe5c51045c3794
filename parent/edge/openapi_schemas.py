"""The schemas of `/openapi.json`, and how a route of the table becomes an operation of the document.

Bodies are objects of their table's rows and nothing else, each of which may be null; the structs that answers
are sent as describe themselves. Answers that a worker writes are described by what clients rely on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from mlxpool.parent.history.store import Figures
from mlxpool.parent.jobs.store import Job
from mlxpool.parent.pool.views import PoolView
from mlxpool.parent.reload import Difference
from mlxpool.shared.api import anthropic_fields, chat_fields, completion_fields, response_fields
from mlxpool.shared.api.table import Field
from mlxpool.shared.control import DrainReport
from mlxpool.shared.errors import STATUS_OF, Protocol, protocol_of

from .adapter_routes import AvailablePage, MountBody, MountedPage, MountedView, Unmounted
from .cache_routes import CacheView
from .count_tokens import TokenCount
from .events import LogLines
from .jobs_routes import JobBody, KindView
from .library_routes import LibraryView, Removed
from .model_routes import ExpertsView
from .models import ModelPage, ModelView
from .openapi_routes import EVENTS, JSON, OPERATIONS, Answer, Operation
from .pool_routes import ModelState, UnloadBody

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

_REFS = "#/components/schemas/{name}"
_ANSWERS = (
    AvailablePage, CacheView, Difference, DrainReport, ExpertsView, Figures, Job, JobBody, KindView,
    LibraryView, LogLines, ModelPage, ModelState, ModelView, MountBody, MountedPage, MountedView, PoolView,
    Removed, TokenCount, UnloadBody, Unmounted,
)  # fmt: skip
# What any request can come to: a body or a header that can't be read, a key, a page's or a foreign host's
# request, a body over the limit, a fault of ours.
_ANYWHERE = (400, 401, 403, 413, 500)
_WITH_RETRY_AFTER = (429, 503)
_DESCRIPTIONS = {
    400: "the request is wrong, and the message says where",
    401: "a key is asked for",
    403: "this Host or Origin is not served",
    404: "there is no such thing",
    413: "the body, or what it goes on from, is too large",
    429: "too much waits",
    500: "a fault of the server's",
    502: "the model's worker died or is silent",
    503: "it can't be done now, and the message says why",
}
_ERROR_NAMES: dict[Protocol, str] = {"openai": "Error", "responses": "Error", "anthropic": "AnthropicError"}

_SOMETHING_TO_GO_ON_FROM = [
    {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
    for name in ("input", "previous_response_id")
]


def body_schema(
    table: Mapping[str, Field], needed: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A body of these fields alone. needed: those that must be there; the others may be null too."""
    properties = {}
    for name, row in table.items():
        if name in without:
            continue
        schema = dict(row.schema or {})
        if name not in needed and schema and row.status != "refused":
            schema = {"anyOf": [schema, {"type": "null"}]}
        properties[name] = {**schema, "description": row.why}
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": list(needed)} if needed else {}),
    }


def schemas() -> dict[str, Any]:
    """Every schema by its name."""
    _, made = msgspec.json.schema_components(_ANSWERS, ref_template=_REFS)
    return {**made, **_bodies(), **_written_by_workers(), **_errors(), **_SMALL}


def operation(entry: Operation) -> dict[str, Any]:
    """One route as an operation."""
    errors = [*_ANYWHERE, *entry.errors]
    if entry.is_open:
        errors.remove(401)
    responses = {str(status): _answer(answer) for status, answer in entry.answers.items()}
    if entry.makes:
        responses["200"]["links"] = _links(entry.makes)
    for status in sorted(errors):
        responses.setdefault(str(status), _refusal(entry.path, status))
    told: dict[str, Any] = {
        "operationId": _operation_id(entry),
        "summary": entry.summary,
        "parameters": _parameters(entry),
        "responses": responses,
    }
    if entry.body is not None:
        told["requestBody"] = {
            "required": entry.body_needed,
            "content": {JSON: {"schema": _ref(entry.body)}},
        }
    if entry.is_open:
        told["security"] = []
    return told


def _parameters(entry: Operation) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
            **({"example": entry.example} if entry.example else {}),
        }
        for name in re.findall(r"\{(\w+)\}", entry.path)
    ]
    return parts + [
        {
            "name": query.name,
            "in": "query",
            "description": query.description,
            "required": query.required,
            "schema": query.schema,
        }
        for query in entry.query
    ]


def _links(path: str) -> dict[str, Any]:
    """What can be asked next about the thing that was made: all that is at this path and below it."""
    return {
        _operation_id(entry): {
            "operationId": _operation_id(entry),
            "parameters": {"id": "$response.body#/id"},
        }
        for entry in OPERATIONS
        if entry.path.startswith(path)
    }


def _answer(answer: Answer) -> dict[str, Any]:
    if not answer.types:
        return {"description": answer.description}
    whole = _ref(answer.schema) if answer.schema else {}
    # Readers of OpenAPI disagree whether a stream's schema is the whole's or each event's: it has none.
    content = {kind: {} if kind == EVENTS else {"schema": whole} for kind in answer.types}
    return {"description": answer.description, "content": content}


def _refusal(path: str, status: int) -> dict[str, Any]:
    name = _ERROR_NAMES[protocol_of(path)]
    # A listing that several vendors' clients read refuses each in its own words.
    schema = {"anyOf": [_ref(one) for one in ("Error", "AnthropicError")]}
    told: dict[str, Any] = {
        "description": _DESCRIPTIONS[status],
        "content": {JSON: {"schema": schema if path.startswith("/v1/models") else _ref(name)}},
    }
    if status in _WITH_RETRY_AFTER:
        told["headers"] = {
            "Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}
        }
    return told


def _operation_id(entry: Operation) -> str:
    return re.sub(r"\W+", "_", f"{entry.method} {entry.path}").strip("_")


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REFS.format(name=name)}


def _bodies() -> dict[str, Any]:
    messages = anthropic_fields.FIELDS
    return {
        "ChatRequest": body_schema(chat_fields.FIELDS, ("messages",)),
        "CompletionRequest": body_schema(completion_fields.FIELDS, ("prompt",)),
        "MessagesRequest": body_schema(messages, ("messages", "max_tokens")),
        "CountRequest": body_schema(messages, ("messages",)),
        "ResponsesRequest": {**body_schema(response_fields.FIELDS), "anyOf": _SOMETHING_TO_GO_ON_FROM},
        "CompactRequest": _compact(),
    }


def _compact() -> dict[str, Any]:
    from mlxpool.parent.history.compact import KNOWN

    table = response_fields.FIELDS
    return body_schema({name: table[name] for name in sorted(KNOWN) if name in table})


def _errors() -> dict[str, Any]:
    text = {"type": "string"}
    codes = {"enum": sorted(STATUS_OF)}
    return {
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": text,
                        "type": text,
                        "param": {"type": ["string", "null"]},
                        "code": codes,
                    },
                }
            },
        },
        "AnthropicError": {
            "type": "object",
            "required": ["type", "error"],
            "properties": {
                "type": {"const": "error"},
                "error": {
                    "type": "object",
                    "required": ["type", "message", "code"],
                    "properties": {"type": text, "message": text, "code": codes},
                },
                "request_id": text,
            },
        },
    }


def _object(kind: str, needed: tuple[str, ...], where: str = "object") -> dict[str, Any]:
    """An object that is told by its word for itself and by what it always has."""
    return {"type": "object", "required": [where, *needed], "properties": {where: {"const": kind}}}


def _written_by_workers() -> dict[str, Any]:
    return {
        "ChatCompletion": _object("chat.completion", ("id", "created", "model", "choices", "usage")),
        "Completion": _object("text_completion", ("id", "created", "model", "choices", "usage")),
        "Message": _object("message", ("id", "role", "model", "content", "stop_reason", "usage"), "type"),
        "Response": _object("response", ("id", "created_at", "status", "model", "output")),
        "Compaction": _object("response.compaction", ("id", "created_at", "output")),
    }


_SMALL: dict[str, Any] = {
    "Anything": {"type": "object"},
    "Nothing": {"type": "object", "maxProperties": 0},
    "Health": {
        "type": "object",
        "required": ["status", "uptime_s"],
        "properties": {"status": {"const": "ok"}, "uptime_s": {"type": "number"}},
    },
    "JobRows": {
        "type": "object",
        "required": ["jobs"],
        "properties": {"jobs": {"type": "array", "items": _ref("Job")}},
    },
    "JobKinds": {
        "type": "object",
        "required": ["kinds"],
        "properties": {"kinds": {"type": "array", "items": _ref("KindView")}},
    },
    "Deleted": {
        "type": "object",
        "required": ["id", "object", "deleted"],
        "properties": {"object": {"const": "response"}, "deleted": {"const": True}},
    },
    "ItemPage": {
        "type": "object",
        "required": ["object", "data", "first_id", "last_id", "has_more"],
        "properties": {"object": {"const": "list"}, "data": {"type": "array"}},
    },
}
