"""A scripted worker's answers from its script's events: the product's writers, with the worker's faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.errors import error
from mlxpool.worker.text.events import (
    Event,
    Failure,
    Finish,
    Logprobs,
    Prefilled,
    Reasoning,
    Text,
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from mlxpool.worker.wire.endpoints import ENDPOINTS
from tests.tools import sse
from tests.tools.scripted_events import events_of, told
from tests.tools.scripted_script import expected_text, make_scripted_model
from tests.tools.spawned import Spawned

EVENTS: list[Event] = [
    Prefilled(7, 3),
    Reasoning("hm"),
    Text("Hello"),
    Text(" you"),
    ToolCallStart(0, "call_1", "look"),
    ToolCallArguments(0, '{"at":'),
    ToolCallArguments(0, '"é"}'),
    ToolCallEnd(0),
    Usage(7, 9, 3),
    Finish("tool_calls"),
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi there"}]},
    "/v1/completions": {"prompt": "hi there"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 100},
    "/v1/responses": {"input": "hi there"},
}
PATHS = [endpoint.path for endpoint in ENDPOINTS]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., Spawned]]:
    spawned: list[Spawned] = []

    def make(**script: Any) -> Spawned:
        make_scripted_model(tmp_path, "m", **script)
        spawned.append(Spawned(tmp_path / "m", tmp_path / "s.sock"))
        return spawned[-1].ready()

    yield make
    for worker in spawned:
        worker.close()


def ask(worker: Spawned, path: str, **fields: Any) -> tuple[int, bytes]:
    body = json.dumps({"model": "m", **BODIES[path], **fields}).encode()
    status, _, answer = worker.ask("POST", path, body)
    return status, answer


def test_events_come_back_from_a_script_as_they_were_told() -> None:
    events = [
        *EVENTS,
        Logprobs(TokenLogprob("é", b"\xc3\xa9", -0.5), (TokenLogprob("?", b"\xc3", -1.0),)),
    ]
    assert events_of(json.loads(json.dumps(told(*events)))) == events
    failure = events_of(told(Failure(error("worker_crashed", "it died"))))[0]
    assert isinstance(failure, Failure)
    assert (failure.error.status, failure.error.message) == (502, "it died")


@pytest.mark.parametrize("bad", [{"type": "Txt"}, {"type": "Text"}, {"text": "a"}, {"type": "Failure"}])
def test_what_is_no_event_is_named(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"events\[1\]"):
        events_of([*told(Text("a")), bad])


def test_a_chat_is_written_from_the_scripts_events(spawn: Callable[..., Spawned]) -> None:
    worker = spawn(events=told(*EVENTS))
    status, body = ask(worker, "/v1/chat/completions")
    choice = json.loads(body)["choices"][0]
    assert (status, choice["finish_reason"]) == (200, "tool_calls")
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Hello you", "hm")
    assert choice["message"]["tool_calls"][0]["function"] == {"arguments": '{"at":"é"}', "name": "look"}
    assert json.loads(body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    streamed = sse.read_chat(ask(worker, "/v1/chat/completions", stream=True)[1])
    assert (streamed.text, streamed.finish) == ("Hello you", "tool_calls")
    assert streamed.usage == json.loads(body)["usage"]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_says_the_scripts_text_streamed_as_whole(spawn: Callable[..., Spawned], path: str) -> None:
    worker = spawn(tokens=4)
    expected = expected_text("m", "hi there", 4)
    status, whole = ask(worker, path)
    assert status == 200
    assert json.dumps(expected)[1:-1].encode() in whole
    status, stream = ask(worker, path, stream=True)
    assert status == 200
    events = [event for event in sse.read(stream, whole=False) if event.data != sse.DONE]
    pieces = "".join(event.data for event in events)
    assert all(f"m:hi there:{place} " in pieces for place in range(4))


@pytest.mark.parametrize("path", PATHS)
def test_every_path_refuses_in_its_own_envelope(spawn: Callable[..., Spawned], path: str) -> None:
    worker = spawn(tokens=4)
    status, _, body = worker.ask("POST", path, b"[]")
    assert status == 400
    assert ("type" in json.loads(body)) == (path == "/v1/messages")
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_can_be_cut_within_an_event(spawn: Callable[..., Spawned], path: str) -> None:
    worker = spawn(tokens=4, half_event_then_crash=True, fault_after_tokens=2, crash_signal="SIGKILL")
    body = json.dumps({"model": "m", **BODIES[path], "stream": True}).encode()
    with worker.send("POST", path, body) as client:
        got = b""
        while piece := client.recv(65536):
            got += piece
    assert b"m:hi there:1" in got
    assert not got.rstrip(b"\r\n").endswith(b"\n\n")
    assert b"m:hi there:3" not in got


def test_a_failure_among_the_events_is_an_error_or_ends_the_stream(spawn: Callable[..., Spawned]) -> None:
    worker = spawn(events=told(Text("a"), Failure(error("internal_error", "out of luck"))))
    status, body = ask(worker, "/v1/chat/completions")
    assert (status, json.loads(body)["error"]["message"]) == (500, "out of luck")
    stream = sse.read_chat(ask(worker, "/v1/chat/completions", stream=True)[1])
    assert stream.text == "a"
    assert stream.error is not None
    assert stream.error["message"] == "out of luck"
