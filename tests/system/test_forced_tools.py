"""Calls that must be made, by the starter, through the official client: each fits its declared schema."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.tools.served import serve

# Minutes where two busy cores are shared.
pytestmark = [pytest.mark.starter, pytest.mark.timeout(900)]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": ["tea", "cake"]}},
        "note": {"type": ["string", "null"], "maxLength": 12},
        "express": {"type": "boolean"},
    },
    "required": ["items", "express"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "place_order": ORDER}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
PROMPTS = [
    "What is the weather in Oslo?", "Order two teas.", "Tell me a story about a {json} file.",
    "weather weather weather", "No tools, please.",
]  # fmt: skip
ONE: Any = {"type": "function", "function": {"name": "place_order"}}


@pytest.fixture
def starter(starter_folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-135m").symlink_to(starter_folder)
    return tmp_path / "models"


async def test_twenty_of_twenty_forced_calls_fit_their_schemas(tmp_path: Path, starter: Path) -> None:
    async with serve(tmp_path, models=starter) as served:
        client = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", _strict_response_validation=True
        )

        async def ask(prompt: str, choice: Any, stream: bool) -> tuple[str, str, str, str]:
            """The first call's name, arguments and id, and the finish reason."""
            asked: dict[str, Any] = {
                "model": "smollm2-135m", "messages": [{"role": "user", "content": prompt}], "tools": TOOLS,
                "tool_choice": choice, "parallel_tool_calls": False,
                "temperature": 0.8, "seed": 7, "max_tokens": 120,
            }  # fmt: skip
            if not stream:
                made = (await client.chat.completions.create(**asked)).choices[0]
                assert made.message.tool_calls
                (call,) = made.message.tool_calls
                assert call.type == "function"
                return call.function.name, call.function.arguments, call.id, made.finish_reason
            name = arguments = call_id = reason = ""
            async for chunk in await client.chat.completions.create(stream=True, **asked):
                (piece,) = chunk.choices
                assert not piece.delta.content
                for delta in piece.delta.tool_calls or ():
                    assert delta.index == 0
                    name += delta.function.name or ""
                    arguments += delta.function.arguments or ""
                    call_id += delta.id or ""
                reason += piece.finish_reason or ""
            return name, arguments, call_id, reason

        cases = [(prompt, choice) for prompt in PROMPTS for choice in ("required", ONE)]
        answers = await asyncio.gather(
            *[ask(prompt, choice, stream) for prompt, choice in cases for stream in (False, True)]
        )
        assert len(answers) == 20
        for place, (name, arguments, _, reason) in enumerate(answers):
            assert reason == "tool_calls"
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            if cases[place // 2][1] is ONE:
                assert name == "place_order"
        for whole, streamed in zip(answers[::2], answers[1::2], strict=True):
            assert (whole[0], json.loads(whole[1])) == (streamed[0], json.loads(streamed[1]))
        assert len({call_id for _, _, call_id, _ in answers}) == 20

        several = await client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "Tea and cake, then the weather."}],
            tools=TOOLS,
            tool_choice="required",
            temperature=0.8,
            seed=2,
            max_tokens=200,
        )
        calls = several.choices[0].message.tool_calls or []
        ended = several.choices[0].finish_reason
        assert ended in ("tool_calls", "length")
        for call in calls if ended == "tool_calls" else calls[:-1]:
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        assert len({call.id for call in calls}) == len(calls) >= 1

        none = await client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
            tools=TOOLS,
            tool_choice="none",
            temperature=0,
            max_tokens=10,
        )
        assert none.choices[0].message.tool_calls is None
        assert none.choices[0].message.content
        await client.close()
