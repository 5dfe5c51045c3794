"""Every event of chat's and completions' streams, through the official client and off the wire."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.clients.answers import CACHED, CITY, COMPLETION, FAILED, PROMPT
from tests.clients.conftest import lenient
from tests.clients.exact import hear, named, raw, typed
from tests.tools import sse
from tests.tools.served import Served

USAGE = {
    "prompt_tokens": PROMPT,
    "completion_tokens": COMPLETION,
    "total_tokens": PROMPT + COMPLETION,
    "prompt_tokens_details": {"cached_tokens": CACHED},
    "lane": "batch",
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
MESSAGES: Any = [{"role": "user", "content": "hello"}]
# What is asked of each model, here and by Node's client (test_node_exact.py).
ASKED: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS}
ERROR = {"message": FAILED, "type": "server_error", "param": None, "code": "internal_error"}


def starts(index: int, call_id: str) -> dict[str, Any]:
    function = {"arguments": "", "name": "weather"}
    return {"tool_calls": [{"index": index, "function": function, "id": call_id, "type": "function"}]}


def goes_on(index: int, arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def reasons(text: str) -> dict[str, Any]:
    return {"reasoning": text, "reasoning_content": text}


def called(call_id: str, arguments: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }


# Model → the deltas after the role's, the reason, and the whole message.
CHATS: dict[str, tuple[list[dict[str, Any]], str, dict[str, Any]]] = {
    "text": ([{"content": "Hello"}, {"content": ", wörld"}], "stop", {"content": "Hello, wörld"}),
    "reasoning": (
        [reasons("Two and"), reasons(" two."), {"content": "Fo"}, {"content": "ur"}],
        "stop",
        {"content": "Four", **reasons("Two and two.")},
    ),
    "calls": (
        [
            {"content": "Let me see."},
            starts(0, "call_a"),
            goes_on(0, '{"city":'),
            goes_on(0, ' "Oslo"}'),
            starts(1, "call_b"),
            goes_on(1, '{"city": "Rome"}'),
        ],
        "tool_calls",
        {
            "content": "Let me see.",
            "tool_calls": [called("call_a", '{"city": "Oslo"}'), called("call_b", '{"city": "Rome"}')],
        },
    ),
    "stop": ([{"content": "One,"}, {"content": " two,"}], "stop", {"content": "One, two,"}),
    "length": ([{"content": "The capital"}, {"content": " of"}], "length", {"content": "The capital of"}),
}


def chunk(model: str, *choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": model,
        "choices": list(choices),
        **more,
    }


def said(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}


def every_event(model: str) -> list[dict[str, Any]]:
    deltas, reason, _ = CHATS[model]
    chunks = [chunk(model, said(delta)) for delta in ({"role": "assistant", "content": ""}, *deltas)]
    return [*chunks, chunk(model, said({}, reason), usage=USAGE)]


def final(model: str) -> dict[str, Any]:
    _, reason, message = CHATS[model]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "refusal": None, **message},
                "finish_reason": reason,
                "logprobs": None,
            }
        ],
        "usage": USAGE,
    }


@pytest.mark.parametrize("model", CHATS)
def test_every_chunk_of_a_chat(scripted: Served, scripted_gpt: openai.OpenAI, model: str) -> None:
    expected = every_event(model)
    body: Any = {"model": model, **ASKED}
    assert typed(scripted_gpt.chat.completions.create(**body, stream=True)) == expected
    assert named(raw(scripted, "/v1/chat/completions", body)) == [*expected, sse.DONE]

    whole = scripted_gpt.chat.completions.create(**body)
    assert named([whole.model_dump(mode="json", exclude_unset=True)]) == [final(model)]


def test_usage_in_a_chunk_of_its_own_is_null_in_the_others(scripted_gpt: openai.OpenAI) -> None:
    asked: Any = {"model": "text", "messages": MESSAGES, "stream": True}
    expected = [
        chunk("text", said({"role": "assistant", "content": ""}), usage=None),
        chunk("text", said({"content": "Hello"}), usage=None),
        chunk("text", said({"content": ", wörld"}), usage=None),
        chunk("text", said({}, "stop"), usage=None),
        chunk("text", usage=USAGE),
    ]
    got = scripted_gpt.chat.completions.create(**asked, stream_options={"include_usage": True})
    assert typed(got) == expected


def test_a_chat_that_fails_in_mid_stream_is_an_error_and_no_answer(
    scripted: Served, scripted_gpt: openai.OpenAI
) -> None:
    body: Any = {"model": "failure", "messages": MESSAGES}
    heard: list[Any] = []
    with pytest.raises(openai.APIError, match=FAILED) as failed:
        hear(scripted_gpt.chat.completions.create(**body, stream=True), heard)
    assert [event.choices[0].delta.content for event in heard] == ["", "Half a"]
    assert failed.value.body == ERROR
    assert named(raw(scripted, "/v1/chat/completions", body))[2:] == [{"error": ERROR}, sse.DONE]
    with pytest.raises(openai.InternalServerError, match=FAILED):
        scripted_gpt.chat.completions.create(**body)


# Model → its texts and the reason.
COMPLETIONS = {
    "text": (["Hello", ", wörld"], "stop"),
    "stop": (["One,", " two,"], "stop"),
    "length": (["The capital", " of"], "length"),
}


def completion(model: str, text: str, reason: str | None, **more: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "text": text, "finish_reason": reason, "logprobs": None}],
        **more,
    }


@pytest.mark.parametrize("model", COMPLETIONS)
def test_every_chunk_of_a_completion(scripted: Served, scripted_gpt: openai.OpenAI, model: str) -> None:
    texts, reason = COMPLETIONS[model]
    expected = [completion(model, text, None) for text in texts]
    expected.append(completion(model, "", reason, usage=USAGE))
    assert typed(lenient(scripted).completions.create(model=model, prompt="hello", stream=True)) == expected
    sent = named(raw(scripted, "/v1/completions", {"model": model, "prompt": "hello"}))
    assert sent == [*expected, sse.DONE]
    whole = scripted_gpt.completions.create(model=model, prompt="hello")
    assert named([whole.model_dump(mode="json", exclude_unset=True)]) == [
        completion(model, "".join(texts), reason, usage=USAGE)
    ]


def test_a_completion_that_fails_in_mid_stream_is_an_error_and_no_answer(scripted: Served) -> None:
    heard: list[Any] = []
    with pytest.raises(openai.APIError, match=FAILED) as failed:
        hear(lenient(scripted).completions.create(model="failure", prompt="hello", stream=True), heard)
    assert [event.choices[0].text for event in heard] == ["Half a"]
    assert failed.value.body == ERROR
    sent = raw(scripted, "/v1/completions", {"model": "failure", "prompt": "hello"})
    assert sent[1:] == [{"error": ERROR}, sse.DONE]
