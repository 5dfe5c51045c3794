"""Responses that are kept: gone on from, fetched, replayed, deleted; whatever their end, over restarts."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.tools.responses_client import events, fetch, final, post, respond, said, stream, text_of
from tests.tools.scripted_script import expected_text, make_scripted_model
from tests.tools.served import serve, until

QUICK = ["--open-after", "0.2", "--keep-alive", "0.1"]


def models(tmp: Path, name: str = "a", **script: Any) -> Path:
    make_scripted_model(tmp / "m", name, **{"tokens": 3, **script})
    return tmp / "m"


def code(answer: Any) -> tuple[int, str, str | None]:
    error = answer.body["error"]
    return answer.status, error["code"], error["param"]


async def test_a_conversation_goes_on_over_a_restart_and_knows_its_beginning(tmp_path: Path) -> None:
    folder = models(tmp_path)
    async with serve(tmp_path, models=folder, scripted=True) as served:
        one = await respond(served, given="first", instructions="Be brief.")
        two = final(await stream(served, given="second", previous_response_id=one["id"]))
        assert two["previous_response_id"] == one["id"]
        assert two["instructions"] == "Be brief."
    async with serve(tmp_path, models=folder, scripted=True) as served:
        three = await respond(
            served, given="third", previous_response_id=two["id"], instructions="Be long.", store=True
        )
        assert (three["instructions"], three["previous_response_id"]) == ("Be long.", two["id"])
        assert await said(served, three["id"]) == [
            ("user", "first"),
            ("assistant", expected_text("a", "first", 3)),
            ("user", "second"),
            ("assistant", expected_text("a", "second", 3)),
            ("user", "third"),
        ]
        assert (await fetch(served, one["id"])).body == one
        assert (await fetch(served, three["id"])).body == three


async def test_a_killed_server_keeps_what_it_had_written(tmp_path: Path) -> None:
    folder = models(tmp_path)
    async with serve(tmp_path, models=folder, scripted=True) as served:
        one = await respond(served, given="first")

        async def stored() -> bool:
            return bool((await served.request("GET", "/api/history")).body["entries"] == 1)

        await until(stored)
        await served.down(signal.SIGKILL)
    async with serve(tmp_path, models=folder, scripted=True) as served:
        assert (await fetch(served, one["id"])).body == one
        assert (await served.request("GET", "/api/history")).body["entries"] == 1


async def test_a_stream_is_replayed_as_it_was_sent_from_any_number(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        sent = await stream(served)
        told = events(sent)
        response_id = told[-1]["response"]["id"]
        assert (await fetch(served, response_id, "?stream=true")).body == sent
        for after in (0, 3, len(told) - 2):
            tail = (await fetch(served, response_id, f"?stream=true&starting_after={after}")).body
            assert sent.endswith(tail)
            assert events(tail, after + 1) == told[after + 1 :]
        beyond = await fetch(served, response_id, f"?stream=true&starting_after={len(told) - 1}")
        assert (beyond.status, beyond.body) == (200, b"")


async def test_a_response_that_was_not_streamed_is_replayed_from_its_object(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        one = await respond(served)
        replayed = (await fetch(served, one["id"], "?stream=true")).body
        assert final(replayed) == one
        deltas = [e["delta"] for e in events(replayed) if e["type"] == "response.output_text.delta"]
        assert "".join(deltas) == text_of(one)


async def test_deleted_and_unstored_and_unknown_responses_are_not_found(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        one = await respond(served)
        path = f"/v1/responses/{one['id']}"
        gone = await served.request("DELETE", path)
        assert (gone.status, gone.body) == (200, {"id": one["id"], "object": "response", "deleted": True})
        unstored = await respond(served, store=False)
        assert unstored["store"] is False
        for response_id in (one["id"], unstored["id"], "resp_x", "compact"):
            for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
                answer = await served.request(method, f"/v1/responses/{response_id}{end}")
                assert code(answer)[:2] == (404, "response_not_found"), (method, end)
            answer = await post(served, previous_response_id=response_id)
            assert code(answer) == (404, "response_not_found", "previous_response_id")
            assert response_id in answer.body["error"]["message"]


async def test_an_incomplete_response_can_be_gone_on_from(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path, tokens=8), scripted=True) as served:
        cut = final(await stream(served, given="one", max_output_tokens=2))
        assert (cut["status"], cut["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        two = await respond(served, given="two", previous_response_id=cut["id"])
        assert await said(served, two["id"]) == [
            ("user", "one"),
            ("assistant", expected_text("a", "one", 2)),
            ("user", "two"),
        ]


async def test_a_worker_that_dies_in_a_stream_leaves_a_failed_response_to_go_on_from(tmp_path: Path) -> None:
    folder = models(tmp_path, tokens=8, half_event_then_crash=True, faulty_runs=1, fault_on="die")
    async with serve(tmp_path, models=folder, scripted=True) as served:
        sent = await stream(served, given="die")
        failed = final(sent)
        assert failed["status"] == "failed"
        assert (failed["error"]["code"], failed["error"]["type"]) == ("server_error", "worker_crashed")
        # The news of a death may overtake what it said last.
        heard = text_of(failed)
        assert expected_text("a", "die", 3).startswith(heard)
        assert [item["status"] for item in failed["output"]] == ["incomplete"] * bool(heard)
        assert (await fetch(served, failed["id"])).body == failed
        assert (await fetch(served, failed["id"], "?stream=true")).body == sent
        two = await respond(served, given="two", previous_response_id=failed["id"])
        assert (await said(served, two["id"]))[1:-1] == [("assistant", heard)] * bool(heard)


async def test_a_client_that_leaves_in_mid_stream_leaves_what_it_heard(tmp_path: Path) -> None:
    folder = models(tmp_path, tokens=1000, tokens_per_s=200)
    async with serve(tmp_path, models=folder, scripted=True) as served:
        body = {"model": "a", "input": "long", "stream": True}
        heard = b""
        async with served.client.post(f"{served.url}/v1/responses", json=body) as answer:
            while heard.count(b"output_text.delta\n") < 3:
                heard += await answer.content.readany()
        response_id = json.loads(heard.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]

        async def kept() -> bool:
            return (await fetch(served, response_id)).status == 200

        await until(kept)
        left = (await fetch(served, response_id)).body
        assert left["status"] == "cancelled"
        assert text_of(left).startswith(expected_text("a", "long", 3))
        replayed = (await fetch(served, response_id, "?stream=true")).body
        assert final(replayed) == left
        assert replayed.startswith(heard[: heard.rindex(b"\n\n") + 2])
        assert (await served.worker("a") or {})["active"] == 0
        two = await respond(served, given="two", max_output_tokens=1, previous_response_id=response_id)
        assert (await said(served, two["id"]))[1] == ("assistant", text_of(left))


async def test_a_stream_that_the_parent_opened_is_kept_with_strict_numbers(tmp_path: Path) -> None:
    folder = models(tmp_path, load_s=0.7)
    async with serve(tmp_path, models=folder, scripted=True, flags=QUICK) as served:
        one = await respond(served, "a", "wait")
        await served.request("POST", "/api/models/a/unload", {"force": True})
        await served.until_state("a", "absent")
        sent = await stream(served, given="again", previous_response_id=one["id"], metadata={"k": "v"})
        told = events(sent)
        assert [e["type"] for e in told[:3]] == ["response.created", *["response.in_progress"] * 2]
        assert {e["response"]["id"] for e in told if "response" in e} == {told[-1]["response"]["id"]}
        assert told[0]["response"]["previous_response_id"] == one["id"]
        assert told[0]["response"]["metadata"] == {"k": "v"}
        assert (await fetch(served, told[-1]["response"]["id"], "?stream=true")).body == sent


async def test_a_refusal_of_a_worker_counts_the_clients_own_items(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        one = await respond(served)
        items = [{"role": "user", "content": "x"}, {"type": "wish"}]
        for fields in ({}, {"stream": True}, {"background": True}):
            alone = await post(served, given=items, **fields)
            after = await post(served, given=items, previous_response_id=one["id"], **fields)
            assert code(alone)[0] == 400
            assert "input[1]" in alone.body["error"]["message"]
            assert after.body == alone.body


async def test_an_item_may_be_named_by_its_id(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        one = await respond(served, given="one")
        named = [
            {"role": "user", "content": "x"},
            {"type": "item_reference", "id": one["output"][0]["id"]},
            {"role": "user", "content": "y"},
        ]
        two = await respond(served, given=named)
        assert await said(served, two["id"]) == [("user", "x"), ("assistant", text_of(one)), ("user", "y")]
        named[1]["id"] = "msg_none"
        assert code(await post(served, given=named)) == (400, "invalid_request", "input[1].id")
        named[1]["id"] = 5
        assert code(await post(served, given=named)) == (400, "invalid_request", "input[1].id")


async def test_references_that_are_too_much_are_refused(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path, tokens=20_000), scripted=True) as served:
        one = await respond(served)
        item_id = one["output"][0]["id"]
        given = [{"type": "item_reference", "id": item_id}] * 1000
        assert code(await post(served, given=given, store=False)) == (413, "body_too_large", "input")
        many = await post(served, given=given * 2, store=False)
        assert code(many) == (400, "invalid_request", "input")


async def test_a_call_that_was_cut_can_not_be_named(tmp_path: Path) -> None:
    folder = models(tmp_path)
    async with serve(tmp_path, models=folder, scripted=True) as served:
        one = await respond(served)
    connection = sqlite3.connect(tmp_path / "home" / "state.sqlite")
    call = {"id": "fc_1", "type": "function_call", "status": "incomplete", "arguments": '{"a'}
    response = zlib.compress(json.dumps({**one, "output": [call]}).encode())
    connection.execute("UPDATE responses SET response = ?", (response,))
    connection.execute("UPDATE items SET item = 'fc_1'")
    connection.commit()
    connection.close()
    async with serve(tmp_path, models=folder, scripted=True) as served:
        given = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "fc_1"}]
        answer = await post(served, given=given)
        assert code(answer) == (400, "invalid_request", "input[1].id")
        assert "cut" in answer.body["error"]["message"]


WRONG = [
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"previous_response_id": []}, "previous_response_id"),
    ({"store": "yes"}, "store"),
    ({"background": 1}, "background"),
    ({"background": True, "store": False}, "background"),
    ({"stream": "yes"}, "stream"),
    ({"conversation": "c"}, "conversation"),
    ({"input": 5}, "input"),
]


async def test_wrong_fields_are_refused_by_name(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        one = await respond(served)
        for fields, param in WRONG:
            answer = await served.request("POST", "/v1/responses", {"model": "a", "input": "x", **fields})
            assert (answer.status, answer.body["error"]["param"]) == (400, param), fields
            assert param in answer.body["error"]["message"]
        answer = await served.request(
            "POST", "/v1/responses", {"model": "a", "input": 5, "previous_response_id": one["id"]}
        )
        assert code(answer) == (400, "invalid_request", "input")
        for data in (
            b"",
            b"[",
            b"[]",
            b"5",
            b"\xff",
            b"[" * 500_000,
            b'{"a":' * 500_000,
            b'{"store":"\\ud800"}',
        ):
            answer = await served.request("POST", "/v1/responses", data=data)
            assert code(answer)[:2] == (400, "invalid_request"), data[:10]
            answer = await served.request("POST", "/v1/responses/compact", data=data)
            assert code(answer)[:2] == (400, "invalid_request"), data[:10]
        assert (await post(served, "nobody")).body["error"]["code"] == "model_not_found"
        assert (await post(served, "nobody", background=True)).body["error"]["code"] == "model_not_found"


QUERIES = [
    ("?stream=maybe", "stream"),
    ("?starting_after=1", "starting_after"),
    ("?stream=true&starting_after=5000", "starting_after"),
    ("?stream=true&stream=false", "stream"),
    ("?stream=true&starting_after=-1", "starting_after"),
    (f"?stream=true&starting_after={'9' * 5000}", "starting_after"),
    ("?stream=true&starting_after=٣", "starting_after"),
    ("?colour=1", "colour"),
    ("/input_items?limit=0", "limit"),
    ("/input_items?limit=101", "limit"),
    ("/input_items?limit=x", "limit"),
    ("/input_items?order=up", "order"),
    ("/input_items?after=nothing", "after"),
    ("/input_items?page=2", "page"),
]


async def test_wrong_queries_are_refused_by_name(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        one = await respond(served)
        for query, param in QUERIES:
            answer = await fetch(served, one["id"], query)
            assert (answer.status, answer.body["error"]["param"]) == (400, param), query
        assert (await fetch(served, one["id"], "?include[]=reasoning.encrypted_content")).body == one
        assert (
            await fetch(served, one["id"], "?include=message.output_text.logprobs&stream=false")
        ).body == one


async def test_input_items_come_in_pages_either_way(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        given = [{"role": "user", "content": f"m{n}"} for n in range(25)]
        one = await respond(served, given=given)
        path = "/input_items"
        first = (await fetch(served, one["id"], path)).body
        assert [text_of({"output": [item]}) for item in first["data"]] == [f"m{n}" for n in range(24, 4, -1)]
        assert (first["object"], first["has_more"]) == ("list", True)
        assert (first["first_id"], first["last_id"]) == (first["data"][0]["id"], first["data"][-1]["id"])
        rest = (await fetch(served, one["id"], f"{path}?after={first['last_id']}&limit=5")).body
        assert [text_of({"output": [item]}) for item in rest["data"]] == ["m4", "m3", "m2", "m1", "m0"]
        assert rest["has_more"] is False
        forward = (await fetch(served, one["id"], f"{path}?order=asc&limit=3")).body
        assert [item["id"] for item in forward["data"]] == [item["id"] for item in rest["data"]][:1:-1]


async def test_limits_are_told_and_kept(tmp_path: Path) -> None:
    config = '[history]\nmax_bytes = 4000\nmax_age = "1h"\n'
    async with serve(tmp_path, models=models(tmp_path), scripted=True, config=config) as served:
        too_long = await post(served, given="x" * 5000)
        assert code(too_long) == (413, "body_too_large", "input")
        assert "history.max_bytes" in too_long.body["error"]["message"]
        assert (await respond(served, given="x" * 5000, store=False))["status"] == "completed"
        ids = [(await respond(served, given=f"turn {n}"))["id"] for n in range(9)]

        async def trimmed() -> bool:
            figures = (await served.request("GET", "/api/history")).body
            assert figures["max_age_s"] == 3600
            return 0 < figures["bytes"] <= 4000 and (await fetch(served, ids[0])).status == 404

        await until(trimmed)
        assert (await fetch(served, ids[-1])).status == 200
        metrics = (await served.request("GET", "/metrics")).body.decode()
        assert "mlxpool_history_limit_bytes 4000.0" in metrics


async def test_history_that_is_off_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    async with serve(
        tmp_path, models=models(tmp_path), scripted=True, config="[history]\nmax_bytes = 0\n"
    ) as served:
        one = await respond(served)
        assert one["store"] is False
        assert (await fetch(served, one["id"])).status == 404
        assert code(await post(served, background=True)) == (400, "invalid_request", "background")


async def test_a_conversation_longer_than_a_body_may_be_is_refused_with_a_way_out(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        one = await respond(served, given="x" * 33_000_000)
        answer = await post(served, given="y" * 35_000_000, previous_response_id=one["id"])
        assert code(answer) == (413, "body_too_large", "previous_response_id")
        assert "64 MiB" in answer.body["error"]["message"]
        assert "/v1/responses/compact" in answer.body["error"]["message"]


async def test_a_damaged_row_is_not_found_and_costs_no_other(tmp_path: Path) -> None:
    folder = models(tmp_path)
    async with serve(tmp_path, models=folder, scripted=True) as served:
        bad, good = await respond(served), await respond(served)
    connection = sqlite3.connect(tmp_path / "home" / "state.sqlite")
    connection.execute("UPDATE responses SET input = x'00' WHERE id = ?", (bad["id"],))
    connection.commit()
    connection.close()
    async with serve(tmp_path, models=folder, scripted=True) as served:
        answer = await post(served, previous_response_id=bad["id"])
        assert code(answer) == (404, "response_not_found", "previous_response_id")
        assert "damaged" in answer.body["error"]["message"]
        assert (await fetch(served, bad["id"])).status == 404
        assert (await respond(served, previous_response_id=good["id"]))["status"] == "completed"
        assert (await served.request("DELETE", f"/v1/responses/{bad['id']}")).status == 200


async def test_a_file_that_is_no_database_is_moved_aside_and_serving_goes_on(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "state.sqlite").write_bytes(b"not a database " * 1000)
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        one = await respond(served)
        assert (await fetch(served, one["id"])).body == one
        aside = await asyncio.to_thread(lambda: list((tmp_path / "home").glob("state.sqlite.unusable-*")))
        assert aside[0].read_bytes() == b"not a database " * 1000
        assert str(aside[0]) in served.log()


async def test_a_locked_file_costs_the_record_not_the_answer(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        before = await respond(served)

        async def stored() -> bool:
            return bool((await served.request("GET", "/api/history")).body["entries"] == 1)

        await until(stored)
        other = sqlite3.connect(tmp_path / "home" / "state.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        one = await respond(served, previous_response_id=before["id"])
        assert one["status"] == "completed"

        async def counted() -> bool:
            return bool((await served.request("GET", "/api/history")).body["unstored"] == 1)

        await until(counted)
        other.execute("ROLLBACK")
        other.close()
        assert (await fetch(served, one["id"])).status == 404
        assert (await respond(served, previous_response_id=before["id"]))["status"] == "completed"


async def test_the_official_client_reads_what_is_kept(tmp_path: Path) -> None:
    import openai

    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        client = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", _strict_response_validation=True
        )
        one = await client.responses.create(model="a", input="hi")
        assert (await client.responses.retrieve(one.id)).output_text == one.output_text
        items = await client.responses.input_items.list(one.id)
        assert [item.type for item in items.data] == ["message"]
        run = await client.responses.create(model="a", input="hi", background=True)
        while run.status in ("queued", "in_progress"):
            run = await client.responses.retrieve(run.id)
        assert run.status == "completed"
        assert (await client.responses.cancel(run.id)).status == "completed"
        async with await client.responses.retrieve(one.id, stream=True) as replayed:
            kinds = [event.type async for event in replayed]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        await client.responses.delete(one.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(one.id)
        await client.close()


async def test_a_plain_get_is_told_that_it_is_a_websocket(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        answer = await served.request("GET", "/v1/responses")
        assert code(answer)[:2] == (400, "invalid_request")
        assert "websocket" in answer.body["error"]["message"].lower()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await served.client.ws_connect(f"{served.url}/v1/responses", headers={"Origin": "http://evil"})
        assert refused.value.status == 403
