"""One request, four protocols, whole and streamed: the same text, the same counts, the matching reason.

The prompt of `/v1/completions` is the rendered conversation, so all of them give the model the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from mlxpool.shared.chat import ChatTokenizer
from tests.tools import sse
from tests.tools.held import held
from tests.tools.served import Served

pytestmark = pytest.mark.starter

STARTER = "smollm2-135m"
ANSWER_TIMEOUT_S = 180.0

MESSAGES = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "What is the capital of Italy?"},
]

# How each protocol says why an answer ended.
REASONS = {
    "chat": {"stop": "ended", "length": "cut"},
    "completions": {"stop": "ended", "length": "cut"},
    "messages": {"end_turn": "ended", "stop_sequence": "ended", "max_tokens": "cut"},
    "responses": {"completed": "ended", "max_output_tokens": "cut"},
}


class Told(NamedTuple):
    """What an answer says, whatever the protocol. cached: of the prompt's tokens."""

    text: str
    reason: str
    prompt: int
    completion: int
    cached: int
    total: int


@pytest.fixture(scope="module")
def served(starter_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = tmp_path_factory.mktemp("models")
    (models / STARTER).symlink_to(starter_folder)
    yield from held(tmp=tmp_path_factory.mktemp("four"), models=models)


@pytest.fixture(scope="module")
def rendered(starter_folder: Path) -> str:
    return ChatTokenizer.open(starter_folder).render(MESSAGES)


def chat(_: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": MESSAGES, **fields}


def completions(rendered: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": rendered, **fields}


def messages(_: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body = dict(fields)
    if "stop" in body:
        body["stop_sequences"] = body.pop("stop")
    return "/v1/messages", {"system": MESSAGES[0]["content"], "messages": MESSAGES[1:], **body}


def responses(_: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body = dict(fields)
    body["max_output_tokens"] = body.pop("max_tokens")
    return "/v1/responses", {"instructions": MESSAGES[0]["content"], "input": MESSAGES[1:], **body}


PROTOCOLS: dict[str, Callable[[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "chat": chat,
    "completions": completions,
    "messages": messages,
    "responses": responses,
}


def ask(served: Served, protocol: str, rendered: str, fields: dict[str, Any], stream: bool) -> Told:
    path, body = PROTOCOLS[protocol](rendered, fields)
    answer = httpx2.post(
        served.url + path, json={"model": STARTER, "stream": stream, **body}, timeout=ANSWER_TIMEOUT_S
    )
    assert answer.status_code == 200, answer.text
    text, reason, usage = (STREAMED if stream else WHOLE)[protocol](
        sse.read(answer.content, whole=protocol in ("chat", "completions")) if stream else answer.json()
    )
    own = {"messages": messages_counts, "responses": responses_counts}.get(protocol, chat_counts)(usage)
    # Beside a protocol's own names the four of chat stand everywhere, and say the same.
    assert own == chat_counts(usage)
    return Told(text, REASONS[protocol][reason], *own)


def chat_counts(usage: dict[str, Any]) -> tuple[int, int, int, int]:
    return (
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["total_tokens"],
    )


def messages_counts(usage: dict[str, Any]) -> tuple[int, int, int, int]:
    cached = usage["cache_read_input_tokens"]
    prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
    return prompt, usage["output_tokens"], cached, prompt + usage["output_tokens"]


def responses_counts(usage: dict[str, Any]) -> tuple[int, int, int, int]:
    return (
        usage["input_tokens"],
        usage["output_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
        usage["total_tokens"],
    )


Read = tuple[str, str, dict[str, Any]]


def whole_chat(body: dict[str, Any]) -> Read:
    (choice,) = body["choices"]
    return choice["message"]["content"], choice["finish_reason"], body["usage"]


def whole_completion(body: dict[str, Any]) -> Read:
    (choice,) = body["choices"]
    return choice["text"], choice["finish_reason"], body["usage"]


def whole_message(body: dict[str, Any]) -> Read:
    return "".join(block["text"] for block in body["content"]), body["stop_reason"], body["usage"]


def whole_response(body: dict[str, Any]) -> Read:
    text = "".join(part["text"] for item in body["output"] for part in item["content"])
    details = body["incomplete_details"]
    return text, details["reason"] if details else body["status"], body["usage"]


def streamed_choices(events: list[sse.Event], text: Callable[[Any], str]) -> Read:
    chunks = [event.json() for event in events if event.data != sse.DONE]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return "".join(map(text, choices)), reason, usage


def streamed_chat(events: list[sse.Event]) -> Read:
    return streamed_choices(events, lambda choice: choice["delta"].get("content") or "")


def streamed_completion(events: list[sse.Event]) -> Read:
    return streamed_choices(events, lambda choice: choice["text"])


def streamed_message(events: list[sse.Event]) -> Read:
    said = [event.json() for event in events]
    deltas = [event["delta"] for event in said if event["type"] == "content_block_delta"]
    (start,) = [event for event in said if event["type"] == "message_start"]
    (end,) = [event for event in said if event["type"] == "message_delta"]
    begun = messages_counts(start["message"]["usage"])
    usage = {**start["message"]["usage"], **end["usage"]}
    ended = messages_counts(usage)
    assert (begun[0], begun[2]) == (ended[0], ended[2])
    return "".join(delta["text"] for delta in deltas), end["delta"]["stop_reason"], usage


def streamed_response(events: list[sse.Event]) -> Read:
    said = [event.json() for event in events]
    text, reason, usage = whole_response(said[-1]["response"])
    assert text == "".join(event["delta"] for event in said if event["type"] == "response.output_text.delta")
    return text, reason, usage


WHOLE: dict[str, Callable[[Any], Read]] = {
    "chat": whole_chat,
    "completions": whole_completion,
    "messages": whole_message,
    "responses": whole_response,
}
STREAMED: dict[str, Callable[[Any], Read]] = {
    "chat": streamed_chat,
    "completions": streamed_completion,
    "messages": streamed_message,
    "responses": streamed_response,
}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 40, "temperature": 0}, "ended"),
        ({"max_tokens": 40, "temperature": 0, "stop": [" Rome", "nowhere"]}, "ended"),
        ({"max_tokens": 3, "temperature": 0}, "cut"),
        ({"max_tokens": 8, "temperature": 0.9, "top_p": 0.95, "seed": 20240229}, None),
        ({"max_tokens": 8, "temperature": 0, "repetition_penalty": 1.3, "min_p": 0.01}, None),
    ],
    ids=["plain", "stop", "length", "seeded", "penalised"],
)
def test_four_protocols_say_the_same(
    served: Served, rendered: str, fields: dict[str, Any], reason: str | None
) -> None:
    first = ask(served, "chat", rendered, fields, stream=False)
    assert reason in (None, first.reason)
    assert first.text
    assert all(stop not in first.text for stop in fields.get("stop", ()))
    assert first.completion <= fields["max_tokens"]
    # From the second time on everything but the prompt's last token is known.
    expected = first._replace(cached=first.prompt - 1)
    told = {
        (protocol, stream): ask(served, protocol, rendered, fields, stream)
        for protocol in PROTOCOLS
        for stream in (False, True)
    }
    assert told == dict.fromkeys(told, expected), json.dumps([*told.values()], indent=1)


def test_a_seed_draws_what_no_seed_does_not(served: Served, rendered: str) -> None:
    # At 1.2 all four said "The capital of Italy is Rome." once.
    fields = {"max_tokens": 12, "temperature": 2}
    drawn = {ask(served, protocol, rendered, fields, stream=False).text for protocol in PROTOCOLS}
    assert len(drawn) > 1


def test_a_conversation_that_one_protocol_began_is_known_in_all(served: Served, rendered: str) -> None:
    """The first turn in chat; the longer one is cached for whoever asks it."""
    longer = [*MESSAGES, {"role": "assistant", "content": "Rome."}, {"role": "user", "content": "And Spain?"}]
    fields = {"temperature": 0, "max_tokens": 4}
    path, body = chat(rendered, fields)
    httpx2.post(served.url + path, json={"model": STARTER, **body}, timeout=ANSWER_TIMEOUT_S)
    bodies = {
        "/v1/messages": {"system": longer[0]["content"], "messages": longer[1:], **fields},
        "/v1/responses": {
            "instructions": longer[0]["content"],
            "input": longer[1:],
            "temperature": 0,
            "max_output_tokens": 4,
        },
    }
    for path, body in bodies.items():
        answer = httpx2.post(
            served.url + path, json={"model": STARTER, **body}, timeout=ANSWER_TIMEOUT_S
        ).json()
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > len(rendered) // 10, path
