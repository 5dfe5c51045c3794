"""What a person with a long conversation notices of the prompt cache, with real workers: the next turn starts
where the last one ended, whatever happened in between."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.chat import ChatTokenizer
from tests.tools import sse
from tests.tools.served import Answer, Served, serve
from tests.tools.tiny_fixture import TinyModels

# Long enough for two records, short enough that two cores read it in a few seconds.
SYSTEM = (
    "You are the librarian of a small town by a river. You know every shelf by heart, you answer in one "
    "short sentence, and you never make up a book. The library opens at nine, closes at six; on Sundays it "
    "stays closed. Children may take five books, everybody else three, and the atlas never leaves the "
    "reading room. The river floods the cellar every few years, which is why nothing of value is kept below "
    "the stairs. When somebody asks for a book that is not there, you offer to write to the next town, which "
    "takes a week. You are fond of long novels and short poems, and you tell nobody which of them you have "
    "never finished. On Saturdays you read to the children, always standing, always from the same green "
    "chair's back, and you let them choose the book but never the page. The mayor owes four books since "
    "spring; you remind her by letter, in verse, and you would like to be asked for a copy of it. "
)
QUESTIONS = (
    "When does the library open?",
    "How many books may a child take?",
    "And I, how many may I take?",
    "May I take the atlas home?",
    "What is kept in the cellar?",
    "How long does a letter to the next town take?",
)


# Records written where the budget holds five: it was kept by taking away.
SPILLS = 40
TRAFFIC_LIMIT_S = 240.0
FLUSHED_EACH_S = 1.0
# What a prompt with SYSTEM in it takes.
TINY_RECORD_BYTES = 117_000
STARTER_RECORD_BYTES = 11_600_000


class Conversation:
    """One model's turns, and what each of them shares with the one before."""

    def __init__(self, served: Served, model: str, folder: Path, system: str = SYSTEM) -> None:
        self.served, self.model = served, model
        self._tokenizer = ChatTokenizer.open(folder)
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self._before: list[int] = []
        self.shared = 0

    async def ask(self, question: str, *, stream: bool = False, max_tokens: int = 12) -> dict[str, Any]:
        """One turn; returns its usage. `shared` is what its prompt has in common with all that was before."""
        self._messages.append({"role": "user", "content": question})
        ids = self._tokenizer.encode(self._tokenizer.render(self._messages))
        self.shared = _common(self._before, ids)
        body = {
            "model": self.model,
            "messages": self._messages,
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": stream,
        }
        text, usage = await _said(self.served, body)
        self._messages.append({"role": "assistant", "content": text})
        self._before = [*ids, *self._tokenizer.encode(text)]
        assert usage["prompt_tokens"] == len(ids)
        return usage

    def assert_reused(self, usage: dict[str, Any]) -> None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert self.shared >= 200
        assert 0.95 * self.shared <= cached < usage["prompt_tokens"]


async def _said(served: Served, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if body["stream"]:
        async with served.client.post(f"{served.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            stream = sse.read_chat(await answer.read())
        assert stream.usage is not None
        return stream.text, stream.usage
    whole: Answer = await served.request("POST", "/v1/chat/completions", body)
    return whole.text, whole.body["usage"]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


async def _unload(served: Served, model: str) -> None:
    assert (await served.request("POST", f"/api/models/{model}/unload")).status == 202
    await served.until_state(model, "absent")


async def _flush(served: Served) -> dict[str, Any]:
    answer = await served.request("POST", "/api/cache/flush")
    assert answer.status == 200, answer.body
    assert answer.body["durable"] is True
    return dict(answer.body)


async def test_six_turns_reuse_what_they_share_whatever_happens_between_them(
    tmp_path: Path, starter_folder: Path
) -> None:
    name = starter_folder.name
    first, second, third, fourth, fifth, sixth = QUESTIONS
    async with serve(tmp_path, models=starter_folder.parent) as served:
        talk = Conversation(served, name, starter_folder)
        usage = await talk.ask(first)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        talk.assert_reused(await talk.ask(second, stream=True))
        await _unload(served, name)
        talk.assert_reused(await talk.ask(third))
        await _flush(served)
        worker = await served.worker(name)
        assert worker is not None
        os.kill(worker["pid"], signal.SIGKILL)
        await served.until_state(name, "absent", "failed")
        talk.assert_reused(await talk.ask(fourth, stream=True))
        assert await served.down() == 0
    async with serve(tmp_path, models=starter_folder.parent) as served:
        talk.served = served
        talk.assert_reused(await talk.ask(fifth))
        talk.assert_reused(await talk.ask(sixth, stream=True))


@pytest.mark.parametrize("kind", ["llama", "sliding"])
async def test_turns_reuse_what_they_share_with_every_kind_of_cache(
    tmp_path: Path, tiny: TinyModels, kind: Any
) -> None:
    folder = tiny(kind)
    async with serve(tmp_path, models=folder.parent) as served:
        talk = Conversation(served, folder.name, folder)
        await talk.ask(QUESTIONS[0])
        for turn, question in enumerate(QUESTIONS[1:]):
            if turn == 2:
                await _unload(served, folder.name)
            talk.assert_reused(await talk.ask(question, stream=turn % 2 == 0))


async def test_an_answer_is_the_same_from_memory_from_disk_and_without_a_cache(
    tmp_path: Path, starter_folder: Path
) -> None:
    body = {
        "model": starter_folder.name,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[0]}],
        "temperature": 0,
        "max_tokens": 16,
        "stream": False,
    }
    settings = {"cache.ram": "0", "cache.ssd": "false"}
    (tmp_path / "without").mkdir()
    async with serve(tmp_path / "without", models=starter_folder.parent, settings=settings) as served:
        cold, usage = await _said(served, body)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        again, usage = await _said(served, body)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert again == cold
    async with serve(tmp_path, models=starter_folder.parent) as served:
        told = [await _said(served, body | {"stream": stream}) for stream in (False, False, True)]
        await _unload(served, starter_folder.name)
        told.append(await _said(served, body))
    assert [text for text, _ in told] == [cold] * 4
    prompt = usage["prompt_tokens"]
    # All but the last token, which has to go through the model for the first of the answer.
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for _, usage in told]
    assert cached == [0, prompt - 1, prompt - 1, prompt - 1]


async def test_ten_swaps_of_two_models_lose_no_prefix_and_every_drain_is_durable(
    tmp_path: Path, tiny: TinyModels
) -> None:
    folders = [tiny("llama"), tiny("sliding")]
    models = tmp_path / "models"
    models.mkdir()
    for folder in folders:
        (models / folder.name).symlink_to(folder)
    async with serve(tmp_path, models=models) as served:
        planned = []
        for folder in folders:
            assert (await served.chat(folder.name, max_tokens=1)).status == 200
            worker = await served.worker(folder.name)
            assert worker is not None
            planned.append(worker["planned_bytes"])
    # Enough for the larger of the two and the prompts of one, not for both.
    settings = {"cache.ram": "20MB"}
    budget = max(planned) + min(planned) // 2 + 20_000_000
    async with serve(tmp_path, models=models, budget=budget, settings=settings) as served:
        talks = [Conversation(served, folder.name, folder) for folder in folders]
        for talk in talks:
            await talk.ask(QUESTIONS[0])
        for swap in range(10):
            talk = talks[swap % 2]
            talk.assert_reused(await talk.ask(QUESTIONS[1 + swap // 2]))
        evictions = (await served.pool())["counters"]["evictions"]
        assert evictions >= 11
        assert served.log().count("not all was durable") == 0
        assert served.log().count("drained") >= 11


def _disk_bytes(folder: Path) -> int:
    taken = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                taken += path.stat().st_size
        except FileNotFoundError:
            continue
    return taken


async def _traffic(tmp_path: Path, folder: Path, record_bytes: int, seconds: float = 0.0) -> None:
    """Prompts that differ from their first words on, over a budget that holds five of their records.

    It goes on until that many seconds have passed and more was written than the budget holds.
    """
    budget_bytes = 5 * record_bytes + record_bytes // 2
    settings = {
        "cache.ssd_budget": str(budget_bytes),
        "cache.ram": str(5 * record_bytes // 2),
        "cache.idle_demote": "1s",
    }
    async with serve(tmp_path, models=folder.parent, settings=settings) as served:
        began_s = time.monotonic()
        most = spills = 0
        statuses: set[int] = set()

        def goes_on() -> bool:
            passed_s = time.monotonic() - began_s
            assert passed_s < seconds + TRAFFIC_LIMIT_S, f"{spills} records written in {passed_s:.0f} s"
            return passed_s < seconds or spills < SPILLS

        async def client(number: int) -> None:
            turn = 0
            while goes_on():
                prompt = f"{number} {turn} " + SYSTEM
                statuses.add((await served.chat(folder.name, prompt, max_tokens=2)).status)
                turn += 1

        async def flusher() -> None:
            nonlocal spills
            # Beside running rows records are written slowly; asked for, they are written at once.
            while goes_on():
                await asyncio.sleep(FLUSHED_EACH_S)
                assert (await served.request("POST", "/api/cache/flush")).status in (200, 503)
                told = (await served.request("GET", "/api/cache")).body["models"]
                spills = sum(model["ssd_cache"]["spills"] for model in told)

        async with asyncio.TaskGroup() as group:
            for task in (client(0), client(1), client(2), flusher()):
                group.create_task(task)
            while goes_on():
                most = max(most, await asyncio.to_thread(_disk_bytes, tmp_path / "home" / "kv"))
                await asyncio.sleep(0.05)
    assert statuses == {200}
    assert budget_bytes // 2 < most <= budget_bytes


async def test_the_bytes_on_disk_never_pass_the_budget(tmp_path: Path, tiny: TinyModels) -> None:
    await _traffic(tmp_path, tiny("llama"), TINY_RECORD_BYTES)


@pytest.mark.long
async def test_the_bytes_on_disk_never_pass_the_budget_in_five_minutes(
    tmp_path: Path, starter_folder: Path
) -> None:
    await _traffic(tmp_path, starter_folder, STARTER_RECORD_BYTES, 300.0)
