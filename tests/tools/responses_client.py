"""Asking /v1/responses in tests: bodies, streams read strictly, and what a response says."""

from __future__ import annotations

from typing import Any

from tests.tools import sse
from tests.tools.served import Answer, Served

TERMINAL = {"response.completed", "response.incomplete", "response.failed"}


async def post(served: Served, model: str = "a", given: Any = "hello", **fields: Any) -> Answer:
    """POST /v1/responses"""
    return await served.request("POST", "/v1/responses", {"model": model, "input": given, **fields})


async def respond(served: Served, model: str = "a", given: Any = "hello", **fields: Any) -> dict[str, Any]:
    """A whole response."""
    answer = await post(served, model, given, **fields)
    assert answer.status == 200, answer.body
    return dict(answer.body)


async def stream(served: Served, model: str = "a", given: Any = "hello", **fields: Any) -> bytes:
    """A streamed response's bytes."""
    answer = await post(served, model, given, stream=True, **fields)
    assert answer.status == 200, answer.body
    return bytes(answer.body)


async def fetch(served: Served, response_id: str, query: str = "") -> Answer:
    """GET /v1/responses/{id}"""
    return await served.request("GET", f"/v1/responses/{response_id}{query}")


def events(body: bytes, first: int = 0) -> list[dict[str, Any]]:
    """The events of a whole stream: named as their types say, numbered from `first` without a hole, the last
    one terminal and no other."""
    told = []
    for number, event in enumerate(sse.read(body, whole=False), first):
        data = event.json()
        assert (event.name, data["sequence_number"]) == (data["type"], number), event
        told.append(data)
    assert [event["type"] in TERMINAL for event in told] == [False] * (len(told) - 1) + [True]
    return told


def final(body: bytes) -> dict[str, Any]:
    """The response that a whole stream ended with."""
    return dict(events(body)[-1]["response"])


def text_of(response: dict[str, Any]) -> str:
    """Everything that its messages say."""
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


async def said(served: Served, response_id: str) -> list[tuple[str, str]]:
    """(role, text) of each message that a response was made of, oldest first."""
    answer = await fetch(served, response_id, "/input_items?order=asc&limit=100")
    assert answer.status == 200, answer.body
    return [(item["role"], text_of({"output": [item]})) for item in answer.body["data"]]
