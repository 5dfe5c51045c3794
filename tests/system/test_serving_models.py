"""The whole of it: `mlxpool up`, real worker processes, real models, real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from mlxpool.parent.library import Library
from mlxpool.shared import backend, config
from tests.tools import sse
from tests.tools.served import Served, alive, chat_body, gone, serve, until
from tests.tools.tiny_models import EOS_ID

QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."


@pytest.fixture
def two_tiny(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder with two tiny models of different shapes that never end an answer by themselves."""
    for kind in ("llama", "sliding"):
        folder = shutil.copytree(tiny(kind), tmp_path / "models" / kind)
        weights = load_file(folder / "model.safetensors")
        weights["model.embed_tokens.weight"][EOS_ID] = 0.0  # tied: its logit is 0, below the best of many
        save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    return tmp_path / "models"


@pytest.fixture
def starter(starter_folder: Path, tmp_path: Path) -> Path:
    """A folder with the starter model in it."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-135m").symlink_to(starter_folder)
    return tmp_path / "models"


def budget_for_one(models: Path) -> int:
    """Bytes that hold any of the models, and no two."""
    library = Library(config.Settings(home=models / "none", model_dirs=(models,)))
    plans = [library.describe(model, backend.detect(), None).plan for model in library.models()]
    sizes = [plan.planned_bytes for plan in plans if plan is not None]
    budget = max(sizes) + min(sizes) // 2
    assert budget < sum(sorted(sizes)[:2])
    return budget


async def test_the_starter_answers_its_question_whole_and_streamed_to_curl_and_to_the_openai_client(
    tmp_path: Path, starter: Path
):
    async with serve(tmp_path, models=starter) as served:
        answer = await served.chat("smollm2-135m", QUESTION, temperature=0)
        assert answer.text == ANSWER
        assert answer.body["choices"][0]["finish_reason"] == "stop"
        usage = answer.body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] == 50
        # From the second time on all but the last token of the prompt is cached.
        repeated = {**usage, "prompt_tokens_details": {"cached_tokens": usage["prompt_tokens"] - 1}}

        body = {"model": "smollm2-135m", "temperature": 0, "stream": True}
        body["messages"] = [{"role": "user", "content": QUESTION}]
        curl = ["curl", "-sN", f"{served.url}/v1/chat/completions", "-d", json.dumps(body)]
        curled = await asyncio.to_thread(subprocess.check_output, curl)
        stream = sse.read_chat(curled)
        assert (stream.text, stream.finish, stream.usage) == (ANSWER, "stop", repeated)

        client = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", _strict_response_validation=True
        )
        messages: Any = [{"role": "user", "content": QUESTION}]
        whole = await client.chat.completions.create(model="smollm2-135m", messages=messages, temperature=0)
        assert whole.choices[0].message.content == ANSWER
        chunks = await client.chat.completions.create(
            model="smollm2-135m",
            messages=messages,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces = [chunk async for chunk in chunks]
        assert "".join(c.choices[0].delta.content or "" for c in pieces if c.choices) == ANSWER
        assert pieces[-1].choices == []
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.prompt_tokens == usage["prompt_tokens"]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-4", messages=messages)
        with pytest.raises(openai.BadRequestError, match="adapter"):
            await client.chat.completions.create(
                model="smollm2-135m", messages=messages, extra_body={"adapter": "a"}
            )
        worker = await served.worker("smollm2-135m")
        assert worker is not None
        held = psutil.Process(worker["pid"]).memory_full_info().pss
        assert held < worker["planned_bytes"]


async def test_twenty_requests_over_two_models_in_a_budget_for_one(tmp_path: Path, two_tiny: Path):
    async with serve(tmp_path, models=two_tiny, budget=budget_for_one(two_tiny)) as served:
        samples: list[list[str]] = []
        done = asyncio.Event()

        async def sample() -> None:
            while not done.is_set():
                pool = await served.pool()
                held = [
                    w for w in pool["workers"] if w["state"] in ("loading", "ready", "draining", "stopping")
                ]
                samples.append([w["model"] for w in held])
                await asyncio.sleep(0.02)

        sampler = asyncio.create_task(sample())
        clients = asyncio.Semaphore(8)

        async def ask(i: int) -> int:
            async with clients:
                answer = await served.chat(("llama", "sliding")[i % 2], f"question {i}", max_tokens=8)
                return answer.status

        statuses = await asyncio.gather(*(ask(i) for i in range(20)))
        done.set()
        await sampler
        counters = (await served.pool())["counters"]
    assert statuses == [200] * 20
    assert len(samples) > 20
    assert max(len(held) for held in samples) == 1
    assert counters["loads"] == counters["evictions"] + 1
    assert counters["crashes"] == 0


async def test_each_model_says_alone_what_it_says_among_others(tmp_path: Path, two_tiny: Path):
    prompts = [f"{'long ' * (i * 7 % 40)}question {i}" for i in range(12)]
    async with serve(tmp_path, models=two_tiny) as served:

        async def say(i: int) -> str:
            return (
                await served.chat(("llama", "sliding")[i % 2], prompts[i], temperature=0, max_tokens=24)
            ).text

        alone = [await say(i) for i in range(12)]
        together = await asyncio.gather(*(say(i) for i in range(12)))
    assert together == alone
    assert len(set(alone)) == 12


@pytest.mark.parametrize("when", ["idle", "loading", "streaming"])
async def test_kill_9_of_the_parent_takes_its_workers_with_it(tmp_path: Path, two_tiny: Path, when: str):
    async with serve(tmp_path, models=two_tiny) as served:
        port = served.port
        request = asyncio.create_task(
            served.chat(
                "llama", "hello", stream=True, temperature=0, max_tokens=4 if when == "idle" else 4000
            )
        )
        await served.until_state("llama", *(("starting", "loading") if when == "loading" else ("ready",)))
        if when == "idle":
            await request
        pids = served.worker_pids()
        assert pids
        served.process.kill()
        served.process.wait()
        await asyncio.gather(request, return_exceptions=True)
        await gone(pids)
    async with serve(tmp_path, models=two_tiny, port=port) as served:
        assert (await served.chat("llama", max_tokens=4)).status == 200


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_lost_in_mid_stream_ends_its_own_stream_alone(
    tmp_path: Path, two_tiny: Path, number: signal.Signals
):
    settings = {"pool.stall_timeout": "3s"}
    async with serve(tmp_path, models=two_tiny, settings=settings) as served:
        expected = await served.stream("sliding", "other", temperature=0, max_tokens=1500)
        await served.chat("llama", max_tokens=1)
        lost = asyncio.create_task(served.stream("llama", "q", temperature=0, max_tokens=4000))
        await decoding(served, "llama")
        other = asyncio.create_task(served.stream("sliding", "other", temperature=0, max_tokens=1500))
        await decoding(served, "sliding")
        pid = (await worker_of(served, "llama"))["pid"]
        begun = time.monotonic()
        os.kill(pid, number)
        ended = await lost
        assert time.monotonic() - begun < (3 + 5 if number == signal.SIGSTOP else 5)
        assert ended.error is not None
        assert ended.error["code"] == "worker_crashed"
        await gone([pid])
        assert (await served.chat("llama", max_tokens=4)).status == 200
        untouched = await other
        assert (untouched.text, untouched.finish) == (expected.text, expected.finish)


async def worker_of(served: Served, model: str) -> dict[str, Any]:
    worker = await served.worker(model)
    assert worker is not None
    return worker


async def decoding(served: Served, model: str) -> None:
    """Wait until the model has a request in flight."""
    deadline = time.monotonic() + 60
    while (await worker_of(served, model))["active"] == 0:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at", ["prefilling", "decoding"])
async def test_within_a_second_of_its_client_leaving_a_worker_stands_still(
    tmp_path: Path, starter: Path, stream: bool, at: str
):
    prompt = "word " * 6000 if at == "prefilling" else "Write a very long story about the sea."
    async with serve(tmp_path, models=starter) as served:
        await served.chat("smollm2-135m", "hi", max_tokens=1)
        pid = (await worker_of(served, "smollm2-135m"))["pid"]
        leaver = asyncio.create_task(served.chat("smollm2-135m", prompt, stream=stream, max_tokens=2000))
        before = cpu_s(pid)
        await until(lambda: cpu_s(pid) > before + 1.0)
        leaver.cancel()
        await asyncio.sleep(1.0)
        assert (await worker_of(served, "smollm2-135m"))["active"] == 0
        used = cpu_s(pid)
        await asyncio.sleep(1.0)
        assert cpu_s(pid) - used < 0.1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_load_that_only_one_client_wanted_ends_with_that_client(
    tmp_path: Path, starter: Path, stream: bool
):
    async with serve(tmp_path, models=starter) as served:
        leaver = asyncio.create_task(served.chat("smollm2-135m", "hi", stream=stream))
        await served.until_state("smollm2-135m", "starting", "loading")
        pids = served.worker_pids()
        leaver.cancel()
        await gone(pids)
        await served.until_state("smollm2-135m", "absent")


def truncate(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 100)


def reshape(folder: Path) -> None:
    path = folder / "config.json"
    read = json.loads(path.read_text())
    read["hidden_size"] *= 2
    read["intermediate_size"] = read.get("intermediate_size", 64) * 2
    path.write_text(json.dumps(read))


def forget_weights(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def forget_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def unknown_architecture(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "nonesuch_9"}))


def scramble(folder: Path) -> None:
    next(folder.glob("*.safetensors")).write_bytes(b"\xff" * 1000)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (forget_weights, "safetensors"),
        (truncate, "safetensors"),
        (scramble, "safetensors"),
        (reshape, "shape"),
        (forget_tokenizer, "tokenizer"),
        (unknown_architecture, "nonesuch_9"),
    ],
)
async def test_a_broken_folder_is_said_so_within_ten_seconds_and_harms_nobody(
    tmp_path: Path, two_tiny: Path, harm: Callable[[Path], None], reason: str
):
    harm(two_tiny / "sliding")
    async with serve(tmp_path, models=two_tiny) as served:
        begun = time.monotonic()
        answers = await asyncio.gather(
            served.chat("sliding"), served.chat("sliding", stream=True), served.chat("llama", max_tokens=4)
        )
        assert time.monotonic() - begun < 10
        for answer in answers[:2]:
            assert (answer.status, answer.code) == (503, "load_failed")
            assert reason in answer.body["error"]["message"].lower()
            assert "Traceback" not in answer.body["error"]["message"]
        assert answers[2].status == 200
        await served.until_state("sliding", "failed")
        assert alive(served.worker_pids())  # the other model's


async def test_a_ready_worker_holds_no_torch(tmp_path: Path, two_tiny: Path):
    trap = tmp_path / "trap" / "torch"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"
    )
    metadata = tmp_path / "trap" / "torch-2.13.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    async with serve(tmp_path, models=two_tiny, env={"PYTHONPATH": str(tmp_path / "trap")}) as served:
        assert (await served.chat("llama", max_tokens=4)).status == 200
        assert not (trap / "imported").exists()


async def test_a_trace_joins_what_parent_and_worker_saw_of_a_request(tmp_path: Path, two_tiny: Path):
    settings = {"server.trace": "true"}
    async with serve(tmp_path, models=two_tiny, settings=settings) as served:
        body = chat_body("llama", "hello", max_tokens=8)
        await served.request("POST", "/v1/chat/completions", body, X_Request_Id="joined")

        def lines_by_process() -> dict[str, Any]:
            written = (served.home / "logs" / "trace.jsonl").read_text().splitlines()
            return {line["process"]: line for line in map(json.loads, written) if line["request"] == "joined"}

        # A request's lines are written after its last byte, which its client may have read by then.
        await until(lambda: len(lines_by_process()) >= 2)
        by_process = lines_by_process()
        assert set(by_process) == {"parent", "worker"}
        worker = by_process["worker"]
        assert (worker["model"], worker["outcome"]) == ("llama", "ok")
        assert list(worker["phases_ms"]) == ["prepare", "queue", "prefill", "first_token", "last_write"]
        assert sorted(worker["phases_ms"].values()) == list(worker["phases_ms"].values())
