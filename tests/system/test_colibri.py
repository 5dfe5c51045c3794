"""A model whose experts are streamed, in the real server: a model like another, whatever happens to it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_glm
from tests.tools.served import Answer, Served, serve, until
from tests.tools.tiny_fixture import TinyModels

# Every expert would fit: with four slots of sixteen most of them are read again and again.
CONFIG = """
[server]
trace = true
[models.glm]
slots = 4
context = 4096
[models.llama]
context = 4096
"""
ASKED = "Which river runs past the library, and how often does it flood the cellar below the stairs? " * 3
MANY_TOKENS = "word " * 250


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A container, as colibri makes it: float32 beside packed numbers, so that the CPU is fast with it."""
    config = tiny_glm.config()
    return tiny_glm.write_container(
        tmp_path_factory.mktemp("glm") / "glm", config, tiny_glm.weights(config), mtp=False
    )


@pytest.fixture
def models(glm: Path, tiny: TinyModels, tmp_path: Path) -> Path:
    """A folder with the streamed model and one that is held in memory."""
    folder = tmp_path / "models"
    shutil.copytree(glm, folder / "glm")
    shutil.copytree(tiny("llama"), folder / "llama")
    return folder


async def ask(served: Served, model: str = "glm", prompt: str = ASKED, **fields: Any) -> Answer:
    return await served.chat(model, prompt, temperature=0, **{"max_tokens": 8, **fields})


async def stats(served: Served, model: str = "glm") -> dict[str, Any]:
    return dict((await served.request("GET", f"/api/models/{model}/stats")).body)


async def works_on_it(served: Served) -> None:
    """Until the model's worker is in the middle of a request."""

    async def runs() -> bool:
        told = await stats(served)
        return bool(told.get("batch", {}).get("rows"))

    await until(runs)


def cached(answer: Answer) -> int:
    return int(answer.body["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_it_is_a_model_like_another(tmp_path: Path, models: Path) -> None:
    async with serve(tmp_path, models=models, config=CONFIG) as served:
        unloaded = await served.request("GET", "/api/models/glm/experts")
        assert (unloaded.status, "not loaded" in unloaded.body["error"]["message"]) == (404, True)
        entry = (await served.request("GET", "/v1/models/glm")).body
        told = entry["capabilities"]
        assert (told["streamed_experts"], told["dsa"], told["mtp"]) == (True, True, False)
        assert (told["adapters"], told["batch"], told["chat"]) == (False, False, True)

        chat = await ask(served)
        assert chat.status == 200, chat.body
        streamed = await served.stream("glm", ASKED, temperature=0, max_tokens=8)
        assert streamed.text == chat.text
        assert chat.body["usage"]["completion_tokens"] == 8
        messages = [{"role": "user", "content": ASKED}]
        message = await served.request(
            "POST", "/v1/messages", {"model": "glm", "max_tokens": 8, "temperature": 0, "messages": messages}
        )
        response = await served.request(
            "POST",
            "/v1/responses",
            {"model": "glm", "input": ASKED, "max_output_tokens": 8, "temperature": 0},
        )
        assert message.body["content"][0]["text"] == chat.text
        assert response.body["output"][0]["content"][0]["text"] == chat.text
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}
        formed = await ask(served, response_format=form, logprobs=True, max_tokens=20)
        assert json.loads(formed.text) in (True, False)
        raw = await served.request(
            "POST", "/v1/completions", {"model": "glm", "prompt": "The river", "max_tokens": 4}
        )
        assert raw.body["usage"]["completion_tokens"] == 4

        await asyncio.gather(*(ask(served, prompt=f"{place} {ASKED}") for place in range(3)))
        colibri = (await stats(served))["colibri"]
        main, turn = colibri["main"], colibri["last_turn"]
        assert (main["layers"], main["experts"], main["slots"], main["planned_slots"]) == (6, 16, 4, 4)
        assert main["misses"] > 50
        assert main["read_bytes"] >= main["misses"] * (3 * 256 * 128 // 2)
        assert turn["tokens"] == 8
        assert turn["ttft_s"] > 0
        assert 0 <= turn["hit_rate"] < 1
        assert colibri["context"] == entry["context_window"] == 4096
        assert colibri["planned_bytes"] == entry["planned_bytes"]
        assert colibri["slab_bytes"] > 0

        heat = (await served.request("GET", "/api/models/glm/experts")).body
        assert [layer["layer"] for layer in heat["layers"]] == [1, 2, 3, 4, 5, 6]
        assert all(len(layer["counts"]) == 16 for layer in heat["layers"])
        *counts, last = (sum(layer["counts"]) for layer in heat["layers"])
        # Prompts ask nothing of the last layer.
        assert min(counts) > 500 > last > 100
        assert all(len(layer["resident"]) == 4 for layer in heat["layers"])

        await ask(served, "llama")
        resident = await served.request("GET", "/api/models/llama/experts")
        assert (resident.status, "as a whole" in resident.body["error"]["message"]) == (404, True)
        assert (await stats(served, "llama"))["colibri"] is None
        exposed = (await served.request("GET", "/metrics")).body.decode()
        assert 'mlxpool_expert_misses_total{model="glm"}' in exposed
        assert 'mlxpool_expert_misses_total{model="llama"}' not in exposed
        lines = [json.loads(line) for line in (served.home / "logs" / "trace.jsonl").read_text().splitlines()]
        used = [line["experts"] for line in lines if line["model"] == "glm" and "experts" in line]
        assert len(used) >= 8
        assert all(one["read_bytes"] > 0 for one in used[:1])


async def test_it_makes_room_and_comes_back_where_it_was(tmp_path: Path, models: Path) -> None:
    # Each of the two takes more than half of it, most of that for the process.
    settings = {"cache.ram": "64MB"}
    async with serve(tmp_path, models=models, config=CONFIG, budget="800MB", settings=settings) as served:
        first = await ask(served)
        assert (await ask(served, "llama")).status == 200
        assert await served.state("glm") == "absent"
        again = await ask(served)
        assert await served.state("llama") == "absent"
        assert again.text == first.text
        assert cached(again) >= 0.95 * again.body["usage"]["prompt_tokens"]
        assert await served.down() == 0
    async with serve(tmp_path, models=models, config=CONFIG) as served:
        restored = await ask(served)
        assert restored.text == first.text
        assert cached(restored) >= 0.95 * restored.body["usage"]["prompt_tokens"]
    usage = list((tmp_path / "home" / "colibri" / "usage").iterdir())
    assert [path.suffix for path in usage] == [".json"]


async def test_what_happens_to_its_worker_its_clients_and_its_files_stays_there(
    tmp_path: Path, models: Path
) -> None:
    async with serve(tmp_path, models=models, config=CONFIG) as served:
        expected, other = await ask(served), await ask(served, "llama")
        assert expected.status == 200

        # A client that leaves in mid-prefill.
        leaving = asyncio.create_task(ask(served, prompt=MANY_TOKENS))
        await works_on_it(served)
        leaving.cancel()
        await until_cancelled(served)
        assert (await ask(served)).text == expected.text

        # A worker that is killed in mid-prefill.
        killed = asyncio.create_task(ask(served, prompt=f"x {MANY_TOKENS}"))
        await works_on_it(served)
        worker = await served.worker("glm")
        assert worker is not None
        os.kill(worker["pid"], signal.SIGKILL)
        answer = await killed
        assert (answer.status, answer.body["error"]["code"]) == (502, "worker_crashed")
        assert (await ask(served)).text == expected.text

        # Files that are cut while it is served.
        shards = {path: path.read_bytes() for path in (models / "glm").glob("out-0*.safetensors")}
        cut_all(shards)
        broken = await ask(served, prompt=f"y {ASKED}")
        assert broken.status == 500
        assert "layer " in broken.body["error"]["message"]
        assert "expert " in broken.body["error"]["message"]
        assert (await ask(served, "llama")).text == other.text
        put_back(shards)
        changed = await ask(served, prompt=f"y {ASKED}")
        assert changed.status == 500
        assert "reload the model" in changed.body["error"]["message"]
        await served.request("POST", "/api/models/glm/unload")

        async def is_served_again() -> bool:
            # Refused until the folder has been looked at again.
            return (await ask(served, prompt=f"y {ASKED}")).status == 200

        await until(is_served_again)
        assert (await ask(served)).text == expected.text
        assert "Traceback" not in served.log()


async def until_cancelled(served: Served) -> None:
    async def cancelled() -> bool:
        return bool((await stats(served))["cancelled"])

    await until(cancelled)


def cut_all(shards: dict[Path, bytes]) -> None:
    for path in shards:
        os.truncate(path, 60_000)


def put_back(shards: dict[Path, bytes]) -> None:
    for path, content in shards.items():
        path.write_bytes(content)


def without_last_shard(folder: Path) -> None:
    """The files of a download that stopped."""
    max(folder.glob("out-0*.safetensors")).unlink()


def cut_short(folder: Path) -> None:
    shard = max(folder.glob("out-0*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)


@pytest.mark.parametrize("broken", [without_last_shard, cut_short])
async def test_a_folder_that_is_not_whole_is_refused_by_name(
    tmp_path: Path, models: Path, broken: Callable[[Path], None]
) -> None:
    broken(models / "glm")
    async with serve(tmp_path, models=models, config=CONFIG) as served:
        refused = await ask(served)
        assert refused.status in (400, 503)
        assert "out-" in refused.body["error"]["message"] or "layer" in refused.body["error"]["message"]
        assert (await ask(served, "llama")).status == 200


async def test_a_budget_too_small_is_refused_before_a_worker_begins(tmp_path: Path, models: Path) -> None:
    async with serve(tmp_path, models=models, config=CONFIG, budget="200MB") as served:
        refused = await ask(served)
        assert (refused.status, refused.body["error"]["code"]) == (400, "model_too_large")
        assert "does not fit" in refused.body["error"]["message"]
        assert served.worker_pids() == []
