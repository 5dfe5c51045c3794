"""Counting a prompt's tokens: what the answer's usage says afterwards, without a worker before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.tools.scripted_script import make_scripted_model, read_events
from tests.tools.served import Served, serve

STARTER = "smollm2-135m"
TOOL = {
    "name": "look_up",
    "description": "Looks something up.",
    "input_schema": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
}
ASKED = {"role": "user", "content": "What is 2 + 2? Ünïcödé 🙂"}
CALLED = [
    ASKED,
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"what": "2 + 2"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4", "is_error": False},
            {"type": "text", "text": "And now?"},
        ],
    },
]
BODIES: list[dict[str, Any]] = [
    {"messages": [ASKED]},
    {"messages": [ASKED], "system": "You are brief."},
    {"messages": [ASKED], "system": [{"type": "text", "text": "You are brief."}]},
    {"messages": [ASKED, {"role": "assistant", "content": "It is"}]},
    {"messages": [ASKED], "tools": [TOOL], "tool_choice": {"type": "auto"}},
    {"messages": [ASKED], "tools": [TOOL], "tool_choice": {"type": "none"}},
    {"messages": CALLED, "tools": [TOOL]},
    {"messages": [ASKED], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"messages": [ASKED], "thinking": {"type": "disabled"}},
]


async def count(served: Served, model: str, **body: Any) -> Any:
    return await served.request("POST", "/v1/messages/count_tokens", {"model": model, **body})


@pytest.mark.starter
async def test_a_count_is_what_usage_says_of_the_same_body(tmp_path: Path, starter_folder: Path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / STARTER).symlink_to(starter_folder)
    async with serve(tmp_path, models=tmp_path / "m") as served:
        counted = [(await count(served, STARTER, **body)).body["input_tokens"] for body in BODIES]
        assert await served.state(STARTER) == "absent"
        said = []
        for body in BODIES:
            limit = 1 + body.get("thinking", {}).get("budget_tokens", 1)
            full = {"model": STARTER, "max_tokens": limit, "stop_sequences": [" "], **body}
            answer = await served.request("POST", "/v1/messages", full)
            assert answer.status == 200, answer.body
            usage = answer.body["usage"]
            said.append(
                usage["input_tokens"]
                + usage["cache_read_input_tokens"]
                + (usage["cache_creation_input_tokens"] or 0)
            )
    assert counted == said
    assert len(set(counted)) >= 5


async def test_a_count_starts_no_worker_and_follows_the_folder(tmp_path: Path):
    """A scripted model's tokens are bytes, and each message begins with one of its own."""
    folder = make_scripted_model(tmp_path / "m", "a")
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        hello = [{"role": "user", "content": "hello"}]
        answers = await asyncio.gather(*(count(served, "a", messages=hello) for _ in range(20)))
        assert {(answer.status, answer.body["input_tokens"]) for answer in answers} == {(200, 6)}
        config = folder / "tokenizer_config.json"
        config.write_text(config.read_text().replace("<|user|>", "<|user|><|user|>"))
        assert (await count(served, "a", messages=hello)).body == {"input_tokens": 7}
        assert read_events(folder) == []
        assert served.worker_pids() == []


async def test_a_body_or_a_folder_that_cant_be_counted_is_told_in_messages_own_words(tmp_path: Path):
    for name in ("broken", "none", "mute", "fine"):
        make_scripted_model(tmp_path / "m", name)
    (tmp_path / "m" / "broken" / "tokenizer.json").write_text('{"version": "1.0"')
    (tmp_path / "m" / "none" / "tokenizer.json").unlink()
    (tmp_path / "m" / "mute" / "tokenizer_config.json").write_text("{}")
    hello = [{"role": "user", "content": "hello"}]
    expected = [
        ("broken", {"messages": hello}, 503, "tokenizer.json can't be read"),
        ("none", {"messages": hello}, 503, "has no tokenizer.json"),
        ("mute", {"messages": hello}, 400, "no chat template"),
        ("nobody", {"messages": hello}, 404, "no model 'nobody'"),
        ("fine", {"messages": []}, 400, "messages"),
        ("fine", {}, 400, "messages"),
        ("fine", {"messages": hello, "max_tokenz": 1}, 400, "max_tokenz"),
    ]
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        for _ in range(2):  # a failure is not remembered as something else
            for model, body, status, said in expected:
                answer = await count(served, model, **body)
                assert (answer.status, answer.body["type"]) == (status, "error"), (model, answer.body)
                assert said in answer.body["error"]["message"]
                assert answer.body["request_id"] == answer.headers["request-id"]
        (tmp_path / "m" / "broken" / "tokenizer.json").write_text(
            (tmp_path / "m" / "fine" / "tokenizer.json").read_text()
        )
        assert (await count(served, "broken", messages=hello)).body == {"input_tokens": 6}
        assert "Traceback" not in served.log()
