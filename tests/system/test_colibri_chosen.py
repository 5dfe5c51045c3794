"""A mixture of experts that could be held, streamed because its settings say so, in the real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools import tiny_adapters, tiny_models
from tests.tools.served import Answer, Served, serve
from tests.unit import colibri_families

ASKED = "Which river runs past the library, and how often does it flood the cellar? " * 2
# What is read again and again is experts, not prompts.
SETTINGS = {"cache.ram": "0", "cache.ssd": "false"}


def moe(folder: Path) -> Path:
    """In float32, in which the CPU backend holds it too: its kernels are those of streamed experts."""
    made = colibri_families.write("qwen3_moe", folder, bits=None)
    template = {"chat_template": tiny_models.CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(template))
    return made


def config(*lines: str) -> str:
    return "\n".join(["[models.moe]", "context = 512", *lines, ""])


STREAMED = config('experts = "stream"', "slots = 3")


async def ask(served: Served) -> Answer:
    return await served.chat("moe", ASKED, temperature=0, max_tokens=12, logprobs=True)


def said(answer: Answer) -> tuple[str, list[float]]:
    """The text, and how likely each token was."""
    told = answer.body["choices"][0]["logprobs"]["content"]
    return answer.text, [token["logprob"] for token in told]


async def reload(served: Served, text: str) -> list[str]:
    (served.home / "config.toml").write_text(text)
    return list((await served.request("POST", "/api/config/reload")).body["changed"])


async def fitting(served: Served) -> tuple[list[str], list[tuple[bool, str | None]]]:
    """What is listed, and what is said of each adapter."""
    listed = (await served.request("GET", "/v1/models")).body["data"]
    found = (await served.request("GET", "/v1/adapters/available?model=moe")).body["data"]
    return [one["id"] for one in listed], [(one["fits"], one["reason"]) for one in found]


async def colibri(served: Served) -> Any:
    return (await served.request("GET", "/api/models/moe/stats")).body["colibri"]


async def test_a_model_streams_where_its_settings_say_so_and_answers_as_before(tmp_path: Path) -> None:
    moe(tmp_path / "models" / "moe")
    attention = {"model.layers.0.self_attn.q_proj": (64, 64)}
    tiny_adapters.make(tmp_path / "home" / "adapters" / "tone", layers=attention)
    async with serve(tmp_path, models=tmp_path / "models", config=config(), settings=SETTINGS) as served:
        assert await fitting(served) == (["moe", "moe:tone"], [(True, None)])
        held = await ask(served)
        assert await colibri(served) is None
        entry = (await served.request("GET", "/v1/models/moe")).body
        assert entry["capabilities"]["streamed_experts"] is False

        assert await reload(served, STREAMED) == ["models.moe.experts", "models.moe.slots"]
        streamed = await ask(served)
        # Its prompt is cut otherwise into chunks, and so rounded otherwise.
        (text, likely), (held_text, held_likely) = said(streamed), said(held)
        assert text == held_text
        assert likely == pytest.approx(held_likely, abs=1e-5)
        told = await colibri(served)
        assert (told["main"]["slots"], told["main"]["experts"], told["form"]) == (3, 8, "stacked")
        assert told["main"]["misses"] > 0
        streaming = (await served.request("GET", "/v1/models/moe")).body
        streamed_with = (["moe"], [(False, "the model's experts are streamed, which goes with no adapter")])
        assert await fitting(served) == streamed_with
        claimed = streaming["capabilities"]
        assert (claimed["streamed_experts"], claimed["adapters"], claimed["batch"]) == (True, False, False)
        assert streaming["planned_bytes"] == told["planned_bytes"] != entry["planned_bytes"]

        assert await reload(served, config()) == ["models.moe.experts", "models.moe.slots"]
        assert said(await ask(served)) == said(held)
        assert await colibri(served) is None
        assert await served.down() == 0
