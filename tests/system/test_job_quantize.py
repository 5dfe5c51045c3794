"""A model is quantised beside others that serve: they end what they do, others wait, and it answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.tools import sse
from tests.tools.job_client import PATIENCE_S, row, submit, until_done
from tests.tools.served import Served, chat_body, serve, until
from tests.tools.tiny_fixture import TinyModels

EOS_ID = 258
# Long enough to be under way when the job comes.
TOKENS = 800


async def begun(served: Served, started: asyncio.Event, prompt: str) -> sse.ChatStream:
    """A long stream of the tiny model; `started` once its first bytes are here."""
    body = chat_body("tiny", prompt, stream=True, max_tokens=TOKENS, temperature=0, logit_bias={EOS_ID: -100})
    got = b""
    async with served.client.post(f"{served.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for piece in answer.content.iter_any():
            got += piece
            started.set()
    return sse.read_chat(got)


async def leases(served: Served) -> dict[str, Any]:
    return dict((await served.pool())["leases"])


async def test_streams_end_untouched_requests_wait_and_the_result_answers(
    tmp_path: Path, tiny: TinyModels, starter_folder: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny").symlink_to(tiny("llama"))
    (models / "smollm2-135m").symlink_to(starter_folder)
    async with serve(tmp_path, models=models) as served:
        alone = [await begun(served, asyncio.Event(), prompt) for prompt in ("one", "two")]
        started = [asyncio.Event(), asyncio.Event()]
        streams = [
            asyncio.create_task(begun(served, event, prompt))
            for event, prompt in zip(started, ("one", "two"), strict=True)
        ]
        for event in started:
            await event.wait()
        job = await submit(served, "quantize", model="smollm2-135m", bits=8)
        assert not all(stream.done() for stream in streams)

        async def is_next() -> bool:
            return str((await leases(served))["holder"]).startswith("quantize smollm2-135m")

        await until(is_next, PATIENCE_S)
        late = asyncio.create_task(served.chat("tiny", "late", max_tokens=8))

        async def waits() -> bool:
            queue = (await served.pool())["queue"]
            return [entry["waits_for"] for entry in queue] == ["lease"]

        await until(waits, PATIENCE_S)

        async def has_the_gpu() -> bool:
            return bool((await leases(served))["exclusive"])

        await until(has_the_gpu, PATIENCE_S)
        assert (await row(served, job["id"]))["status"] in ("queued", "running")
        assert not late.done()
        for stream, before in zip(streams, alone, strict=True):
            ended = await stream
            assert (ended.text, ended.finish) == (before.text, "length")

        result = await until_done(served, job["id"])
        assert (await late).status == 200
        assert result["model"] == "smollm2-135m-8bit"
        assert 8.4 < result["bits_per_weight"] < 9.1
        assert result["weights_bytes"] < result["was_bytes"] / 3
        assert await leases(served) == {"shared": 0, "exclusive": 0, "waiting": 0, "holder": None}
        answer = await served.chat(
            "smollm2-135m-8bit",
            "What is the capital of France? Answer in one sentence.",
            max_tokens=7,
            temperature=0,
        )
        assert answer.text.startswith("The capital of France is Paris")


async def test_a_job_that_is_cancelled_leaves_no_model_and_the_gpu_to_others(
    tmp_path: Path, tiny: TinyModels, starter_folder: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny").symlink_to(tiny("llama"))
    (models / "smollm2-135m").symlink_to(starter_folder)
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "p", "completion": "c"}\n' * 8)
    async with serve(tmp_path, models=models) as served:
        training = await submit(served, "finetune", model="tiny", data=str(data), iters=1_000_000)
        behind = await submit(served, "quantize", model="tiny", bits=4, group_size=32)

        async def trains() -> bool:
            return "step" in (await row(served, training["id"]))["message"]

        await until(trains, PATIENCE_S)
        assert (await row(served, behind["id"]))["status"] == "queued"
        await served.request("POST", f"/api/jobs/{training['id']}/cancel")
        assert (await until_done(served, behind["id"]))["model"] == "tiny-4bit"
        assert (await row(served, training["id"]))["status"] == "cancelled"
        assert [path for path in (served.home / "adapters").iterdir() if path.name[0] != "."] == []
        assert (await served.chat("tiny-4bit", "hi", max_tokens=2)).status == 200
