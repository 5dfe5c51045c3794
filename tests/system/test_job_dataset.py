"""Datasets made by a server's own models: lines that training reads, in the order of their records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mlxpool.shared import training_lines
from tests.tools.scripted_script import expected_text, make_scripted_model
from tests.tools.served import Served, serve, until
from tests.tools.tiny_fixture import TinyModels

KEY = "a-key-of-this-test"
PASSAGE = "The Rhine is a river in Europe. It begins in the Alps and ends in the North Sea.\n"


async def submit(served: Served, headers: dict[str, str] | None = None, **config: Any) -> str:
    answer = await served.request(
        "POST", "/api/jobs", {"kind": "dataset", "config": config}, **(headers or {})
    )
    assert answer.status == 202, answer.body
    return str(answer.body["id"])


async def until_ended(served: Served, job: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {}

    async def ended() -> bool:
        row.update((await served.request("GET", f"/api/jobs/{job}", **(headers or {}))).body)
        return row["status"] not in ("queued", "running")

    await until(ended, 90, lambda: str(row))
    return row


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_model_under_the_grammar_writes_questions_and_answers(
    tmp_path: Path, tiny: TinyModels
) -> None:
    # Random weights: only the grammar makes lines of what they say.
    folder = tiny("llama")
    text = tmp_path / "rhine.txt"
    text.write_text(PASSAGE)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with serve(tmp_path, models=folder.parent, env={"MLXPOOL_SERVER_API_KEYS": KEY}) as served:
        job = await submit(
            served,
            headers,
            model=folder.name,
            input=str(text),
            count=2,
            max_tokens=2000,
            seed=3,
            temperature=1,
        )
        row = await until_ended(served, job, headers)
        assert row["status"] == "done", row
        file = tmp_path / "home" / "datasets" / "rhine-qa.jsonl"
        tokens = row["result"].pop("tokens")
        assert row["result"] == {"dataset": "rhine-qa", "path": str(file), "lines": 2, "failed": 0}
        said = [line["messages"] for line in lines_of(file)]
        assert [[message["role"] for message in line] for line in said] == [["user", "assistant"]] * 2
        assert said[0] != said[1]
        assert tokens > sum(len(message["content"]) for line in said for message in line) / 4
        assert len(training_lines.read(file, mask_prompt=True)) == 2


async def test_each_record_gives_its_line_in_order(tmp_path: Path) -> None:
    make_scripted_model(tmp_path / "models", "a")
    records = tmp_path / "names.jsonl"
    records.write_text("".join(json.dumps({"name": f"n{at}", "age": at}) + "\n" for at in range(9)))
    async with serve(tmp_path, models=tmp_path / "models", scripted=True) as served:
        job = await submit(
            served, model="a", input=str(records), prompt="{name} is {age}?", count=12, name="x"
        )
        row = await until_ended(served, job)
        assert (row["status"], row["result"]["lines"]) == ("done", 12), row
        asked = [f"n{at % 9} is {at % 9}?" for at in range(12)]
        assert lines_of(tmp_path / "home" / "datasets" / "x.jsonl") == [
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": expected_text("a", question).strip()},
                ]
            }
            for question in asked
        ]


async def test_a_cancelled_dataset_leaves_nothing(tmp_path: Path) -> None:
    make_scripted_model(tmp_path / "models", "slow", tokens=10_000, tokens_per_s=5)
    text = tmp_path / "text.txt"
    text.write_text(PASSAGE)
    async with serve(tmp_path, models=tmp_path / "models", scripted=True) as served:
        job = await submit(served, model="slow", input=str(text), template="rewrite", name="half")
        datasets = tmp_path / "home" / "datasets"
        await until(lambda: datasets.is_dir() and os.listdir(datasets) == [".half.jsonl.part"], 60)
        await served.request("POST", f"/api/jobs/{job}/cancel")
        assert (await until_ended(served, job))["status"] == "cancelled"
        assert os.listdir(datasets) == []


async def test_answers_that_are_no_lines_fail_the_job_with_the_reason(tmp_path: Path) -> None:
    make_scripted_model(tmp_path / "models", "prose")
    text = tmp_path / "text.txt"
    text.write_text(PASSAGE)
    async with serve(tmp_path, models=tmp_path / "models", scripted=True) as served:
        row = await until_ended(served, await submit(served, model="prose", input=str(text), template="qa"))
        assert row["status"] == "failed"
        assert row["error"].startswith("1 records in a row gave no line; the last: the answer is no line: ")
        assert os.listdir(tmp_path / "home" / "datasets") == []
