"""An exchange with a worker whose stream goes wrong: what the client hears, and what is remembered of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from mlxpool.parent.edge import exchange as module
from mlxpool.parent.edge.exchange import Exchange, refusal
from mlxpool.parent.edge.preamble import ChatPreamble, CompletionPreamble, MessagesPreamble, Preamble
from mlxpool.parent.edge.responses_sinks import RecordedPreamble, Tee
from mlxpool.parent.history.recorder import Recorder
from mlxpool.parent.pool.effects import Grant
from mlxpool.parent.pool.upstream import UpstreamError
from mlxpool.shared.api import response_events
from mlxpool.shared.api.response_object import new_response
from mlxpool.shared.errors import ApiError, encode, error
from tests.tools import sse

STOPPED = "the worker of model 'm' stopped before the answer was complete"
CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
RESPONSE = new_response({}, id="resp_1", created=5, model="m")
PIECES: dict[str, list[bytes]] = {
    CHAT: [b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'],
    COMPLETIONS: [b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'],
    MESSAGES: [b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n'],
    RESPONSES: [
        response_events.event("response.created", 0, response=RESPONSE),
        response_events.event("response.in_progress", 1, response=RESPONSE),
    ],
}
ENDS: dict[str, bytes] = {
    CHAT: b"data: [DONE]\n\n",
    COMPLETIONS: b"data: [DONE]\n\n",
    MESSAGES: b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    RESPONSES: response_events.event("response.completed", 2, response={**RESPONSE, "status": "completed"}),
}


class Client:
    """Takes one answer."""

    def __init__(self) -> None:
        self.started = False
        self.heard = b""
        self.ended = 0
        self.abandoned = False

    async def start(self, headers: Mapping[str, str]) -> None:
        del headers
        self.started = True

    async def send(self, data: bytes) -> None:
        assert not self.ended
        self.heard += data

    async def end(self) -> None:
        self.ended += 1

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        raise AssertionError(f"{status}: {headers} {body!r}")

    def abandon(self) -> None:
        self.abandoned = True


class Answer:
    """A worker's stream of these pieces, which is over after them, well or by a lost connection."""

    status = 200
    headers = {"content-type": "text/event-stream"}  # noqa: RUF012  # nobody changes it

    def __init__(self, pieces: list[bytes], breaks: bool) -> None:
        self._pieces = list(pieces)
        self._breaks = breaks

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is held."""

    async def piece(self) -> bytes:
        await asyncio.sleep(0)
        if self._pieces:
            return self._pieces.pop(0)
        if self._breaks:
            raise UpstreamError("gone")
        return b""


def granted(pieces: list[bytes], breaks: bool = False) -> Grant:
    async def request(*_: object) -> Answer:
        return Answer(pieces, breaks)

    worker: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    worker.set_result(SimpleNamespace(upstream=SimpleNamespace(request=request)))
    return Grant(SimpleNamespace(model="m"), worker)  # type: ignore[arg-type]  # no pool is behind it


def preamble_of(path: str, recorder: Recorder) -> Preamble:
    made: dict[str, Preamble] = {
        CHAT: ChatPreamble("m"),
        COMPLETIONS: CompletionPreamble("m"),
        MESSAGES: MessagesPreamble("req_1"),
        RESPONSES: RecordedPreamble("m", {}, None, recorder, 0),
    }
    return made[path]


async def carried(
    path: str, grant: Grant, client: Client, recorder: Recorder | None = None
) -> tuple[Exchange, Preamble]:
    recorder = Recorder(lambda *_: None) if recorder is None else recorder
    preamble = preamble_of(path, recorder)
    sink = Tee(client, recorder, 0) if path == RESPONSES else client
    exchange = Exchange(b"{}", path, True, grant, "m", "req_1", sink, preamble)
    await exchange.run()
    return exchange, preamble


def blame(path: str, heard: bytes) -> str:
    """The message of the error that these events end with."""
    events = [event for event in sse.read(heard, whole=False) if event.data != sse.DONE]
    last = json.loads(events[-1].data)
    if path == RESPONSES:
        assert last["type"] == "response.failed"
        last = last["response"]
    return str(last["error"]["message"])


@pytest.mark.parametrize("path", ENDS)
async def test_a_stream_passes_byte_for_byte_and_ends_as_its_worker_ended_it(path: str) -> None:
    for breaks in (False, True):  # a connection that is lost behind the end takes nothing away
        client = Client()
        exchange, _ = await carried(path, granted([*PIECES[path], ENDS[path]], breaks), client)
        assert client.heard == b"".join(PIECES[path]) + ENDS[path]
        assert (exchange.times.outcome, client.ended) == ("ok", 1)


@pytest.mark.parametrize("path", ENDS)
@pytest.mark.parametrize("said", ["nothing", "some", "half an end"])
async def test_a_stream_that_just_stops_gets_its_protocols_error_event(path: str, said: str) -> None:
    pieces = {
        "nothing": [],
        "some": PIECES[path],
        "half an end": [*PIECES[path], ENDS[path][:-1]],
    }[said]
    client = Client()
    exchange, preamble = await carried(path, granted(pieces), client)
    assert blame(path, client.heard) == STOPPED
    assert preamble.is_end(client.heard)
    assert client.heard.startswith(b"".join(PIECES[path]) if pieces else b"")
    assert (exchange.times.outcome, client.ended, client.abandoned) == ("error", 1, False)


@pytest.mark.parametrize("more", [[], [response_events.event("error", 2, message="y")]])
async def test_a_response_that_just_stops_is_recorded_as_failed(more: list[bytes]) -> None:
    kept: list[dict[str, Any]] = []
    recorder = Recorder(lambda response, _: kept.append(json.loads(response)))
    client = Client()
    await carried(RESPONSES, granted([*PIECES[RESPONSES], *more]), client, recorder)
    (response,) = kept
    assert (response["id"], response["status"]) == ("resp_1", "failed")
    assert response["error"]["message"] == ("y" if more else STOPPED)
    told = json.loads(sse.read(client.heard, whole=False)[-1].data)
    assert (told["type"], told["sequence_number"], told["response"]) == ("response.failed", 2, response)


@pytest.mark.parametrize("path", ENDS)
async def test_nothing_follows_the_end_even_where_the_pool_gives_the_request_up_then(path: str) -> None:
    grant = granted([*PIECES[path], ENDS[path]])

    class Slow(Client):
        async def send(self, data: bytes) -> None:
            await super().send(data)
            if self.heard.endswith(ENDS[path]):
                assert grant.on_revoke is not None
                grant.revoked = error("worker_crashed", "it died")
                grant.on_revoke()
                await asyncio.get_running_loop().create_future()

    client = Slow()
    await carried(path, grant, client)
    assert client.heard == b"".join(PIECES[path]) + ENDS[path]
    assert client.ended == 1


async def test_a_client_hears_of_a_failure_however_long_its_recording_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LAST_WORDS_TIMEOUT_S", 0.02)
    real = Recorder.end

    async def slow(self: Recorder, status: str, err: ApiError | None = None) -> bytes:
        await asyncio.sleep(0.1)
        return await real(self, status, err)

    monkeypatch.setattr(Recorder, "end", slow)
    client = Client()
    await carried(RESPONSES, granted(PIECES[RESPONSES]), client)
    assert blame(RESPONSES, client.heard) == STOPPED
    assert (client.ended, client.abandoned) == (1, False)


async def test_a_client_that_takes_no_last_words_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_WORDS_TIMEOUT_S", 0.02)

    class Deaf(Client):
        async def end(self) -> None:
            await asyncio.get_running_loop().create_future()

    client = Deaf()
    await carried(CHAT, granted(PIECES[CHAT]), client)
    assert client.abandoned


@pytest.mark.parametrize(
    ("headers", "waits"), [({"retry-after": "7"}, 7.0), ({"Retry-After": "7"}, 7.0), ({}, None)]
)
def test_a_refusal_says_when_to_come_again(headers: dict[str, str], waits: float | None) -> None:
    told = refusal(429, encode(error("queue_full", "no room")), headers)
    assert (told.status, told.code, told.message, told.retry_after_s) == (429, "queue_full", "no room", waits)
