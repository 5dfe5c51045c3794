"""Datasets: what is asked, of which records, how often, and what becomes a line."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mlxpool.parent.jobs.dataset import asking, records, templates
from mlxpool.parent.jobs.dataset.records import RecordsError
from mlxpool.parent.jobs.dataset.task import KEY_VARIABLE
from mlxpool.parent.jobs.dataset.templates import TEMPLATES
from mlxpool.parent.jobs.kinds.dataset import Dataset, DatasetConfig
from mlxpool.parent.jobs.kinds.kind import Here
from mlxpool.parent.library import Library
from mlxpool.shared.config import Server, Settings
from tests.tools.model_folders import write_model


def test_a_text_is_cut_on_paragraph_borders() -> None:
    text = "One one.\n\nTwo two two.\r\n\r\n   \n\nThree.\n\n" + "Four is long. " * 4
    assert records.passages(text, 24) == [
        "One one.\n\nTwo two two.",
        "Three.\n\nFour is long.",
        "Four is long.",
        "Four is long.",
        "Four is long.",
    ]
    assert records.passages("word " * 5 + "x" * 30, 12) == [
        "word word",
        "word word",
        "word",
        "x" * 12,
        "x" * 12,
        "x" * 6,
    ]
    assert records.passages(" \n\n ") == []


def test_every_word_of_a_text_is_in_a_passage() -> None:
    text = "\n\n".join(f"Paragraph {at}: " + "some words. " * (at % 40) for at in range(60))
    pieces = records.passages(text)
    assert " ".join(pieces).split() == text.split()
    assert max(map(len, pieces)) <= records.PASSAGE_CHARS


def test_fields_are_put_in_their_places_and_other_braces_stay() -> None:
    prompt = 'Say {name} of {{x}} in {"json": {age}} { } {0}'
    assert templates.places(prompt) == {"name", "age"}
    filled = templates.filled(prompt, {"name": "{age}", "age": "7"})
    assert filled == 'Say {age} of {x} in {"json": 7} { } {0}'


def test_an_answer_becomes_a_line_or_nothing() -> None:
    record = {"text": "T"}
    line = templates.line(TEMPLATES["qa"], record, '{"question": " Q? ", "answer": "A."}')
    assert line == {"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."}]}
    summary = templates.line(TEMPLATES["summaries"], record, " S.\n")
    assert summary is not None
    assert summary["messages"][0]["content"].endswith("\n\nT")
    assert summary["messages"][1]["content"] == "S."
    for bad in (
        '{"question": "Q?"',
        '{"question": "Q?", "answer": " "}',
        '{"question": 1, "answer": "A"}',
        "[" * 500_000,
        "",
    ):
        assert templates.line(TEMPLATES["qa"], record, bad) is None
    assert templates.line(TEMPLATES["rewrite"], record, " \n") is None


FILES: list[tuple[str, bytes, str]] = [
    ("a.jsonl", b'{"a": "x"}\n{"b": "y"}\nnope\n[]\n{"a": ""}\n', "a.jsonl: line 2 has no text 'a' "
     "(it has b); line 3 is no JSON; line 4 is no JSON object; and 1 more"),
    ("a.jsonl", b"[" * 500_000, "a.jsonl: line 1 is no JSON"),
    ("a.jsonl", b"\n \n", "a.jsonl is empty"),
    ("a.txt", b"hello", "a.txt is a text, which has {text} alone, and the prompt wants {a}"),
    ("a.jsonl", b"\xff", "a.jsonl is no UTF-8 text, from byte 0 on"),
    ("a.jsonl", b'{"a": "x"}\n' + b" " * 4_000_001, "a.jsonl: line 2 is longer than 4.0 MB"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), FILES, ids=[said[:30] for _, _, said in FILES])
def test_an_input_that_can_not_be_used_says_where(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordsError) as caught:
        records.read(tmp_path / name, {"a"})
    assert str(caught.value) == said
    with pytest.raises(RecordsError) as caught:
        records.check(tmp_path / name, {"a"})
    assert str(caught.value) == said


def test_a_text_of_one_endless_paragraph_is_cut_as_fast_as_any(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"x" * 24_000_000)
    began_s = time.process_time()
    records.check(path, {"text"})
    looked_s = time.process_time() - began_s
    found = records.read(path, {"text"})
    read_s = time.process_time() - began_s - looked_s
    # What is left was copied for every piece: 12 s.
    assert (len(found), looked_s < 1, read_s < 4) == (12_000, True, True), (looked_s, read_s)


def test_characters_on_the_border_of_two_pieces_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_PIECE_BYTES", 2)
    path = tmp_path / "t.txt"
    path.write_text("\ufeffäöü€𝄞", encoding="utf-8")
    records.check(path, {"text"})
    assert records.read(path, {"text"}) == [{"text": "äöü€𝄞"}]
    path.write_bytes("äöü€".encode() + b"\xe2\x82")
    with pytest.raises(RecordsError, match="no UTF-8 text, from byte 9 on"):
        records.check(path, {"text"})


def test_lines_give_their_fields_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x", "n": 1.5, "rest": []}\n\n{"a": "y", "n": 2}\n')
    assert records.read(path, {"a", "n"}) == [{"a": "x", "n": "1.5"}, {"a": "y", "n": "2"}]


Reply = Callable[[int], web.Response]


@asynccontextmanager
async def api(reply: Reply) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server that answers the nth chat request with reply(n), and the bodies that it got."""
    bodies: list[Any] = []

    async def chat(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return reply(len(bodies))

    app = web.Application()
    app.router.add_post(asking.PATH, chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
    finally:
        await runner.cleanup()


def answer(text: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 3}})


def failure(status: int, message: str, **headers: str) -> web.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response({"error": {"message": message}}, status=status, headers=named)


async def test_a_busy_server_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []

    async def sleep(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(asking.asyncio, "sleep", sleep)
    replies = [
        failure(503, "it loads", Retry_After="7"),
        failure(429, "full", Retry_After="9999"),
        failure(502, "it died"),
        answer("yes"),
    ]
    async with api(lambda number: replies[number - 1]) as (url, bodies), aiohttp.ClientSession() as client:
        got = await asking.ask(client, url, {"model": "a"})
    assert got == asking.Reply("yes", 3)
    assert bodies == [{"model": "a"}] * 4
    assert [pause for pause in paused if pause] == [7, asking.MAX_PAUSE_S, asking.FIRST_PAUSE_S * 4]


async def test_nothing_is_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "FIRST_PAUSE_S", 0.0)
    async with (
        api(lambda number: failure(503, "it is lent")) as (url, bodies),
        aiohttp.ClientSession() as client,
    ):
        with pytest.raises(asking.Refusal, match=r"it is lent \(tried 8 times\)") as caught:
            await asking.ask(client, url, {})
    assert len(bodies) == asking.MAX_TRIES
    assert not caught.value.is_final


@pytest.mark.parametrize(("status", "is_final"), [(400, False), (401, True), (404, True), (500, False)])
async def test_a_request_that_is_wrong_is_asked_once(status: int, is_final: bool) -> None:
    async with api(lambda number: failure(status, "no")) as (url, bodies), aiohttp.ClientSession() as client:
        with pytest.raises(asking.Refusal, match="^no$") as caught:
            await asking.ask(client, url, {})
    assert (len(bodies), caught.value.is_final) == (1, is_final)


def here(home: Path, **server: Any) -> Here:
    settings = Settings(home=home, server=Server(**server))
    return Here(settings, Library(settings, home / "no-cache"), "cpu", own_url="http://127.0.0.1:1")


def faults(config: DatasetConfig, place: Here) -> list[tuple[str, str]]:
    return [(fault.field, fault.message) for fault in Dataset().faults(config, place)]


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "m")
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "taken.jsonl").touch()
    text = tmp_path / "t.txt"
    text.write_text("hello")
    good = DatasetConfig(model="m", input=str(text))
    assert faults(good, here(tmp_path)) == []
    told = faults(
        DatasetConfig(model="mm", input="t.txt", name="taken", template="qa", prompt="no field"),
        here(tmp_path),
    )
    assert [field for field, _ in told] == ["name", "model", "template", "prompt", "input"]
    assert "there is a dataset 'taken' already" in told[0][1]
    assert told[3][1] == "it names no field, so each answer would be to the same; use {text}"
    wanted = faults(DatasetConfig(model="m", input=str(text), prompt="{word}"), here(tmp_path))
    assert wanted == [("input", "t.txt is a text, which has {text} alone, and the prompt wants {word}")]
    for name in ("../x", "a/b", ".hidden", "a\x00b", "x" * 300):
        assert [
            field for field, _ in faults(DatasetConfig(model="m", input=str(text), name=name), here(tmp_path))
        ] == ["name"]


def test_the_key_is_never_on_the_command_line(tmp_path: Path) -> None:
    config = DatasetConfig(model="m", input="/data/rhine.txt", seed=4)
    place = here(tmp_path, api_keys=("secret-key", "other"))
    argv = Dataset().argv(config, place)
    assert not any("secret-key" in word for word in argv)
    assert Dataset().env(config, place) == {KEY_VARIABLE: "secret-key"}
    assert Dataset().env(config, here(tmp_path)) == {}
    task = json.loads(argv[-1])
    assert (task["url"], task["seed"]) == ("http://127.0.0.1:1", 4)
    assert task["target"] == str(tmp_path / "datasets" / "rhine-qa.jsonl")
    assert not Dataset().needs(config, place).gpu
