"""The requests of `POST /v1/messages` and `POST /v1/messages/count_tokens`, read and checked.

A last message of the role assistant is the beginning of the answer, which goes on from its text. That and
reasoning exclude each other, as does a form for the whole answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mlxpool.shared.api import read, sampling, table
from mlxpool.shared.api.anthropic_fields import ADVICE, BUDGET, EFFORTS, FIELDS
from mlxpool.shared.api.anthropic_messages import Reading
from mlxpool.shared.api.anthropic_tools import read_choice, read_tools
from mlxpool.shared.api.asked import Asked
from mlxpool.shared.api.chat import ChatRequest, Effort, read_adapter, read_model
from mlxpool.shared.api.messages import ChatMessage
from mlxpool.shared.api.structure import Structure, read_schema, read_structure
from mlxpool.shared.api.template_kwargs import read_template_kwargs
from mlxpool.shared.api.warned import Warnings
from mlxpool.shared.errors import ApiError

_SCHEMA_FORMAT = '{"type": "json_schema", "schema": {"type": "object"}}'


class Shown(msgspec.Struct, frozen=True):
    """What the answer's writer alone needs to know. thinking: whether the text of the reasoning is wanted."""

    thinking: bool = True


class _Thinking(msgspec.Struct, frozen=True):
    enabled: bool | None = None
    budget_tokens: int | None = None
    shown: bool = True


def parse(body: bytes) -> Asked:
    """A body as a request. Raises ApiError 400 naming the field, its value and what would work."""
    return read_request(read.json_object(body))


def read_request(fields: dict[str, Any]) -> Asked:
    """`parse` for a body that is decoded already."""
    if fields.get("max_tokens") is None:
        table.check(FIELDS, fields, ADVICE)
        raise read.invalid("max_tokens", f"max_tokens is missing; it must be a {sampling.MAX_TOKENS.text}")
    return _read(fields)


def parse_count(body: bytes) -> Asked:
    """The body of a count of tokens: that of a request, of which no field but messages is needed. Nothing has
    to go on from its last message: a finished answer is counted too. Raises ApiError 400."""
    return _read(read.json_object(body), counts=True)


def _read(fields: dict[str, Any], counts: bool = False) -> Asked:
    table.check(FIELDS, fields, ADVICE)
    get = fields.get
    warnings = Warnings()
    tools = read_tools("tools", get("tools"), warnings)
    choice, parallel = read_choice("tool_choice", get("tool_choice"), tools)
    max_tokens = sampling.MAX_TOKENS.read(fields, "max_tokens")
    thinking = _thinking("thinking", get("thinking"), max_tokens)
    asked, template_kwargs = read_template_kwargs("chat_template_kwargs", get("chat_template_kwargs"))
    effort, form = _output_config("output_config", get("output_config"))
    form = _one_form(form, _form("output_format", get("output_format")))
    messages = Reading(warnings).messages(get("system"), get("messages"))
    structure = read_structure(fields, form)
    begun = messages[-1].role == "assistant"
    obstacle = _obstacle(messages[-1], thinking, asked, structure) if begun else None
    if obstacle is not None and not counts:
        raise obstacle
    request = ChatRequest(
        messages=messages,
        model=read_model(get("model")),
        stream=read.boolean("stream", get("stream"), default=False),
        max_tokens=max_tokens,
        stop=_stops("stop_sequences", get("stop_sequences")),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        structure=structure,
        thinking=thinking.enabled if asked is None else asked,
        reasoning_effort=effort,
        template_kwargs=template_kwargs,
        thinking_budget=thinking.budget_tokens,
        continues=begun and obstacle is None,
        adapter=read_adapter("adapter", get("adapter")),
        **sampling.options(fields),
    )
    return Asked(request, warnings=warnings.said(), own=Shown(thinking.shown))


def _stops(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise read.invalid(name, f"{name} must be a list of strings, not {read.quoted(value)}")
    return sampling.stops(name, value)


def _thinking(name: str, value: object, max_tokens: int | None) -> _Thinking:
    if value is None:
        return _Thinking()
    given = read.mapping(name, value, '{"type": "enabled", "budget_tokens": 1024}')
    kind = read.name_of(f"{name}.type", given.get("type"), ("enabled", "disabled", "adaptive"))
    if kind == "disabled":
        read.only(name, given, ("type",))
        return _Thinking(enabled=False)
    read.only(name, given, ("type", "display", *(("budget_tokens",) if kind == "enabled" else ())))
    display = given.get("display")
    if display is not None:
        read.name_of(f"{name}.display", display, ("summarized", "omitted"))
    budget = None
    if kind == "enabled":
        where = f"{name}.budget_tokens"
        budget = BUDGET.read({where: given.get("budget_tokens")}, where)
        if budget is None:
            raise read.invalid(where, f"{where} is missing; it must be a {BUDGET.text}")
        if max_tokens is not None and budget >= max_tokens:
            raise read.invalid(
                where,
                f"{where} {budget} must be less than max_tokens {max_tokens}, which counts the answer too",
            )
    return _Thinking(True, budget, display != "omitted")


def _output_config(name: str, value: object) -> tuple[Effort | None, Structure | None]:
    if value is None:
        return None, None
    given = read.mapping(name, value, '{"effort": "high"}')
    if given.get("task_budget") is not None:
        raise read.unsupported(
            f"{name}.task_budget",
            f"{name}.task_budget: {read.quoted(given['task_budget'])} is not supported: no tokens are "
            "counted from one request to the next; send max_tokens",
        )
    read.only(name, given, ("effort", "format", "task_budget"))
    effort: Effort | None = None
    if given.get("effort") is not None:
        said = read.name_of(f"{name}.effort", given["effort"], tuple(EFFORTS))
        effort = msgspec.convert(EFFORTS[said], Effort)
    return effort, _form(f"{name}.format", given.get("format"))


def _form(name: str, value: object) -> Structure | None:
    if value is None:
        return None
    given = read.mapping(name, value, _SCHEMA_FORMAT)
    read.name_of(f"{name}.type", given.get("type"), ("json_schema",))
    read.only(name, given, ("type", "schema"))
    if given.get("schema") is None:
        raise read.invalid(
            f"{name}.schema", f'{name}.schema is missing; it must be a JSON schema like {{"type": "object"}}'
        )
    # The protocol knows no other: what it can't enforce it refuses.
    return Structure("json_schema", name, read_schema(f"{name}.schema", given["schema"]), strict=True)


def _one_form(new: Structure | None, old: Structure | None) -> Structure | None:
    if new is not None and old is not None and new.value != old.value:
        raise read.invalid(
            old.field, f"{old.field} and {new.field} contradict each other; send {new.field} alone"
        )
    return new or old


def _obstacle(
    last: ChatMessage, thinking: _Thinking, asked: bool | None, structure: Structure | None
) -> ApiError | None:
    """Why the answer can't go on from `last`, which is the assistant's. asked: chat_template_kwargs' word on
    thinking, which goes before the protocol's own."""
    if last.tool_calls:
        return read.invalid(
            "messages",
            "messages ends with a tool_use that has no tool_result; send its result in a user's message",
        )
    if not last.content:
        return read.invalid(
            "messages", "messages ends with an assistant's message without text, from which nothing goes on"
        )
    if thinking.enabled if asked is None else asked:
        field = "thinking" if asked is None else "chat_template_kwargs"
        return read.invalid(
            field,
            f"{field} asks for thinking, which comes before an answer, but messages ends with the beginning "
            'of one; end with a user\'s message, or send thinking {"type": "disabled"} alone',
        )
    if structure is not None:
        return read.invalid(
            structure.field,
            f"{structure.field} is the form of a whole answer, but messages ends with the beginning of one; "
            "end with a user's message",
        )
    return None
