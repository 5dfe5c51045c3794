"""The request of `POST /v1/responses`, read and checked.

A worker's part of it: the conversation is whole, `store` and `background` are echoed and nothing more. What
a response echoes, and what the model's names for tools stand for, goes to the writer as `ResponseOwn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mlxpool.shared.api import read, sampling, table
from mlxpool.shared.api.asked import Asked
from mlxpool.shared.api.chat import ChatRequest, read_adapter, read_effort, read_model
from mlxpool.shared.api.response_fields import (
    ADVICE,
    FIELDS,
    INCLUDES,
    LOGPROBS,
    SEALED,
)
from mlxpool.shared.api.response_input import read_input
from mlxpool.shared.api.response_object import SUMMARIES, VERBOSITIES
from mlxpool.shared.api.response_tools import Declarations, ToolName, choose
from mlxpool.shared.api.stream_options import read_stream_options
from mlxpool.shared.api.structure import Structure, read_format, read_structure
from mlxpool.shared.api.template_kwargs import read_template_kwargs
from mlxpool.shared.api.warned import Warnings


class ResponseOwn(msgspec.Struct, frozen=True):
    """What the writer needs. fields: of the body, for the object to echo. names: the tools by the names that
    the model calls them by. summary: reasoning is told as a summary. sealed: reasoning items hold what the
    client hands back."""

    fields: dict[str, Any]
    names: dict[str, ToolName] = {}
    summary: bool = False
    sealed: bool = False


def parse(body: bytes) -> Asked:
    """A body as what is asked. Raises ApiError 400 naming the field, its value and what would work."""
    return read_request(read.json_object(body))


def read_request(fields: dict[str, Any]) -> Asked:
    """`parse` for a body that is decoded already."""
    table.check(FIELDS, fields, ADVICE)
    get = fields.get
    if get("previous_response_id") is not None:
        raise read.unsupported(
            "previous_response_id",
            f"previous_response_id {read.quoted(get('previous_response_id'))} is for the server that keeps "
            "responses to resolve; a worker takes the whole conversation as input",
        )
    for name in ("store", "background"):
        read.boolean(name, get(name), default=False)
    stream = read.boolean("stream", get("stream"), default=False)
    read_stream_options(get("stream_options"), stream)
    warnings = Warnings()
    declarations = Declarations(warnings)
    declarations.read("tools", get("tools"))
    messages = read_input(get("input"), get("instructions"), declarations, warnings)
    tools, choice = choose("tool_choice", get("tool_choice"), declarations, warnings)
    thinking, template_kwargs = read_template_kwargs("chat_template_kwargs", get("chat_template_kwargs"))
    effort, summary = _reasoning(get("reasoning"))
    included = _include(get("include"), warnings)
    if get("context_management"):
        warnings.add("context_management", "nothing is compacted by itself")
    request = ChatRequest(
        messages=messages,
        model=read_model(get("model")),
        stream=stream,
        max_tokens=sampling.max_tokens(fields, "max_output_tokens"),
        stop=sampling.stops("stop", get("stop")),
        top_logprobs=_top_logprobs(fields, LOGPROBS in included),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=read.boolean("parallel_tool_calls", get("parallel_tool_calls"), default=True),
        structure=_structure(fields, warnings),
        reasoning_effort=read_effort("reasoning.effort", effort),
        thinking_budget=sampling.THINKING_BUDGET.read(fields, "thinking_budget"),
        prompt_field="input",
        adapter=read_adapter("adapter", get("adapter")),
        thinking=thinking,
        template_kwargs=template_kwargs,
        **sampling.options(fields),
    )
    echoed = {name: value for name, value in fields.items() if name != "input"}
    own = ResponseOwn(echoed, declarations.names, summary, SEALED in included)
    return Asked(request, warnings=warnings.said(), own=own)


def _reasoning(value: object) -> tuple[object, bool]:
    """(effort as it was sent, whether a summary is asked for)."""
    if value is None:
        return None, False
    given = read.mapping("reasoning", value, '{"effort": "low"}')
    read.only("reasoning", given, ("effort", "summary", "generate_summary", "context", "mode"))
    asked = [
        read.name_of(f"reasoning.{name}", given[name], SUMMARIES)
        for name in ("summary", "generate_summary")
        if given.get(name) is not None
    ]
    _only_value("reasoning.context", given, "auto", "which reasoning is shown again is the template's choice")
    _only_value("reasoning.mode", given, "standard", "there is one mode of reasoning")
    return given.get("effort"), bool(asked)


def _only_value(where: str, given: Mapping[str, Any], value: str, why: str) -> None:
    sent = given.get(where.rpartition(".")[2])
    if sent is not None and sent != value:
        raise read.unsupported(
            where, f"{where} {read.quoted(sent)} is not supported: {why}; send {value}, or leave it out"
        )


def _include(value: object, warnings: Warnings) -> frozenset[str]:
    if value is None:
        return frozenset()
    if not isinstance(value, list):
        raise read.invalid("include", f"include must be a list of strings, not {read.quoted(value)}")
    names = [read.name_of(f"include[{place}]", name, INCLUDES) for place, name in enumerate(value)]
    for place, name in enumerate(names):
        if name not in (SEALED, LOGPROBS):
            warnings.add(f"include[{place}]", f"{name} is of what this server doesn't do")
    return frozenset(names)


def _top_logprobs(fields: Mapping[str, Any], included: bool) -> int | None:
    top = sampling.ALTERNATIVES.read(fields, "top_logprobs")
    if included or (top is not None and top > 0):
        return top or 0
    return None


def _structure(fields: Mapping[str, Any], warnings: Warnings) -> Structure | None:
    """The form that wins; `text.format` ranks as chat's response_format does."""
    text = fields.get("text")
    asked = None
    if text is not None:
        given = read.mapping("text", text, '{"format": {"type": "json_object"}}')
        read.only("text", given, ("format", "verbosity"))
        asked = read_format("text.format", given.get("format"))
        verbosity = given.get("verbosity")
        if verbosity is not None and read.name_of("text.verbosity", verbosity, VERBOSITIES) != "medium":
            warnings.add("text.verbosity", f"{verbosity} is not built; say it in instructions")
    return read_structure(fields, asked)
