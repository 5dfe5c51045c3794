"""Adapters through the server: found, mounted, asked for in every way there is, replaced, taken away."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.tools import tiny_adapters
from tests.tools.served import Answer, Served, chat_body, serve
from tests.tools.tiny_fixture import TinyModels

# One server for all of these, and its loop with it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "tell me a story"
GREEDY = {"temperature": 0, "max_tokens": 12}
CONFIG = """
[defaults]
model = "base"
[aliases]
"boss" = "set:b"
"gpt-*" = "base"
[models."set"]
adapters = "a"
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    models = root / "models"
    for name in ("base", "set"):
        shutil.copytree(tiny("llama"), models / name)
    for seed, name in enumerate(("a", "b", "c"), 1):
        tiny_adapters.make(root / "home" / "adapters" / name, seed)
    tiny_adapters.make(models / "beside" / "mine", 9)
    tiny_adapters.make(root / "elsewhere" / "mine", 9)
    async with serve(root, models=models, config=CONFIG) as server:
        yield server


async def said(served: Served, model: str | None = "base", **fields: Any) -> str:
    return (await served.chat(model, PROMPT, **GREEDY, **fields)).text


def refused(answer: Answer) -> tuple[int, str, str | None]:
    return answer.status, answer.body["error"]["code"], answer.body["error"]["param"]


async def mounted(served: Served, model: str = "base") -> list[str]:
    answer = await served.request("GET", f"/v1/adapters?model={model}")
    assert answer.status == 200
    return [one["id"] for one in answer.body["data"]]


async def test_a_model_that_is_not_loaded_has_none_mounted_and_tells_which_fit(served: Served) -> None:
    assert await mounted(served) == []
    assert refused(await served.request("DELETE", "/v1/adapters/a?model=base"))[:2] == (404, "not_found")
    answer = await served.request("GET", "/v1/adapters/available")
    assert answer.body["model"] == "base"
    first = answer.body["data"][0]
    assert (first["id"], first["fits"], first["rank"], first["layers"]) == ("a", True, 4, 6)
    assert await served.state("base") == "absent"


async def test_an_adapter_is_asked_for_by_field_by_name_and_by_alias(served: Served) -> None:
    plain, with_b = await said(served), await said(served, adapter="b")
    assert plain != with_b
    named = await served.chat("base:b", PROMPT, **GREEDY)
    assert (named.text, named.body["model"]) == (with_b, "base:b")
    assert await said(served, "boss") == with_b
    assert await said(served, adapter="none") == await said(served, "base:none") == plain
    both = await said(served, adapter="a+b")
    assert both not in (plain, with_b)
    assert await said(served, "base:b+a", adapter="a+b") == both
    assert "b" in await mounted(served)


async def test_the_settings_choose_for_who_asks_nothing(served: Served) -> None:
    assert await said(served, "set") == await said(served, adapter="a") != await said(served)
    assert await said(served, "set", adapter="none") == await said(served)
    answer = await served.request("GET", "/v1/adapters?model=set")
    assert {one["id"]: one["default"] for one in answer.body["data"]} == {"a": True, "b": False}
    assert {one["model"] for one in answer.body["data"]} == {"set"}


async def test_every_protocol_takes_it(served: Served) -> None:
    ask = {"model": "base", "adapter": "b", **GREEDY}
    chat = await said(served, adapter="b")
    messages = [{"role": "user", "content": PROMPT}]
    answer = await served.request("POST", "/v1/messages", {**ask, "messages": messages})
    assert answer.body["content"][0]["text"] == chat
    body = {"model": "base:b", "input": PROMPT, "temperature": 0, "max_output_tokens": 12, "store": False}
    answer = await served.request("POST", "/v1/responses", body)
    assert answer.body["output"][0]["content"][0]["text"] == chat
    texts = set()
    for adapter in ("none", "b"):
        asked = {**ask, "prompt": PROMPT, "adapter": adapter}
        answer = await served.request("POST", "/v1/completions", asked)
        texts.add(answer.body["choices"][0]["text"])
    assert len(texts) == 2


async def test_models_are_listed_with_the_adapters_that_fit(served: Served) -> None:
    listed = (await served.request("GET", "/v1/models")).body["data"]
    names = [entry["id"] for entry in listed]
    assert [name for name in names if name.startswith("base")] == ["base", "base:a", "base:b", "base:c"]
    entry = next(entry for entry in listed if entry["id"] == "base:a")
    assert (entry["adapter"], entry["capabilities"]["adapters"]) == ("a", True)
    one = (await served.request("GET", "/v1/models/base:a+b")).body
    assert (one["id"], one["adapter"]) == ("base:a+b", "a+b")


@pytest.mark.parametrize(
    ("model", "fields", "refusal", "says"),
    [
        ("base", {"adapter": "nope"}, (400, "invalid_request", "adapter"), "there are a, b, c"),
        ("base", {"adapter": "../a"}, (400, "invalid_request", "adapter"), "'../a' is no id"),
        ("base", {"adapter": "a+none"}, (400, "invalid_request", "adapter"), "can't be joined"),
        ("base", {"adapter": "a+a"}, (400, "invalid_request", "adapter"), "twice"),
        ("base", {"adapter": ""}, (400, "invalid_request", "adapter"), "no id"),
        ("base", {"adapter": ["a"]}, (400, "invalid_request", "adapter"), "must be an adapter's id"),
        ("base:a", {"adapter": "b"}, (400, "invalid_request", "adapter"), "contradicts 'a'"),
        ("base:nope", {}, (404, "model_not_found", "model"), "there are a, b, c"),
        ("nope:a", {}, (404, "model_not_found", "model"), "no model 'nope:a'"),
    ],
)
async def test_what_there_is_not_is_refused_by_name(
    served: Served, model: str, fields: dict[str, Any], refusal: tuple[int, str, str], says: str
) -> None:
    answer = await served.chat(model, PROMPT, **fields)
    assert refused(answer) == refusal
    assert says in answer.body["error"]["message"]


async def test_a_model_with_an_adapter_is_not_pinned_as_an_alias(served: Served) -> None:
    answer = await served.request("POST", "/api/models/base:a/pin", {})
    assert (answer.status, answer.code) == (404, "model_not_found")
    assert "'base:a' is a model with an adapter; use the model's own name, 'base'" in str(answer.body)


async def test_a_pattern_goes_behind_a_model_with_its_adapter(served: Served) -> None:
    assert (await served.chat("gpt-x:y", PROMPT, **GREEDY)).text == await said(served)


async def test_one_is_mounted_and_unmounted_on_request(served: Served) -> None:
    made = await served.request("POST", "/v1/adapters", {"id": "c", "model": "base"})
    assert made.status == 200
    assert (made.body["object"], made.body["id"], made.body["model"]) == ("adapter", "c", "base")
    assert (made.body["rank"], made.body["scale"], made.body["layers"]) == (4, 2.0, 6)
    assert "c" in await mounted(served)
    gone = await served.request("DELETE", "/v1/adapters/c?model=base")
    assert gone.body == {"id": "c", "object": "adapter", "deleted": True}
    assert "c" not in await mounted(served)
    assert refused(await served.request("DELETE", "/v1/adapters/c?model=base"))[:2] == (404, "not_found")


async def test_one_from_a_folder_of_models_is_mounted_by_its_path_and_others_are_not(served: Served) -> None:
    models = served.home.parent / "models"
    body = {"id": "mine", "model": "base", "path": str(models / "beside" / "mine")}
    assert (await served.request("POST", "/v1/adapters", body)).status == 200
    assert await said(served, adapter="mine") not in (await said(served), await said(served, adapter="b"))
    outside = str(served.home.parent / "elsewhere" / "mine")
    (models / "link").symlink_to(outside)
    (served.home / "adapters" / "out").symlink_to(outside)
    for path in (outside, str(models / "link"), str(models / "beside" / ".." / ".." / "elsewhere" / "mine"),
                 "/etc", "/nowhere", "relative", "/nul\0", "/" + "x" * 5000):  # fmt: skip
        answer = await served.request("POST", "/v1/adapters", {**body, "id": "other", "path": path})
        assert refused(answer) == (400, "invalid_request", "path"), path
    answer = await served.chat("base", PROMPT, adapter="out")
    assert refused(answer) == (400, "invalid_request", "adapter")
    assert "leads out" in answer.body["error"]["message"]
    assert "other" not in await mounted(served)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"id": "x", "pth": "/"}, "pth"),
        ({"path": "/"}, "id"),
        ({"id": "a/b"}, "id"),
        ({"id": "none"}, "id"),
        ({"id": 1}, "id"),
        ({"id": "a", "path": 1}, "path"),
        ({"id": "a", "model": []}, "model"),
        ({"id": "zzz", "model": "base"}, "id"),
        ({"id": "a", "model": "base:b"}, "model"),
    ],
)
async def test_a_mount_that_means_nothing_is_refused(
    served: Served, body: dict[str, Any], param: str
) -> None:
    answer = await served.request("POST", "/v1/adapters", body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


async def test_bodies_and_queries_that_are_none_are_refused(served: Served) -> None:
    for raw in (b"", b"[]", b"{", b"[" * 100_000, b'{"id": "\\ud800"}'):
        assert (await served.request("POST", "/v1/adapters", data=raw)).status == 400
    assert (await served.request("GET", "/v1/adapters?modle=base")).status == 400
    assert (await served.request("GET", "/v1/adapters/available?model=nope")).status == 404


async def test_a_stream_ends_with_the_adapter_that_was_unmounted_under_it(served: Served) -> None:
    long = {"temperature": 0, "max_tokens": 300, "logit_bias": {"258": -100}}
    whole = (await served.chat("base", PROMPT, adapter="c", **long)).text
    body = chat_body("base", PROMPT, stream=True, adapter="c", **long)
    async with served.client.post(f"{served.url}/v1/chat/completions", json=body) as answer:
        first = await answer.content.readany()
        gone = await served.request("DELETE", "/v1/adapters/c?model=base")
        assert gone.status == 200
        rest = await answer.content.read()
    events = [event[6:] for event in (first + rest).decode().split("\n\n") if event]
    assert events.pop() == "[DONE]"
    text = "".join(
        choice["delta"].get("content") or "" for event in events for choice in json.loads(event)["choices"]
    )
    assert text == whole
    assert "c" not in await mounted(served)


async def test_a_replaced_file_is_another_adapter_and_another_namespace(served: Served) -> None:
    folder = served.home / "adapters" / "d"
    tiny_adapters.make(folder, 21)
    prompt = "x" * 600

    async def ask(adapter: str) -> tuple[str, int]:
        body = (await served.chat("base", prompt, adapter=adapter, **GREEDY)).body
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return body["choices"][0]["message"]["content"], cached

    first, cold = await ask("d")
    again, warm = await ask("d")
    assert (cold, first) == (0, again)
    assert warm > 500
    # The same weights under another name.
    shutil.copytree(folder, served.home / "adapters" / "e")
    assert await ask("e") == (first, warm)
    fresh = tiny_adapters.make(served.home / "adapters" / ".new", 22)
    for name in ("adapters.safetensors", "adapter_config.json"):
        os.replace(fresh / name, folder / name)
    other, cached = await ask("d")
    assert cached == 0
    assert other != first
    assert await ask("e") == (first, warm)
    shutil.rmtree(folder)
    answer = await served.chat("base", prompt, adapter="d", **GREEDY)
    assert refused(answer) == (400, "invalid_request", "adapter")
    assert "d" not in await mounted(served)


async def test_eight_requests_of_four_sets_at_once_each_get_their_own_answer(served: Served) -> None:
    sets = ["none", "a", "b", "a+b"]
    prompts = [PROMPT, "once upon a time"]
    fields = {"temperature": 0, "max_tokens": 40}
    asks = [(prompt, adapter) for prompt in prompts for adapter in sets]
    alone = [(await served.chat("base", prompt, adapter=one, **fields)).text for prompt, one in asks]
    assert len(set(alone)) == len(asks)
    together = await asyncio.gather(
        *(served.chat("base", prompt, adapter=one, **fields) for prompt, one in asks)
    )
    assert [answer.text for answer in together] == alone
    assert "turns" in {answer.body["usage"]["lane"] for answer in together}
    assert (await served.chat("base", PROMPT, adapter="a")).body["usage"]["lane"] == "batch"


async def test_files_that_are_none_are_refused_by_name_and_the_model_goes_on(
    served: Served, tmp_path: Path
) -> None:
    shelf = served.home / "adapters"
    whole = await said(served, adapter="a")

    def write(name: str, **how: Any) -> Path:
        return tiny_adapters.make(shelf / name, **how)

    (write("bad-config") / "adapter_config.json").unlink()
    cut = write("bad-cut") / "adapters.safetensors"
    cut.write_bytes(cut.read_bytes()[:-9])
    linked = write("bad-link") / "adapters.safetensors"
    linked.rename(tmp_path / "target")
    linked.symlink_to(tmp_path / "target")
    pipe = write("bad-pipe") / "adapter_config.json"
    pipe.unlink()
    os.mkfifo(pipe)
    write("bad-shape", layers={"model.layers.0.self_attn.q_proj": (64, 32)})
    write("bad-layer", layers={"model.layers.7.self_attn.q_proj": (64, 64)})
    write("bad-kind", layers={"model.embed_tokens": (288, 64)})
    write("bad-scale", scale=float("nan"))
    write("bad-huge-scale", scale=1e300)
    rank = write("bad-rank") / "adapter_config.json"
    rank.write_text(rank.read_text().replace('"rank": 4', '"rank": 1000000000'))
    zero = write("bad-zero") / "adapter_config.json"
    zero.write_text(zero.read_text().replace('"rank": 4', '"rank": 0'))
    write("bad-dora", fine_tune_type="dora")
    (write("bad-json") / "adapter_config.json").write_text("[" * 500_000)
    says = {
        "bad-config": "adapter_config.json: is missing",
        "bad-cut": "adapters.safetensors: no whole",
        "bad-link": "adapters.safetensors: is no regular file",
        "bad-pipe": "adapter_config.json: is no regular",
        "bad-shape": "is for a layer of [32, 64]",
        "bad-layer": "has no layer 'model.layers.7.self_attn.q_proj'",
        "bad-kind": "of kind Embedding",
        "bad-scale": "adapter_config.json: no JSON object",
        "bad-huge-scale": "scale is 1e+300",
        "bad-rank": "rank is 1000000000, but",
        "bad-zero": "rank is 0",
        "bad-dora": "fine_tune_type is 'dora'",
        "bad-json": "adapter_config.json: no JSON object",
    }
    for name, words in says.items():
        answer = await served.chat("base", PROMPT, adapter=name)
        assert refused(answer) == (400, "invalid_request", "adapter"), name
        assert words in answer.body["error"]["message"], answer.body
    told = (await served.request("GET", "/v1/adapters/available?model=base")).body["data"]
    assert {one["id"] for one in told if one["fits"] is False} >= {*says} - {"bad-kind"}
    assert await said(served, adapter="a") == whole
    for name in says:
        shutil.rmtree(shelf / name)
