"""A conversation by previous_response_id with the starter model, through restarts of the server."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import STARTER
from tests.tools.served import Answer, Served, gone, serve, until

pytestmark = pytest.mark.starter

FIRST = "My name is Ada and my cat is called Turing. What is the capital of France?"
SECOND = "And of Italy?"
THIRD = "What is my cat called?"


async def respond(served: Served, **fields: Any) -> dict[str, Any]:
    body = {"model": STARTER, "temperature": 0, "max_output_tokens": 16, **fields}
    answer = await served.request("POST", "/v1/responses", body)
    assert answer.status == 200, answer.body
    return dict(answer.body)


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def streamed(served: Served, method: str, path: str, body: Any = None) -> bytes:
    answer = await served.request(method, path, body)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    return bytes(answer.body)


async def input_items(served: Served, response_id: str) -> list[tuple[str, str]]:
    answer = await served.request("GET", f"/v1/responses/{response_id}/input_items?order=asc&limit=100")
    assert answer.status == 200, answer.body
    assert answer.body["has_more"] is False
    return [(item["role"], text_of({"output": [item]})) for item in answer.body["data"]]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
async def test_the_third_turn_knows_the_first_though_the_server_was_restarted(
    tmp_path: Path, starter_models: Path, how: signal.Signals
) -> None:
    async with serve(tmp_path, models=starter_models) as served:
        one = await respond(served, input=FIRST, instructions="Be brief.")
        body = {
            "model": STARTER, "temperature": 0, "max_output_tokens": 16, "stream": True, "input": SECOND,
            "previous_response_id": one["id"],
        }  # fmt: skip
        sent = await streamed(served, "POST", "/v1/responses", body)
        # What was answered is found at once, and by whoever asks.
        two_id = sent.split(b'"id":"resp_')[1].split(b'"')[0].decode()
        two = (await served.request("GET", f"/v1/responses/resp_{two_id}")).body
        assert two["previous_response_id"] == one["id"]

        async def stored() -> bool:
            return bool((await served.request("GET", "/api/history")).body["entries"] == 2)

        # An answer doesn't wait for its row, which a kill may forestall.
        await until(stored)
        workers = served.worker_pids()
        await served.down(how)
        await gone(workers)

    async with serve(tmp_path, models=starter_models) as served:
        three = await respond(served, input=THIRD, previous_response_id=two["id"])
        conversation = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": FIRST},
            {"role": "assistant", "content": text_of(one)},
            {"role": "user", "content": SECOND},
            {"role": "assistant", "content": text_of(two)},
            {"role": "user", "content": THIRD},
        ]
        chat = await served.request(
            "POST",
            "/v1/chat/completions",
            {"model": STARTER, "temperature": 0, "max_tokens": 16, "messages": conversation},
        )
        assert three["usage"]["input_tokens"] == chat.body["usage"]["prompt_tokens"]
        assert text_of(three) == chat.text
        asked = [(message["role"], message["content"]) for message in conversation[1:]]
        assert await input_items(served, three["id"]) == asked

        replayed = await streamed(served, "GET", f"/v1/responses/{two['id']}?stream=true")
        assert replayed == sent
        later = await streamed(served, "GET", f"/v1/responses/{two['id']}?stream=true&starting_after=3")
        assert sent.endswith(later)
        assert later.startswith(b"event: ")
        assert sent.count(b"event: ") - later.count(b"event: ") == 4

        deleted = await served.request("DELETE", f"/v1/responses/{two['id']}")
        assert deleted.body == {"id": two["id"], "object": "response", "deleted": True}
        for lost in (
            await served.request("GET", f"/v1/responses/{two['id']}"),
            await served.request("GET", f"/v1/responses/{two['id']}/input_items"),
            await served.request("DELETE", f"/v1/responses/{two['id']}"),
            await served.request(
                "POST", "/v1/responses",
                {"model": STARTER, "input": "?", "previous_response_id": two["id"]},
            ),
        ):  # fmt: skip
            assert refused(lost) == (404, "response_not_found")
        # Each row stands by itself: what came after it is still whole.
        assert text_of((await served.request("GET", f"/v1/responses/{three['id']}")).body) == text_of(three)
        four = await respond(served, input="Thanks.", previous_response_id=three["id"])
        assert four["usage"]["input_tokens"] > three["usage"]["input_tokens"]


def refused(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.code


async def test_a_follow_up_to_an_incomplete_response_goes_on_from_its_half_sentence(
    tmp_path: Path, starter_models: Path
) -> None:
    async with serve(tmp_path, models=starter_models) as served:
        cut = await respond(served, input="What is the capital of France?", max_output_tokens=3)
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in cut["output"]] == ["incomplete"]
        more = await respond(served, input="Go on.", previous_response_id=cut["id"])
        assert await input_items(served, more["id"]) == [
            ("user", "What is the capital of France?"),
            ("assistant", text_of(cut)),
            ("user", "Go on."),
        ]
        # Instructions of an earlier turn stay until a turn has its own.
        taught = await respond(
            served, input="Hi", instructions="Speak like a pirate.", previous_response_id=more["id"]
        )
        kept = await respond(served, input="Again", previous_response_id=taught["id"])
        assert kept["instructions"] == "Speak like a pirate."


async def test_a_background_run_that_a_kill_interrupts_has_failed_and_says_so(
    tmp_path: Path, starter_models: Path
) -> None:
    async with serve(tmp_path, models=starter_models) as served:
        started = await respond(
            served, input="Tell a very long story.", background=True, max_output_tokens=4000
        )
        assert started["status"] in ("queued", "in_progress")
        workers = served.worker_pids()
        await served.down(signal.SIGKILL)
        await gone(workers)

    async with serve(tmp_path, models=starter_models) as served:
        ended = (await served.request("GET", f"/v1/responses/{started['id']}")).body
        assert ended["status"] == "failed"
        assert "restart" in ended["error"]["message"]
        after = await respond(served, input="Hello?", previous_response_id=started["id"])
        assert after["status"] in ("completed", "incomplete")
