"""The request of `POST /v1/chat/completions`, read and checked.

`parse` turns a body into a `ChatRequest`; nothing after it looks at JSON again. Which fields exist and what
becomes of each is the table's business (`chat_fields`); the readers of values know no protocol, and other
protocols use them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mlxpool.shared.adapters import read_set
from mlxpool.shared.api import read, sampling, table
from mlxpool.shared.api.chat_fields import ADVICE, EFFORTS, FIELDS
from mlxpool.shared.api.chat_messages import read_messages
from mlxpool.shared.api.messages import ChatMessage
from mlxpool.shared.api.stream_options import read_stream_options
from mlxpool.shared.api.structure import Structure, read_structure
from mlxpool.shared.api.template_kwargs import read_template_kwargs
from mlxpool.shared.api.tools import Tool, ToolChoice, read_choice, read_tools

_USAGE = "include_usage"

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatRequest(msgspec.Struct, frozen=True):
    """A validated request. None: not given, so the server's, folder's or protocol's default applies.

    thinking: chat_template_kwargs' own word, which reasoning_effort can't overrule. template_kwargs: all of
    chat_template_kwargs but that. top_logprobs: alternatives per token, None for no log-probabilities.
    thinking_budget: tokens of reasoning, after which it is ended. usual_max_tokens: the ceiling where neither
    the request nor the server sets one. adapter: a set as `adapters.read_set` reads it. continues: the last
    message is the beginning of the answer, which goes on from there. keep_alive is the pool's business; here
    it is only checked. prompt_field: what the wire calls the conversation, for errors about its length.
    """

    messages: tuple[ChatMessage, ...]
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    repetition_penalty: float | None = None
    repetition_context: int | None = None
    presence_penalty: float | None = None
    presence_context: int | None = None
    frequency_penalty: float | None = None
    frequency_context: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    n: int = 1
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    structure: Structure | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None
    template_kwargs: dict[str, Any] = {}
    thinking_budget: int | None = None
    usual_max_tokens: int | None = None
    adapter: str | None = None
    continues: bool = False
    prompt_field: str = "messages"


def parse(body: bytes) -> ChatRequest:
    """A body as a request. Raises ApiError 400 naming the field, its value and what would work."""
    return read_request(read.json_object(body))


def read_request(fields: dict[str, Any]) -> ChatRequest:
    """`parse` for a body that is decoded already."""
    table.check(FIELDS, fields, ADVICE)
    get = fields.get
    tools = read_tools("tools", get("tools"))
    thinking, template_kwargs = read_template_kwargs("chat_template_kwargs", get("chat_template_kwargs"))
    return ChatRequest(
        messages=read_messages(get("messages")),
        model=read_model(get("model")),
        max_tokens=sampling.max_tokens(fields, "max_tokens", "max_completion_tokens"),
        stop=sampling.stops("stop", get("stop")),
        top_logprobs=sampling.top_logprobs(fields),
        tools=tools,
        tool_choice=read_choice("tool_choice", get("tool_choice"), tools),
        parallel_tool_calls=read.boolean("parallel_tool_calls", get("parallel_tool_calls"), default=True),
        structure=read_structure(fields),
        thinking=thinking,
        reasoning_effort=read_effort("reasoning_effort", get("reasoning_effort")),
        template_kwargs=template_kwargs,
        thinking_budget=sampling.THINKING_BUDGET.read(fields, "thinking_budget"),
        adapter=read_adapter("adapter", get("adapter")),
        **answers(fields),
        **sampling.options(fields),
    )


def answers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """How many answers OpenAI's chat and completions are to give, and whether streamed, by the names of
    `ChatRequest`. Raises ApiError 400."""
    stream = read.boolean("stream", fields.get("stream"), default=False)
    options = read_stream_options(fields.get("stream_options"), stream, _USAGE)
    n = sampling.CHOICES.read(fields, "n")
    return {
        "stream": stream,
        "include_usage": read.boolean(f"stream_options.{_USAGE}", options.get(_USAGE), default=False),
        "n": 1 if n is None else n,
    }


def read_model(value: object) -> str | None:
    """A model's name; null is None."""
    if value is None or isinstance(value, str):
        return value
    raise read.invalid("model", f"model must be a model's name, not {read.quoted(value)}")


def read_adapter(name: str, value: object) -> str | None:
    """A set of adapters; null is None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise read.invalid(name, f"{name} must be an adapter's id, not {read.quoted(value)}")
    try:
        read_set(value)
    except ValueError as problem:
        raise read.invalid(name, f"{name} {problem}") from None
    return value


def read_effort(name: str, value: object) -> Effort | None:
    """How deep to think; null is None."""
    if value is None:
        return None
    effort: Effort = msgspec.convert(read.name_of(name, value, EFFORTS), Effort)
    return effort
