"""Every route of the app as `/openapi.json` tells of it. A test compares this table with the router."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .model_routes import MAX_LOG_LINES

Method = Literal["get", "post", "delete"]
JSON, EVENTS = "application/json", "text/event-stream"


class Answer(msgspec.Struct, frozen=True):
    """A good answer. schema: a name of openapi_schemas, "" for none. types: of its content."""

    description: str
    schema: str = ""
    types: tuple[str, ...] = (JSON,)


class Query(msgspec.Struct, frozen=True):
    """A parameter of the query."""

    name: str
    description: str
    schema: dict[str, Any]
    required: bool = False


class Operation(msgspec.Struct, frozen=True):
    """One method of one path. answers: by status. errors: the statuses of refusals that its own work can come
    to; those that anything can come to are added. body: a name of openapi_schemas. is_open: needs no key.
    example: of the parameter in its path. makes: a path whose `{id}` is the id of its answer."""

    method: Method
    path: str
    summary: str
    answers: dict[int, Answer]
    errors: tuple[int, ...] = ()
    body: str | None = None
    body_needed: bool = True
    query: tuple[Query, ...] = ()
    is_open: bool = False
    example: str = ""
    makes: str = ""


# What a request to a model can come to: no such model, too much waits, it died, it can't be loaded.
_MODEL_ERRORS = (404, 429, 502, 503)
_NUMBER = {"type": "integer", "minimum": 0}
_INCLUDE = Query(
    "include",
    "accepted; what an object holds it holds anyway",
    {"type": "array", "items": {"type": "string"}},
)
_MODEL = Query("model", "a model's name or an alias; without it the default model", {"type": "string"})
_EMPTY = "Nothing"


def _inference(path: str, summary: str, body: str, answer: str, makes: str = "") -> Operation:
    return Operation(
        "post",
        path,
        summary,
        {200: Answer("the answer: an object, or its events with stream: true", answer, (JSON, EVENTS))},
        _MODEL_ERRORS,
        body,
        makes=makes,
    )


def _command(path: str, summary: str) -> Operation:
    return Operation(
        "post",
        path,
        summary,
        {202: Answer("the model's state, at once", "ModelState")},
        (404,),
        "UnloadBody" if path.endswith("unload") else _EMPTY,
        body_needed=False,
    )


OPERATIONS: tuple[Operation, ...] = (
    _inference("/v1/chat/completions", "A chat answer.", "ChatRequest", "ChatCompletion"),
    _inference("/v1/completions", "What follows a raw prompt.", "CompletionRequest", "Completion"),
    _inference("/v1/messages", "A chat answer for Anthropic's clients.", "MessagesRequest", "Message"),
    Operation(
        "post", "/v1/messages/count_tokens", "How many tokens a prompt has; no model is loaded.",
        {200: Answer("the count", "TokenCount")}, (404, 503), "CountRequest",
    ),
    _inference(
        "/v1/responses", "A response, stored unless store is false.", "ResponsesRequest", "Response",
        makes="/v1/responses/{id}",
    ),
    Operation(
        "get", "/v1/responses", "The same over a WebSocket: text frames of response.create.",
        {101: Answer("the protocol is a WebSocket from here on", types=())},
    ),
    Operation(
        "post", "/v1/responses/compact", "A conversation, shortened to what goes on from it.",
        {200: Answer("the compaction", "Compaction")}, _MODEL_ERRORS, "CompactRequest",
    ),
    Operation(
        "get", "/v1/responses/{id}", "A stored response, or its events.",
        {200: Answer("the object, or its events with stream=true", "Response", (JSON, EVENTS))}, (404, 503),
        query=(
            Query("stream", "its events instead", {"type": "boolean"}),
            Query("starting_after", "only events with a greater number; with stream=true", _NUMBER),
            Query("include_obfuscation", "not supported", {"const": False}),
            _INCLUDE,
        ),
    ),
    Operation(
        "delete", "/v1/responses/{id}", "Forget a response.",
        {200: Answer("it is forgotten", "Deleted")}, (404, 503),
    ),
    Operation(
        "get", "/v1/responses/{id}/input_items", "What a response was asked, page by page.",
        {200: Answer("a page", "ItemPage")}, (404, 503),
        query=(
            Query("limit", "items of a page", {"type": "integer", "minimum": 1, "maximum": 100}),
            Query("order", "by time", {"enum": ["asc", "desc"]}),
            Query("after", "the item that the page before ended with", {"type": "string"}),
            _INCLUDE,
        ),
    ),
    Operation(
        "post", "/v1/responses/{id}/cancel", "End a response that runs in the background.",
        {200: Answer("the response as it ended", "Response")}, (404, 503),
    ),
    Operation("get", "/v1/models", "Every model here.", {200: Answer("all of them", "ModelPage")}),
    Operation(
        "get", "/v1/models/{id}", "A model, by its name or an alias.",
        {200: Answer("the model", "ModelView")}, (404,),
    ),
    Operation(
        "get", "/v1/adapters", "The adapters that are mounted on a model.",
        {200: Answer("those that are", "MountedPage")}, (404, 502), query=(_MODEL,),
    ),
    Operation(
        "get", "/v1/adapters/available", "The adapters in the home, and whether each fits a model.",
        {200: Answer("all of them", "AvailablePage")}, (404,), query=(_MODEL,),
    ),
    Operation(
        "post", "/v1/adapters", "Mount an adapter; its model is loaded for it.",
        {200: Answer("the adapter", "MountedView")}, _MODEL_ERRORS, "MountBody", query=(_MODEL,),
    ),
    Operation(
        "delete", "/v1/adapters/{id}", "Unmount an adapter.",
        {200: Answer("it is", "Unmounted")}, (404, 502), query=(_MODEL,),
    ),
    Operation(
        "get", "/health", "Whether the server serves.", {200: Answer("it does", "Health")}, is_open=True
    ),
    Operation(
        "get", "/metrics", "Figures for Prometheus.",
        {200: Answer("the exposition format", types=("text/plain",))},
    ),
    Operation("get", "/openapi.json", "This document.", {200: Answer("the document", "Anything")}),
    Operation("get", "/api/pool", "Budget, workers, queue, counters.", {200: Answer("the pool", "PoolView")}),
    _command("/api/models/{id}/load", "Load a model."),
    _command("/api/models/{id}/unload", "Unload a model once its requests have ended."),
    _command("/api/models/{id}/pin", "Never evict a model."),
    _command("/api/models/{id}/unpin", "Let a model be evicted again."),
    Operation(
        "get", "/api/models/{id}/stats", "What a model's worker counts.",
        {200: Answer("the counters", "Anything")}, (404, 502),
    ),
    Operation(
        "get", "/api/models/{id}/experts", "Which streamed experts a model is asked for, and which are held.",
        {200: Answer("the layers", "ExpertsView")}, (404, 502),
    ),
    Operation(
        "get", "/api/models/{id}/logs", "The last lines that a model's workers wrote.",
        {200: Answer("the lines", "LogLines")}, (404,),
        query=(Query("n", "how many", {"type": "integer", "minimum": 1, "maximum": MAX_LOG_LINES}),),
    ),
    Operation("get", "/api/cache", "What is kept of prompts.", {200: Answer("the cache", "CacheView")}),
    Operation(
        "post", "/api/cache/flush", "Have everything written to disk.",
        {200: Answer("all of it is", "DrainReport"), 503: Answer("not all of it is", "DrainReport")},
        body=_EMPTY, body_needed=False,
        query=(Query("timeout_s", "how long it may take", {"type": "number", "minimum": 0}),),
    ),
    Operation("get", "/api/history", "What is kept of responses.", {200: Answer("its figures", "Figures")}),
    Operation("get", "/api/library", "The models on disk.", {200: Answer("the models", "LibraryView")}),
    Operation(
        "delete", "/api/library/{id}", "Remove a model from the disk.",
        {200: Answer("what was removed", "Removed")}, (404,),
    ),
    Operation(
        "get", "/api/fit", "Whether a model fits.", {200: Answer("the plan", "Anything")}, (404,),
        query=(
            Query("model", "a model's name or an alias", {"type": "string"}, required=True),
            Query("context", "tokens", {"type": "integer", "minimum": 1, "maximum": 10**12 - 1}),
        ),
    ),
    Operation("get", "/api/jobs", "Long work, the newest first.", {200: Answer("the rows", "JobRows")}),
    Operation(
        "post", "/api/jobs", "Ask for long work.", {202: Answer("its row", "Job")}, (429, 503), "JobBody",
    ),
    Operation(
        "get", "/api/jobs/kinds", "What can be asked for, and what each kind takes.",
        {200: Answer("the kinds", "JobKinds")},
    ),
    Operation("get", "/api/jobs/{id}", "One row.", {200: Answer("the row", "Job")}, (404,)),
    Operation(
        "get", "/api/jobs/{id}/events", "What happened in it, then what happens, to its end.",
        {200: Answer("its events", types=(EVENTS,))}, (404, 429),
        query=(
            Query("offset", "the id of the last event that is known", {**_NUMBER, "maximum": 10**15 - 1}),
            Query("follow", "whether to wait for what comes", {"enum": ["true", "false"]}),
        ),
    ),
    Operation("post", "/api/jobs/{id}/cancel", "End it.", {202: Answer("the row", "Job")}, (404,)),
    Operation(
        "get", "/api/events", "Everything the dashboard shows, as it changes.",
        {200: Answer("events until the client leaves", types=(EVENTS,))}, (404, 429),
        query=(
            Query(
                "logs", "models whose lines are sent too; * for all",
                {"type": "array", "items": {"type": "string"}},
            ),
        ),
    ),
    Operation(
        "post", "/api/config/reload", "Read the settings again.",
        {200: Answer("what changed", "Difference")}, body=_EMPTY, body_needed=False,
    ),
    Operation(
        "get", "/", "The dashboard.",
        {200: Answer("the page", types=("text/html",)), 304: Answer("as it was", types=())}, is_open=True,
    ),
    Operation(
        "get", "/static/{name}", "A file of the dashboard.",
        {
            200: Answer(
                "the file",
                types=("text/javascript", "text/css", "text/html", "text/plain", "image/svg+xml", JSON),
            ),
            304: Answer("as it was", types=()),
        },
        (404,), is_open=True, example="js/main.js",
    ),
)  # fmt: skip
