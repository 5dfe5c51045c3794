"""Conversations made short by the model that had them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tools.responses_client import post, respond, text_of
from tests.tools.scripted_script import expected_text, make_scripted_model
from tests.tools.served import Served, serve


def models(tmp: Path, **script: Any) -> Path:
    make_scripted_model(tmp / "m", "a", **{"tokens": 3, **script})
    return tmp / "m"


def code(answer: Any) -> tuple[int, str, str | None]:
    error = answer.body["error"]
    return answer.status, error["code"], error["param"]


async def compacted(served: Served, **fields: Any) -> Any:
    return await served.request("POST", "/v1/responses/compact", {"model": "a", **fields})


async def test_a_compacted_conversation_is_the_next_ones_input(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path), scripted=True) as served:
        one = await respond(served, given="first")
        two = await respond(served, given="second", previous_response_id=one["id"])
        answer = await compacted(served, previous_response_id=two["id"], tools=[])
        assert answer.status == 200
        output = answer.body["output"]
        assert [item["type"] for item in output] == ["message", "message", "compaction"]
        assert [text_of({"output": [item]}) for item in output[:2]] == ["first", "second"]
        assert answer.body["object"] == "response.compaction"
        assert answer.body["usage"]["output_tokens"] == 3
        three = await respond(served, given=[*output, {"role": "user", "content": "third"}])
        assert text_of(three) == expected_text("a", "third", 3)
        assert code(await compacted(served)) == (400, "invalid_request", "input")
        for wrong in (5, {}, False, [{"type": "wish"}]):
            answer = await compacted(served, input=wrong)
            assert answer.status == 400
            assert "nothing to compact" not in answer.body["error"]["message"]
        assert code(await compacted(served, input="x", colour=1)) == (400, "unsupported_parameter", "colour")
        bad = await compacted(served, input=[{"type": "wish"}], previous_response_id=two["id"])
        assert code(bad)[0] == 400
        assert "input[0]" in bad.body["error"]["message"]


async def test_a_compaction_stores_nothing_and_is_not_held_to_what_may_be_stored(tmp_path: Path) -> None:
    config = "[history]\nmax_bytes = 5000\n"
    async with serve(tmp_path, models=models(tmp_path), scripted=True, config=config) as served:
        assert (await compacted(served, input="x" * 6000)).status == 200
        assert (await compacted(served, input="x" * 6000, store=False)).status == 200
        run = await post(served, given="x" * 6000, background=True)
        assert code(run) == (413, "body_too_large", "input")
        assert "store: false without background" in run.body["error"]["message"]


async def test_a_summary_that_was_cut_is_refused_by_the_limit_that_cut_it(tmp_path: Path) -> None:
    async with serve(tmp_path, models=models(tmp_path, tokens=5000), scripted=True) as served:
        for fields, limit in (({"max_output_tokens": 2}, "(2)"), ({}, "(4096)")):
            answer = await compacted(served, input="tell", **fields)
            assert code(answer) == (400, "invalid_request", "max_output_tokens")
            assert limit in answer.body["error"]["message"]
