"""/v1/responses as a WebSocket: events as frames, one response at a time, and what ends one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from mlxpool.parent.edge import responses_socket
from mlxpool.parent.edge.responses_socket import Held
from mlxpool.parent.history.records import Record
from tests.tools.responses_client import TERMINAL, fetch, respond, said, text_of
from tests.tools.scripted_script import expected_text, make_scripted_model
from tests.tools.served import Served, serve, until


def models(tmp: Path, **script: Any) -> Path:
    make_scripted_model(tmp / "m", "a", **{"tokens": 3, **script})
    return tmp / "m"


class Talk:
    """One connection."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def create(self, given: Any = "hello", **fields: Any) -> None:
        await self.socket.send_json({"type": "response.create", "model": "a", "input": given, **fields})

    async def hear(self) -> dict[str, Any]:
        told = await self.socket.receive(timeout=10)
        assert told.type is aiohttp.WSMsgType.TEXT, told
        return dict(json.loads(told.data))

    async def response(self) -> dict[str, Any]:
        """The next response: its events are numbered from 0 to its end."""
        number = 0
        while True:
            event = await self.hear()
            assert event.get("sequence_number") == number, event
            if event["type"] in TERMINAL:
                return dict(event["response"])
            number += 1

    async def error(self) -> tuple[int, str, str | None]:
        told = await self.hear()
        assert told["type"] == "error", told
        assert told["error"]["message"]
        return told["status"], told["error"]["code"], told["error"]["param"]


@contextlib.asynccontextmanager
async def talk(served: Served, **headers: str) -> AsyncIterator[Talk]:
    async with served.client.ws_connect(f"{served.url}/v1/responses", headers=headers) as socket:
        yield Talk(socket)


async def test_turns_follow_each_other_on_one_connection_stored_or_not(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served, talk(served) as client:
        await client.create("one")
        one = await client.response()
        assert (one["status"], text_of(one)) == ("completed", expected_text("a", "one", 3))
        assert (await fetch(served, one["id"])).body == one
        await client.create("two", previous_response_id=one["id"], store=False)
        two = await client.response()
        assert (two["previous_response_id"], two["store"]) == (one["id"], False)
        await client.create("three", previous_response_id=two["id"])
        three = await client.response()
        assert [text for role, text in await said(served, three["id"]) if role == "user"] == [
            "one",
            "two",
            "three",
        ]
        # Another client can't go on from what was not stored, and neither can this one once it is older.
        async with talk(served) as other:
            await other.create("x", previous_response_id=two["id"])
            assert await other.error() == (404, "response_not_found", "previous_response_id")
        await client.create("x", previous_response_id=two["id"])
        assert await client.error() == (404, "response_not_found", "previous_response_id")
        await client.create("after an error", store=False)
        assert (await client.response())["status"] == "completed"


async def test_a_second_response_while_one_runs_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    folder = models(tmp_path, tokens=50, tokens_per_s=200)
    async with serve(tmp_path, models=folder, scripted=True) as served, talk(served) as client:
        await client.create("one")
        assert (await client.hear())["type"] == "response.created"
        await client.create("two")
        number = 1
        while (event := await client.hear())["type"] not in TERMINAL:
            if event["type"] == "error":
                assert "under way" in event["error"]["message"]
                continue
            assert event["sequence_number"] == number
            number += 1
        assert text_of(event["response"]) == expected_text("a", "one", 50)


CREATE = '{"type": "response.create", "model": "a", "input": "x", '
BAD = [
    ("{", "invalid_request", None),
    ("[]", "invalid_request", None),
    ('"response.create"', "invalid_request", None),
    ('{"type": 5}', "invalid_request", "type"),
    ('{"type": "response.cancel"}', "invalid_request", "type"),
    ('{"type": "response.create", "model": 5}', "invalid_request", "model"),
    (CREATE + '"background": true}', "invalid_request", "background"),
    (CREATE + '"generate": "no"}', "invalid_request", "generate"),
    (CREATE + '"colour": 1}', "unsupported_parameter", "colour"),
    (CREATE + '"store": "\\ud800"}', "invalid_request", None),
    (CREATE + '"stream": "yes"}', "invalid_request", "stream"),
    ('{"type": "\\ud800"}', "invalid_request", None),
    ('{"a":' * 200_000, "invalid_request", None),
]


async def test_bad_messages_are_answered_by_errors_and_the_connection_stays(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served, talk(served) as client:
        for text, code, param in BAD:
            await client.socket.send_str(text)
            assert await client.error() == (400, code, param), text[:80]
        await client.socket.send_bytes(b"{}")
        assert (await client.error())[0] == 400
        await client.create(model="nobody")
        assert await client.error() == (404, "model_not_found", "model")
        await client.create()
        assert (await client.response())["status"] == "completed"
        assert "Traceback" not in served.log()


async def test_generate_false_makes_a_beginning_to_go_on_from(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served, talk(served) as client:
        await client.create("rules", generate=False, instructions="Be brief.", store=False)
        warm = await client.response()
        assert (warm["status"], warm["output"]) == ("completed", [])
        await client.create("go", previous_response_id=warm["id"])
        told = await client.response()
        assert (text_of(told), told["instructions"]) == (expected_text("a", "go", 3), "Be brief.")
        assert await said(served, told["id"]) == [("user", "rules"), ("user", "go")]


async def test_the_next_turn_may_be_sent_the_moment_that_the_last_one_ended(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served, talk(served) as client:
        before: dict[str, Any] = {}
        for turn in range(10):
            more = {"previous_response_id": before["id"]} if turn % 2 else {}
            await client.create(f"turn {turn}", generate=turn % 3 > 0, **more)
            before = await client.response()
            assert before["status"] == "completed"
            await client.create(model="nobody")
            assert (await client.error())[0] == 404


async def test_what_was_deleted_is_gone_for_the_connection_that_said_it(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served, talk(served) as client:
        await client.create("one")
        one = await client.response()
        assert (await served.request("DELETE", f"/v1/responses/{one['id']}")).status == 200
        await client.create("two", previous_response_id=one["id"])
        assert await client.error() == (404, "response_not_found", "previous_response_id")


async def test_what_was_not_stored_is_too_old_as_soon_as_what_was(tmp_path: Path) -> None:
    config = '[history]\nmax_age = "1s"\n'
    async with (
        serve(tmp_path, models=models(tmp_path), scripted=True, config=config) as served,
        talk(served) as client,
    ):
        await client.create("one", store=False)
        one = await client.response()
        later = await respond(served)

        async def too_old() -> bool:
            return (await fetch(served, later["id"])).status == 404

        await until(too_old)
        await client.create("two", previous_response_id=one["id"])
        assert await client.error() == (404, "response_not_found", "previous_response_id")


async def test_without_a_history_the_connection_goes_on_from_what_it_said_last(tmp_path: Path) -> None:
    config = "[history]\nmax_age = 0\n"
    async with (
        serve(tmp_path, models=models(tmp_path), scripted=True, config=config) as served,
        talk(served) as client,
    ):
        await client.create("one")
        one = await client.response()
        named = [{"type": "item_reference", "id": one["output"][0]["id"]}, {"role": "user", "content": "two"}]
        await client.create(named, previous_response_id=one["id"])
        assert text_of(await client.response()) == expected_text("a", "two", 3)


async def test_a_refusal_counts_the_clients_own_items_whatever_is_generated(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served, talk(served) as client:
        await client.create("one")
        one = await client.response()
        for generate in (True, False):
            given = [{"role": "user", "content": "x"}, {"type": "wish"}]
            await client.create(given, previous_response_id=one["id"], generate=generate)
            told = await client.hear()
            assert told["status"] == 400
            assert "input[1]" in told["error"]["message"]


async def test_a_refusal_says_when_to_come_back(tmp_path: Path) -> None:
    folder = models(tmp_path, load_s=30.0)
    async with (
        serve(tmp_path, models=folder, scripted=True, settings={"pool.queue_limit": "1"}) as served,
        talk(served) as client,
        talk(served) as other,
    ):
        await client.create("waits")
        await until(lambda: _waits(served))
        await other.create("one too many")
        told = await other.hear()
        assert (told["status"], told["error"]["code"]) == (429, "queue_full")
        assert int(told["headers"]["retry-after"]) >= 1


async def _waits(served: Served) -> bool:
    return await served.state("a") == "loading"


def test_connections_hold_their_last_records_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(name: str) -> Record:
        return Record(name, 0.0, "completed", "a", False, None, b"[]" + b" " * 600, b"{}", (b"x" * 10_000,))

    monkeypatch.setattr(responses_socket, "HELD_BYTES", 2000)
    held = Held()
    for name in ("one", "two", "three"):
        held.hold(name, record(name))
    assert held.of("one") is None
    assert [held.of(name) for name in ("two", "three")] == [
        msgspec.structs.replace(record(name), events=None) for name in ("two", "three")
    ]
    held.hold("two", record("more"))
    held.drop("three")
    held.hold("one", record("one"))
    assert [bool(held.of(name)) for name in ("one", "two", "three")] == [True, True, False]


async def test_a_connection_too_many_is_refused(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(responses_socket.CONNECTIONS_LIMIT):
                await stack.enter_async_context(talk(served))
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await served.client.ws_connect(f"{served.url}/v1/responses")
            assert refused.value.status == 429
        async with talk(served) as client:
            await client.create()
            assert (await client.response())["status"] == "completed"


async def test_a_worker_that_dies_ends_the_response_and_not_the_connection(tmp_path: Path) -> None:
    folder = models(tmp_path, tokens=8, half_event_then_crash=True, fault_on="die", faulty_runs=1)
    async with serve(tmp_path, models=folder, scripted=True) as served, talk(served) as client:
        await client.create("die")
        failed = await client.response()
        assert (failed["status"], failed["error"]["type"]) == ("failed", "worker_crashed")
        await client.create("next", previous_response_id=failed["id"])
        assert (await client.response())["status"] == "completed"


@pytest.mark.parametrize("politely", [True, False])
async def test_a_client_that_leaves_cancels_what_runs(tmp_path: Path, politely: bool) -> None:
    folder = models(tmp_path, tokens=10_000, tokens_per_s=100)
    async with serve(tmp_path, models=folder, scripted=True) as served:
        async with talk(served) as client:
            await client.create("long")
            response_id = (await client.hear())["response"]["id"]
            while (await client.hear())["type"] != "response.output_text.delta":
                pass
            if politely:
                await client.socket.close()
            else:
                client.socket._response.connection.transport.abort()

        async def cancelled() -> bool:
            answer = await fetch(served, response_id)
            return answer.status == 200 and answer.body["status"] == "cancelled"

        await until(cancelled)
        assert text_of((await fetch(served, response_id)).body).startswith("a:long:0 ")
        assert (await served.worker("a") or {})["active"] == 0


async def test_a_server_that_stops_says_so_by_its_close(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served, talk(served) as client:
        await client.create()
        await client.response()
        served.process.send_signal(signal.SIGTERM)
        told = await client.socket.receive(timeout=10)
        assert (told.type, told.data) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.GOING_AWAY)
        assert await asyncio.to_thread(served.process.wait, 10) == 0


async def test_the_guard_stands_before_the_upgrade(tmp_path: Path) -> None:
    config = '[server]\napi_keys = ["key"]\n'
    async with serve(tmp_path, models=models(tmp_path), scripted=True, config=config) as served:
        for headers, status in (({}, 401), ({"Authorization": "Bearer key", "Origin": "http://evil"}, 403)):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await served.client.ws_connect(f"{served.url}/v1/responses", headers=headers)
            assert refused.value.status == status
        async with talk(served, Authorization="Bearer key") as client:
            await client.create()
            assert (await client.response())["status"] == "completed"


async def test_a_socket_and_a_post_tell_the_same(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served, talk(served) as client:
        posted = await respond(served, "a", "same")
        await client.create("same")
        told = await client.response()
        differs = {"id", "created_at", "completed_at", "output"}
        assert {k: v for k, v in told.items() if k not in differs} == {
            k: v for k, v in posted.items() if k not in differs
        }
        assert text_of(told) == text_of(posted)
