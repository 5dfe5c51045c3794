"""From a body to plans: what the template is shown, and how the answer will be read and held to its form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.api import anthropic
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.control import Launch
from mlxpool.shared.errors import ApiError
from mlxpool.shared.prompt.families import families
from mlxpool.shared.prompt.rendering import Renderer
from mlxpool.worker.grammar.service import GrammarService
from mlxpool.worker.request.plan import defaults
from mlxpool.worker.request.prepare import NoRoom, Prepared, Preparer
from mlxpool.worker.wire.endpoints import read_chat
from tests.tools import tiny_models
from tests.tools.running_engine import no_adapters

# As Qwen's: a switch, tools, a history of calls.
KNOWING = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>]{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "({{ call.function.name }}:{{ call.function.arguments.x }}){% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{{ flavour or '' }}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


class Asker:
    """A preparer over a tiny tokenizer; `ask` gives the plans, `shown` the prompt's text."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.tokenizer = ChatTokenizer.open(folder)
        named = {name: settings.pop(name) for name in ("tools", "reasoning") if name in settings}
        launch = Launch("m", str(folder), "s", 4000, 4, 1, 1)
        self.grammars = GrammarService(self.tokenizer, tiny_models.VOCAB_SIZE, 4)
        self.preparer = Preparer(
            self.tokenizer,
            defaults(launch, {"temperature": 1.0}),
            Renderer(self.tokenizer, families(self.tokenizer, **named), **settings),
            self.grammars,
            no_adapters(),
        )

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> Prepared:
        given = messages or ({"role": "user", "content": "hi"},)
        body = json.dumps({"messages": given, **fields}).encode()
        return await self.preparer.prepare(read_chat, body)

    async def shown(self, *messages: dict[str, Any], **fields: Any) -> str:
        ids = (await self.ask(*messages, **fields)).plans[0].ids
        named = {tiny_models.BOS_ID: b"<|im_start|>", tiny_models.EOS_ID: b"<|im_end|>"}
        return b"".join(named.get(token) or self.tokenizer.token_bytes(token) for token in ids).decode()


Open = Callable[..., Awaitable[Asker]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    askers: list[Asker] = []

    async def open_asker(template: str = KNOWING, **settings: Any) -> Asker:
        folder = tmp_path / str(len(askers))
        folder.mkdir()
        tiny_models.tokenizer().save(str(folder / "tokenizer.json"))
        config = {"chat_template": template, "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        askers.append(Asker(folder, **settings))
        return askers[-1]

    yield open_asker
    for asker in askers:
        asker.preparer.close()
        await asker.grammars.close()


async def test_a_template_that_knows_tools_is_shown_them_and_the_calls_of_the_history(opened: Open) -> None:
    asker = await opened()
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"x": 7}'}}
    history = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    )
    shown = await asker.shown(*history, tools=[TOOL])
    assert shown.startswith("[get <tool_call>]<|im_start|>user\nhi<|im_end|>\n")
    assert "<|im_start|>assistant\n(get:7)<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n" in shown
    plan = (await asker.ask(tools=[TOOL])).plans[0]
    assert plan.format.tools == "json_tools"
    assert [tool.name for tool in plan.format.declared] == ["get"]


async def test_a_choice_of_none_shows_no_tools_and_looks_for_no_calls(opened: Open) -> None:
    asker = await opened()
    assert await asker.shown(tools=[TOOL], tool_choice="none") == await asker.shown()
    assert (await asker.ask(tools=[TOOL], tool_choice="none")).plans[0].format.tools is None


async def test_a_template_that_knows_no_tools_is_told_in_words(opened: Open) -> None:
    asker = await opened(tiny_models.CHAT_TEMPLATE)
    shown = await asker.shown(tools=[TOOL])
    assert shown.startswith("<|im_start|>system\nYou may call functions")
    assert json.dumps(TOOL) in shown
    plan = (await asker.ask(tools=[TOOL])).plans[0]
    assert plan.format.tools == "json_tools"


async def test_reasoning_begins_inside_where_the_prompt_has_opened_it(opened: Open) -> None:
    asker = await opened()
    plan = (await asker.ask()).plans[0]
    assert (plan.format.reasoning, plan.format.starts_inside) == ("think", True)
    off = (await asker.ask(reasoning_effort="none")).plans[0]
    assert (off.format.reasoning, off.format.starts_inside) == ("think", False)
    assert plan.sampling.temperature == 1.0
    assert off.sampling.temperature == 0.7


async def test_the_servers_default_is_overruled_by_the_request(opened: Open) -> None:
    asker = await opened(thinking_default=False)
    assert not (await asker.ask()).plans[0].format.starts_inside
    on = await asker.ask(chat_template_kwargs={"enable_thinking": True})
    assert on.plans[0].format.starts_inside


async def test_a_template_variable_reaches_the_template_or_is_refused_by_name(opened: Open) -> None:
    asker = await opened()
    assert (await asker.shown(chat_template_kwargs={"flavour": "mint"})).endswith("mint")
    with pytest.raises(
        ApiError, match="flavor is not supported.*it reads enable_thinking, flavour"
    ) as caught:
        await asker.ask(chat_template_kwargs={"flavor": "mint"})
    assert caught.value.param == "chat_template_kwargs.flavor"
    await asker.ask(chat_template_kwargs={"preserve_thinking": True})


async def test_settings_may_say_that_a_model_calls_no_tools(opened: Open) -> None:
    asker = await opened(tools="none", reasoning="none")
    with pytest.raises(ApiError) as caught:
        await asker.ask(tools=[TOOL])
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
    assert (await asker.ask()).plans[0].format.reasoning is None


async def test_a_forced_call_has_a_grammar_and_the_family_that_reads_it(opened: Open) -> None:
    asker = await opened(tools="pythonic")
    prepared = await asker.ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, n=2)
    assert prepared.held.compiled is not None
    assert prepared.plans[0].format.tools == "json_tools"
    assert prepared.plans[0].format.one_call
    assert len(prepared.plans) == 2
    one = {"type": "function", "function": {"name": "get"}}
    assert (await asker.ask(tools=[TOOL], tool_choice=one)).plans[0].format.one_call


async def test_a_strict_function_that_may_be_called_is_a_warning_and_asks_for_no_grammar(
    opened: Open,
) -> None:
    asker = await opened()
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    prepared = await asker.ask(tools=[TOOL | {"function": {**TOOL["function"], "name": "b"}}, strict])
    assert prepared.held.warnings == (
        "grammar not enforced: strict of tools[1], whose calls no tool_choice forces",
    )
    assert prepared.held.compiled is None
    assert asker.grammars.helper_pid is None
    assert prepared.plans[0].format.tools == "json_tools"
    assert (await asker.ask(tools=[strict], tool_choice="none")).held.warnings == ()


async def test_a_form_that_cannot_be_enforced_is_asked_for_in_words(opened: Open) -> None:
    asker = await opened()
    schema = {"type": "array", "uniqueItems": True}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}}
    prepared = await asker.ask(**fields)
    assert prepared.held.compiled is None
    assert "uniqueItems" in prepared.held.warnings[0]
    shown = await asker.shown({"role": "system", "content": "Be brief."}, **fields)
    assert shown.startswith("<|im_start|>system\nBe brief.\n\nAnswer with one JSON value")
    assert json.dumps(schema, separators=(",", ":")) in shown


async def test_a_prompt_without_room_is_refused_although_its_form_is_fine(opened: Open) -> None:
    asker = await opened()
    with pytest.raises(ApiError) as caught:
        await asker.ask({"role": "user", "content": "x" * 5000}, response_format={"type": "json_object"})
    assert caught.value.code == "context_length_exceeded"


# As Gemma 2's: no system, and strict turns.
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


async def test_what_the_server_adds_is_never_what_a_template_refuses(opened: Open) -> None:
    asker = await opened(STRICT)
    assert (await asker.shown(tools=[TOOL])).startswith("<|im_start|>user\nYou may call functions")
    calls = [
        {"id": name, "type": "function", "function": {"name": "get", "arguments": "{}"}}
        for name in ("a", "b")
    ]
    shown = await asker.shown(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        tools=[TOOL],
    )
    assert "<tool_response>\n1\n</tool_response>\n\n<tool_response>\n2\n</tool_response><|im_end|>" in shown
    schema = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    assert (await asker.shown(response_format=form)).startswith("<|im_start|>user\nAnswer with one JSON")
    with pytest.raises(ApiError, match="System role not supported"):
        await asker.ask({"role": "system", "content": "x"}, {"role": "user", "content": "y"}, tools=[TOOL])


async def test_tools_and_a_form_that_cannot_be_enforced_are_both_told(opened: Open) -> None:
    asker = await opened(tiny_models.CHAT_TEMPLATE)
    schema = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    shown = await asker.shown(tools=[TOOL], response_format=form)
    assert shown.count("<|im_start|>system") == 1
    assert "You may call functions" in shown
    assert "conforms to this JSON schema" in shown


async def test_a_form_asked_for_in_words_that_leaves_no_room_is_named_and_not_the_messages(
    opened: Open,
) -> None:
    asker = await opened()
    names = {f"property number {number}": {"uniqueItems": True} for number in range(120)}
    schema = {"type": "object", "properties": names}
    with pytest.raises(ApiError) as caught:
        await asker.ask(
            response_format={"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
        )
    refusal = caught.value
    assert (refusal.code, refusal.param) == ("context_length_exceeded", "response_format")
    assert refusal.message.startswith("This model's maximum context length is 4000 tokens. However, ")
    alone = len((await asker.ask()).plans[0].ids)
    for told in (refusal.message, refusal.anthropic or ""):
        assert "uniqueItems" in told
        assert told.endswith(f"without the words that ask for it instead there are {alone} tokens")
    assert (refusal.anthropic or "").startswith("prompt is too long: ")


async def test_messages_that_leave_no_room_are_named_and_not_the_form_asked_for_in_words(
    opened: Open,
) -> None:
    asker = await opened()
    schema = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    for length in (5_000, 200_000):
        with pytest.raises(NoRoom) as caught:
            await asker.ask({"role": "user", "content": "x" * length}, response_format=form)
        assert caught.value.param == "messages"
        assert "response_format" not in caught.value.message
        assert caught.value.prepared.request.messages[0].content == "x" * length


async def test_another_refusal_is_not_the_forms_fault(opened: Open) -> None:
    asker = await opened()
    schema = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    with pytest.raises(ApiError) as caught:
        await asker.ask(response_format=form, logit_bias={"99999999": 1})
    assert (caught.value.code, caught.value.param) == ("invalid_request", "logit_bias")


async def test_an_answer_that_goes_on_from_a_given_beginning_has_no_place_for_reasoning(opened: Open) -> None:
    asker = await opened()
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    tools = [{"name": "get", "input_schema": TOOL["function"]["parameters"]}]
    body = {"max_tokens": 9, "messages": turns, "tools": tools, "tool_choice": {"type": "any"}}
    prepared = await asker.preparer.prepare(anthropic.parse, json.dumps(body).encode())
    assert prepared.request.continues
    assert prepared.held.compiled is not None
    assert prepared.plans[0].format.reasoning is None
    for begins, may in (("<tool", True), ("<think", False)):
        constraint = prepared.held.compiled.constraint()
        assert all(constraint.accept(token) for token in asker.tokenizer.encode(begins)) is may
        constraint.release()


async def test_a_function_without_parameters_is_forced_to_take_none(opened: Open) -> None:
    asker = await opened()
    tool = {"type": "function", "function": {"name": "stop"}}
    held = (await asker.ask(tools=[tool], tool_choice="required", reasoning_effort="none")).held
    assert held.compiled is not None
    constraint = held.compiled.constraint()
    for byte in b'<tool_call>\n{"name": "stop", "arguments": {':
        assert constraint.accept(asker.tokenizer.encode(chr(byte))[0])
    assert not constraint.accept(asker.tokenizer.encode('"')[0])
    constraint.release()


async def test_a_form_without_a_place_for_reasoning_is_all_answer(opened: Open) -> None:
    asker = await opened()
    off = await asker.ask(reasoning_effort="none", guided_choice=["<think>a</think>b"])
    assert off.plans[0].format.reasoning is None
    assert (await asker.ask(guided_choice=["a"])).plans[0].format.reasoning == "think"
