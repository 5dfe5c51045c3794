"""Requests of every kind in one batch, on the starter: each gets its own form, text and tokens.

Each round asks at once for an answer of a schema (streamed in every other round), plain text, a forced call,
a seeded draw, penalties and log-probabilities. What was asked of one may never show in another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.tools.worker_process import WorkerProcess, chat_body, streamed_text

# Minutes where two busy cores are shared.
pytestmark = [pytest.mark.starter, pytest.mark.timeout(900)]

ROUNDS = 24
ENOUGH_ENDED = 20

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
            "coastal": {"type": "boolean"},
        },
        "required": ["city", "population", "coastal"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "mood": {"enum": ["happy", "sad", "bored"]},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["mood", "tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 4},
]

PLAIN = ("Name a colour.", {"temperature": 0, "max_tokens": 8})
SEEDED = ("Tell me a joke.", {"temperature": 0.9, "seed": 5, "top_p": 0.95, "max_tokens": 8})
LIKELY = ("What is 2+2?", {"temperature": 0, "logprobs": True, "top_logprobs": 2, "max_tokens": 6})
TOOLED = (
    "What is the weather in Paris?",
    {
        "temperature": 0,
        "max_tokens": 40,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "parameters": {
                        "type": "object",
                        "properties": {"sky": {"enum": ["sun", "rain"]}},
                        "required": ["sky"],
                        "additionalProperties": False,
                    },
                },
            }
        ],
    },
)
PENALISED = (
    "Repeat the word yes many times.",
    {"temperature": 0, "max_tokens": 8, "frequency_penalty": 1.5, "frequency_context_size": 0},
)
OTHERS: list[tuple[str, dict[str, Any]]] = [PLAIN, SEEDED, LIKELY, TOOLED, PENALISED]


@pytest.fixture(scope="module")
def worker(starter_folder: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(starter_folder, context=2048, batch=8).ready() as process:
        yield process


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


def ask_form(worker: WorkerProcess, place: int) -> tuple[str, str]:
    """An answer's text and finish reason, streamed in every other round."""
    fields: dict[str, Any] = {
        "response_format": form(SCHEMAS[place % 3]), "max_tokens": 60, "temperature": 0.7, "seed": place,
    }  # fmt: skip
    prompt = f"Describe thing number {place} as JSON."
    if place % 2:
        chunks = list(worker.stream(prompt, **fields))
        ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
        assert len(ends) == 1
        return streamed_text(chunks), ends[0]
    choice = worker.chat(prompt, **fields)["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def ask_other(worker: WorkerProcess, place: int, stream: bool) -> Any:
    """What an answer said, in one shape for streamed and whole ones."""
    prompt, fields = OTHERS[place]
    if not stream:
        choice = worker.chat(prompt, **fields)["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        called = "".join(call["name"] + call["arguments"] for call in calls)
        return message["content"] or "", called, tokens_of([choice]), choice["finish_reason"]
    chunks = [chunk["choices"][0] for chunk in worker.stream(prompt, **fields)]
    pieces = [call["function"] for chunk in chunks for call in chunk["delta"].get("tool_calls") or ()]
    called = "".join(piece.get("name", "") + piece["arguments"] for piece in pieces)
    text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    return text, called, tokens_of(chunks), chunks[-1]["finish_reason"]


def tokens_of(choices: list[dict[str, Any]]) -> list[tuple[str, float, list[str]]]:
    return [
        (entry["token"], round(entry["logprob"], 3), [top["token"] for top in entry["top_logprobs"]])
        for choice in choices
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]


def test_requests_of_every_kind_at_once_each_get_what_they_asked_for(worker: WorkerProcess) -> None:
    alone = [ask_other(worker, place, stream=False) for place in range(len(OTHERS))]
    assert [len(answer[2]) for answer in alone] == [0, 0, 6, 0, 0]
    assert len({answer[0] for answer in alone}) == len(alone)
    assert alone[3][1] in ('weather{"sky": "sun"}', 'weather{"sky": "rain"}')
    ended = 0
    with ThreadPoolExecutor(16) as pool:
        forms = [pool.submit(ask_form, worker, place) for place in range(ROUNDS)]
        others = [
            (place, pool.submit(ask_other, worker, place, stream=(round_ + place) % 2 == 0))
            for round_ in range(ROUNDS)
            for place in range(len(OTHERS))
            if (round_ + place) % 3 == 0
        ]
        for place, future in others:
            assert future.result() == alone[place]
        for place, future in enumerate(forms):
            text, reason = future.result()
            if reason == "stop":
                ended += 1
                jsonschema.validate(json.loads(text), SCHEMAS[place % 3])
            else:
                assert reason == "length"
    assert ended >= ENOUGH_ENDED
    stats = worker.stats()
    assert (stats["rows"], stats["waiting"], stats["open_grammars"], stats["errors"]) == (0, 0, 0, 0)


def test_several_choices_of_one_request_share_its_prompt_and_differ(worker: WorkerProcess) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 8}
    one = worker.chat("Tell me something.", **fields)
    three = worker.chat("Tell me something.", n=3, **fields)
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in three["choices"]]
    assert texts[0] == one["choices"][0]["message"]["content"]
    assert len(set(texts)) == 3
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 24
    streamed: dict[int, str] = {}
    for chunk in worker.stream("Tell me something.", n=3, **fields):
        choice = chunk["choices"][0]
        said = streamed.get(choice["index"], "")
        streamed[choice["index"]] = said + (choice["delta"].get("content") or "")
    assert [streamed[place] for place in range(3)] == texts


def test_a_schema_that_is_not_enforced_is_refused_when_strict_and_else_said_so(worker: WorkerProcess) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    strict = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": True}}
    status, body, _ = worker.request(
        "POST", "/v1/chat/completions", chat_body("x", response_format=strict, max_tokens=4)
    )
    assert (status, body["error"]["code"]) == (400, "unsupported_schema")
    assert "uniqueItems" in body["error"]["message"]
    strict["json_schema"]["strict"] = False
    for stream in (False, True):
        connection = worker.connection()
        asked = chat_body("x", response_format=strict, max_tokens=4, stream=stream)
        connection.request("POST", "/v1/chat/completions", json.dumps(asked).encode())
        answer = connection.getresponse()
        assert answer.status == 200
        assert "grammar not enforced" in answer.headers["Warning"]
        assert "uniqueItems" in answer.headers["Warning"]
        answer.read()
        connection.close()


def test_the_length_limit_may_end_a_form_in_its_middle(worker: WorkerProcess) -> None:
    answer = worker.chat("A city, please.", response_format=form(SCHEMAS[0]), max_tokens=4, temperature=0)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"].startswith("{")
