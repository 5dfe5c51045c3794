"""Responses that run without their clients: polled, listened to, cancelled, and ended by restarts."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from pathlib import Path
from typing import Any

from tests.tools.responses_client import events, fetch, final, post, respond, said, text_of
from tests.tools.scripted_script import expected_text, make_scripted_model
from tests.tools.served import Served, serve, until


def models(tmp: Path, name: str = "a", **script: Any) -> Path:
    make_scripted_model(tmp / "m", name, **{"tokens": 3, **script})
    return tmp / "m"


SLOW = {"tokens": 10_000, "tokens_per_s": 100}


async def ended(served: Served, response_id: str) -> dict[str, Any]:
    """The response, once it has ended."""
    told: dict[str, Any] = {}

    async def has_ended() -> bool:
        nonlocal told
        told = (await fetch(served, response_id)).body
        return told["status"] not in ("queued", "in_progress")

    await until(has_ended, 10.0)
    return told


async def speaking(served: Served, response_id: str) -> None:
    """Wait until it has said something."""

    async def has_begun() -> bool:
        return bool((await fetch(served, response_id)).body["status"] == "in_progress")

    await until(has_begun, 10.0)


async def test_a_background_response_is_queued_then_there_to_fetch(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path, load_s=0.3), scripted=True) as served:
        before = await respond(served, given="before", store=True)
        queued = await respond(
            served, given="go", background=True, previous_response_id=before["id"], metadata={"k": "v"}
        )
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        done = await ended(served, queued["id"])
        assert (done["status"], done["background"], done["metadata"]) == ("completed", True, {"k": "v"})
        assert done["previous_response_id"] == before["id"]
        assert text_of(done) == expected_text("a", "go", 3)
        assert final((await fetch(served, queued["id"], "?stream=true")).body) == done
        after = await respond(served, given="after", previous_response_id=queued["id"])
        assert (await said(served, after["id"]))[-2] == ("assistant", text_of(done))


async def test_a_listener_may_leave_and_come_back_where_it_was(tmp_path: Path) -> None:
    folder = models(tmp_path, tokens=60, tokens_per_s=100)
    async with serve(tmp_path, models=folder, scripted=True) as served:
        body = {"model": "a", "input": "go", "background": True, "stream": True}
        heard = b""
        async with served.client.post(f"{served.url}/v1/responses", json=body) as answer:
            while heard.count(b"output_text.delta\n") < 3:
                heard += await answer.content.readany()
        heard = heard[: heard.rindex(b"\n\n") + 2]
        told = [json.loads(block.split(b"data: ")[1]) for block in heard.split(b"\n\n")[:-1]]
        response_id = told[0]["response"]["id"]
        last = told[-1]["sequence_number"]
        whole, rest = await asyncio.gather(
            fetch(served, response_id, "?stream=true"),
            fetch(served, response_id, f"?stream=true&starting_after={last}"),
        )
        assert heard + rest.body == whole.body
        assert len([e for e in events(whole.body) if e["type"].endswith("text.delta")]) == 60
        assert (await fetch(served, response_id)).body == final(whole.body)
        assert (await fetch(served, response_id, "?stream=true")).body == whole.body


async def test_a_cancelled_run_ends_at_once_with_what_it_said(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path, **SLOW), scripted=True) as served:
        run = await respond(served, given="go", background=True)
        listening = asyncio.create_task(fetch(served, run["id"], "?stream=true"))
        await speaking(served, run["id"])
        path = f"/v1/responses/{run['id']}/cancel"
        cancelled = await served.request("POST", path)
        assert (cancelled.status, cancelled.body["status"]) == (200, "cancelled")
        assert expected_text("a", "go", 10_000).startswith(text_of(cancelled.body))
        assert (await served.request("POST", path)).body == cancelled.body
        assert (await fetch(served, run["id"])).body == cancelled.body
        heard = (await listening).body
        assert final(heard) == cancelled.body
        assert (await fetch(served, run["id"], "?stream=true")).body == heard

        async def idle() -> bool:
            return bool((await served.worker("a") or {})["active"] == 0)

        await until(idle)
        assert (await respond(served, given="x", max_output_tokens=1, previous_response_id=run["id"]))["id"]


async def test_a_run_that_is_deleted_is_cancelled_and_gone(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path, **SLOW), scripted=True) as served:
        run = await respond(served, background=True)
        await speaking(served, run["id"])
        gone = await served.request("DELETE", f"/v1/responses/{run['id']}")
        assert (gone.status, gone.body["deleted"]) == (200, True)
        assert (await fetch(served, run["id"])).status == 404

        async def idle() -> bool:
            return bool((await served.worker("a") or {})["active"] == 0)

        await until(idle)
        assert (await fetch(served, run["id"])).status == 404


async def test_only_what_runs_in_the_background_is_cancelled_and_gone_on_from_when_it_ended(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path, models=models(tmp_path, **SLOW), scripted=True) as served:
        one = await respond(served, max_output_tokens=1)
        answer = await served.request("POST", f"/v1/responses/{one['id']}/cancel")
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert "background" in answer.body["error"]["message"]
        run = await respond(served, background=True)
        early = await post(served, previous_response_id=run["id"])
        assert (early.status, early.body["error"]["param"]) == (400, "previous_response_id")
        assert run["id"] in early.body["error"]["message"]
        await served.request("POST", f"/v1/responses/{run['id']}/cancel")


async def test_a_run_whose_worker_dies_or_will_not_load_has_failed_with_the_reason(tmp_path: Path) -> None:
    folder = models(tmp_path, crash_at="decode", tokens=8)
    make_scripted_model(folder, "b", fail_load="no such tensor")
    async with serve(tmp_path, models=folder, scripted=True) as served:
        died = await ended(served, (await respond(served, background=True))["id"])
        assert (died["status"], died["error"]["type"]) == ("failed", "worker_crashed")
        # The news of a death may overtake what it said last.
        assert expected_text("a", "hello", 3).startswith(text_of(died))
        unloaded = await ended(served, (await respond(served, "b", background=True))["id"])
        assert (unloaded["status"], unloaded["error"]["type"]) == ("failed", "load_failed")
        assert "no such tensor" in unloaded["error"]["message"]
        replayed = (await fetch(served, unloaded["id"], "?stream=true")).body
        assert final(replayed) == unloaded


async def test_a_run_that_the_pool_has_no_place_for_is_refused_at_once(tmp_path: Path) -> None:
    folder = models(tmp_path, load_s=30.0)
    async with serve(tmp_path, models=folder, scripted=True, settings={"pool.queue_limit": "1"}) as served:
        first = await respond(served, background=True)
        second = await post(served, background=True)
        assert (second.status, second.code) == (429, "queue_full")
        assert "retry-after" in second.headers
        cancelled = await served.request("POST", f"/v1/responses/{first['id']}/cancel")
        assert cancelled.body["status"] == "cancelled"
        # Nothing is left of the one that was refused.
        assert (await served.request("GET", "/api/history")).body["entries"] == 1


async def test_a_killed_servers_runs_have_failed_and_say_why(tmp_path: Path) -> None:
    folder = models(tmp_path, load_s=0.1, **SLOW)
    async with serve(tmp_path, models=folder, scripted=True) as served:
        run = await respond(served, background=True)
        await speaking(served, run["id"])
        await served.down(signal.SIGKILL)
    async with serve(tmp_path, models=folder, scripted=True) as served:
        left = (await fetch(served, run["id"])).body
        assert (left["status"], left["error"]["code"]) == ("failed", "server_error")
        assert "restarted" in left["error"]["message"]
        assert final((await fetch(served, run["id"], "?stream=true")).body) == left
        assert (await respond(served, max_output_tokens=1, previous_response_id=run["id"]))["id"]


async def test_a_stopped_servers_runs_have_failed_with_what_they_said(tmp_path: Path) -> None:
    folder = models(tmp_path, **SLOW)
    async with serve(tmp_path, models=folder, scripted=True, settings={"pool.drain_timeout": "0"}) as served:
        run = await respond(served, background=True)
        await speaking(served, run["id"])
        assert await served.down() == 0
    async with serve(tmp_path, models=folder, scripted=True) as served:
        left = (await fetch(served, run["id"])).body
        assert (left["status"], left["error"]["type"]) == ("failed", "shutting_down")
        assert expected_text("a", "hello", 10_000).startswith(text_of(left))


async def test_a_run_whose_end_can_not_be_stored_has_an_end_and_says_why(tmp_path: Path) -> None:
    folder = models(tmp_path, tokens=3000)
    config = "[history]\nmax_bytes = 2500\n"
    async with serve(tmp_path, models=folder, scripted=True, config=config) as served:
        run = await respond(served, background=True)
        left = await ended(served, run["id"])

        async def failed() -> bool:
            nonlocal left
            left = (await fetch(served, run["id"])).body
            return left["status"] == "failed"

        # Whole for as long as memory has it.
        await until(failed)
        assert "history.max_bytes (2500)" in left["error"]["message"]
        cancelled = await served.request("POST", f"/v1/responses/{run['id']}/cancel")
        assert (cancelled.status, cancelled.body["status"]) == (200, "failed")
        assert final((await fetch(served, run["id"], "?stream=true")).body) == left


async def test_a_run_that_can_not_be_stored_is_refused(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        other = sqlite3.connect(tmp_path / "home" / "state.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        answer = await post(served, background=True)
        assert answer.status == 503
        assert "locked" in answer.body["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        other.execute("ROLLBACK")
        other.close()
        assert (await ended(served, (await respond(served, background=True))["id"]))["status"] == "completed"


async def test_a_bad_value_of_stream_is_refused_where_every_answer_is_a_stream(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        answer = await post(served, background=True, stream="yes")
        assert (answer.status, answer.body["error"]["param"]) == (400, "stream")
