"""Each protocol at the parent's edge: what is said before a worker speaks, and how each thing that goes wrong
is told in the protocol's own words, before a stream and in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.tools import sse
from tests.tools.scripted_script import make_scripted_model, read_events
from tests.tools.served import Served, serve, until

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
PATHS = [CHAT, COMPLETIONS, MESSAGES, RESPONSES]
# A stream that waits is opened after 10 s; nobody needs to wait that long to see it.
QUICK = ["--open-after", "0.3", "--keep-alive", "0.2"]
HELLO = [{"role": "user", "content": "q"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "q"},
    MESSAGES: {"messages": HELLO, "max_tokens": 100},
    COUNT: {"messages": HELLO},
    RESPONSES: {"input": "q"},
}


async def ask(served: Served, path: str, model: str, **headers: str) -> Any:
    """A whole answer's status, headers and body."""
    return await served.request("POST", path, {"model": model, **BODIES[path]}, **headers)


async def stream(served: Served, path: str, model: str) -> list[sse.Event]:
    """A stream's events; all of them whole."""
    body = {"model": model, **BODIES[path], "stream": True}
    async with served.client.post(served.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return sse.read(await answer.read(), whole=path in (CHAT, COMPLETIONS))


def text_of(path: str, events: Sequence[sse.Event]) -> str:
    """What a stream's deltas say."""
    said = []
    for event in events:
        if event.data == sse.DONE:
            continue
        data = event.json()
        if path == CHAT:
            said += [choice["delta"].get("content") or "" for choice in data.get("choices", [])]
        elif path == COMPLETIONS:
            said += [choice["text"] for choice in data.get("choices", [])]
        elif event.name == "content_block_delta":
            said.append(data["delta"]["text"])
        elif event.name == "response.output_text.delta":
            said.append(data["delta"])
    return "".join(said)


def silent(path: str, event: sse.Event) -> bool:
    """Whether it is a keep-alive."""
    if path == CHAT:
        return '"delta":{}' in event.data and '"finish_reason":null' in event.data
    if path == COMPLETIONS:
        return '"text":""' in event.data and '"finish_reason":null' in event.data
    return event.name in ("ping", "response.in_progress")


def ids(path: str, events: Sequence[sse.Event]) -> set[str]:
    """The ids that a stream's events have of the answer."""
    found = set()
    for data in (event.json() for event in events if event.data != sse.DONE):
        if path in (CHAT, COMPLETIONS) and "id" in data:
            found.add(data["id"])
        found.update(data[key]["id"] for key in ("message", "response") if key in data)
    return found


def blame(path: str, events: Sequence[sse.Event]) -> dict[str, Any]:
    """The error that ends a stream, in the place and shape that the protocol has for it."""
    if path in (CHAT, COMPLETIONS):
        assert events[-1].data == sse.DONE
        return dict(events[-2].json()["error"])
    assert not any("[DONE]" in event.data for event in events)
    last = events[-1].json()
    assert last["type"] == events[-1].name
    if path == MESSAGES:
        assert last["type"] == "error"
        return dict(last["error"])
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    error = last["response"]["error"]
    return {"message": error["message"], "code": error["type"]}


def check_numbers(path: str, events: Sequence[sse.Event]) -> None:
    """Events of a response are numbered without a hole."""
    if path == RESPONSES:
        assert [event.json()["sequence_number"] for event in events] == list(range(len(events)))
        assert [event.name for event in events].count("response.created") == 1


async def test_a_stream_that_waits_is_opened_and_kept_alive_in_every_protocol(tmp_path: Path):
    for name, script in (("loads", {"load_s": 1.2}), ("thinks", {"slow_headers_s": 1.2})):
        make_scripted_model(tmp_path / "m", name, tokens=3, **script)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, flags=QUICK) as served:
        cases = [(path, name) for name in ("loads", "thinks") for path in PATHS]
        streams = await asyncio.gather(*(stream(served, path, name) for path, name in cases))
        for (path, name), events in zip(cases, streams, strict=True):
            assert text_of(path, events) == "".join(f"{name}:q:{n} " for n in range(3)), path
            assert sum(silent(path, event) for event in events) >= 3, path
            assert len(ids(path, events)) == 1, path
            check_numbers(path, events)
            ends = {MESSAGES: "message_stop", RESPONSES: "response.completed"}
            assert events[-1].name == ends.get(path, ""), path
        for path in PATHS:
            quick = await stream(served, path, "loads")
            assert sum(silent(path, event) for event in quick[2:]) == 0, path
            check_numbers(path, quick)


async def test_each_kind_of_bad_end_is_told_in_the_protocols_own_words(tmp_path: Path):
    """A load that fails, a worker that refuses or dies, before the stream's first event and in it."""
    scripts: dict[str, dict[str, Any]] = {
        "bad": {"load_s": 0.8, "fail_load": "no such tensor"},
        "refuses": {"slow_headers_s": 0.8, "status": 429},
        "dies": {"slow_headers_s": 0.8, "crash_at": "prefill"},
        "cut": {"half_event_then_crash": True, "fault_after_tokens": 2},
        "stops": {"no_end": True, "tokens": 2},
    }
    for name, script in scripts.items():
        # A worker that dies takes every stream of its model along.
        for place in range(len(PATHS)):
            make_scripted_model(tmp_path / "m", f"{name}{place}", **script)
    expected = {
        "bad": ("no such tensor", "load_failed"),
        "refuses": ("scripted answer 429", "queue_full"),
        "dies": ("killed by SIGABRT", "worker_crashed"),
        "cut": ("killed by SIGABRT", "worker_crashed"),
        "stops": ("stopped before the answer was complete", "internal_error"),
    }
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, flags=QUICK) as served:
        for name, (said, code) in expected.items():
            models = [f"{name}{place}" for place in range(len(PATHS))]
            streams = await asyncio.gather(*map(partial(stream, served), PATHS, models))
            for path, model, events in zip(PATHS, models, streams, strict=True):
                told = blame(path, events)
                assert (said in told["message"], told["code"]) == (True, code), (path, name, told)
                check_numbers(path, events)
                text = f"{model}:q:0 {model}:q:1 "
                if name == "stops":
                    assert text_of(path, events) == text, path
                elif name == "cut":
                    # The news of a death may overtake what it said last; half an event never comes.
                    assert text.startswith(text_of(path, events)), path


async def test_errors_before_a_handler_are_in_the_envelope_of_their_path(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a")
    keys = '[server]\napi_keys = ["k"]\n'
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, config=keys) as served:
        for path in [*PATHS, COUNT]:
            answers = {
                401: await served.request("POST", path, {}),
                404: await ask(served, path, "nobody", x_api_key="k"),
                400: await served.request("POST", path, data=b"{", Authorization="Bearer k"),
                403: await served.request("POST", path, {}, x_api_key="k", Host="evil.example"),
            }
            if path != RESPONSES:  # which takes GET too, for a WebSocket
                answers[405] = await served.request("GET", path, x_api_key="k")
            answers[413] = await served.request("POST", path, data=b" " * (2**26 + 1), x_api_key="k")
            for status, answer in answers.items():
                assert answer.status == status, (path, status)
                is_anthropic = path in (MESSAGES, COUNT)
                assert (answer.body.get("type") == "error") == is_anthropic, (path, status)
                assert ("param" in answer.body["error"]) != is_anthropic, (path, status)
                request_id = answer.headers["x-request-id"]
                assert answer.headers.get("request-id") == (request_id if is_anthropic else None)
                assert answer.body.get("request_id") == (request_id if is_anthropic else None)
        unknown = await served.request("POST", "/v1/messages/batches", {}, x_api_key="k")
        assert (unknown.status, unknown.body["error"]["type"]) == (404, "not_found_error")


async def test_a_request_keeps_its_id_in_every_protocol(tmp_path: Path):
    folder = make_scripted_model(tmp_path / "m", "a")
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        for path in PATHS:
            answer = await ask(served, path, "a", X_Request_Id=f"mine{path.replace('/', '.')}")
            assert answer.status == 200, answer.body
            assert answer.headers["x-request-id"] == f"mine{path.replace('/', '.')}"
        heard = [event["request_id"] for event in read_events(folder) if event["event"] == "request"]
        assert heard == [f"mine{path.replace('/', '.')}" for path in PATHS]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
async def test_a_client_that_leaves_takes_its_row_along_in_every_protocol(tmp_path: Path, path: str):
    folder = make_scripted_model(tmp_path / "m", "a", tokens=100_000, tokens_per_s=50)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        body = {"model": "a", **BODIES[path], "stream": True, "max_tokens": 100_000}
        async with served.client.post(served.url + path, json=body) as answer:
            await answer.content.readuntil(b"a:q:1")
            answer.close()
        await until(lambda: read_events(folder)[-1]["event"] == "cancelled")
        assert "Traceback" not in served.log()


async def test_probes_of_clients_are_answered(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a")
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        for path in ("/", "/health", "/v1/models", "/v1/models/a"):
            for method in ("HEAD", "GET"):
                async with served.client.request(method, served.url + path) as answer:
                    assert answer.status == 200, (method, path)
                    assert answer.headers["x-request-id"]


async def test_both_vendors_clients_list_the_models(tmp_path: Path):
    for name in ("a", "b"):
        make_scripted_model(tmp_path / "m", name, context=512)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        strict = {"api_key": "none", "_strict_response_validation": True, "max_retries": 0}
        ours = openai.AsyncOpenAI(base_url=f"{served.url}/v1", **strict)
        theirs = anthropic.AsyncAnthropic(base_url=served.url, **strict)
        assert [model.id async for model in ours.models.list()] == ["a", "b"]
        assert [model.id async for model in theirs.models.list()] == ["a", "b"]
        model = await theirs.models.retrieve("a")
        assert (model.type, model.display_name, model.max_input_tokens) == ("model", "a", 512)
        assert model.capabilities is not None
        assert (model.capabilities.structured_outputs.supported, model.capabilities.thinking.supported) == (
            True,
            False,
        )
        assert int(model.created_at.timestamp()) == (await ours.models.retrieve("a")).created
        with pytest.raises(anthropic.NotFoundError) as missing:
            await theirs.models.retrieve("nobody")
        assert missing.value.body["error"]["type"] == "not_found_error"
        page = (await served.request("GET", "/v1/models")).body
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", False)
        own = page["data"][0]["capabilities"]
        assert {name: own[name] for name in ("chat", "completions", "messages", "responses", "batch")} == {
            "chat": True, "completions": True, "messages": True, "responses": True, "batch": True,
        }  # fmt: skip
