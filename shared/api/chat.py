"""The schema of `POST /v1/chat/completions`: which fields exist, what each may hold, what it means.

One closed table says of every field whether it is honoured, accepted without effect (with the reason) or
refused until its part is built. Nothing is dropped silently: an unknown field is a 400 that names the
nearest known one, a refused field a 400 `unsupported_parameter`, unless its value is one that means
"off", which clients send all the time. `parse` turns a body into a `ChatRequest`; nothing after it looks
at JSON again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from mlxpool.shared.api import read
from mlxpool.shared.api.messages import ChatMessage
from mlxpool.shared.api.structure import Structure
from mlxpool.shared.api.tools import Tool, ToolChoice
from mlxpool.shared.errors import ApiError, error

# Enough for every client seen; each costs a scan of the ambiguous tail per token.
STOPS_LIMIT = 16

# Seeds are 64-bit: what OpenAI documents as int64, and unsigned ones that other clients draw.
SEED_LOW, SEED_HIGH = -(2**63), 2**64 - 1

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

# No context comes near it; a larger number is a mistake, and a float's rounding is exact below it.
_COUNT_HIGH = 2**53


class ChatRequest(msgspec.Struct, frozen=True):
    """A validated request. None: not given, so the server's, folder's or protocol's default applies.

    thinking: chat_template_kwargs' own word, which reasoning_effort can't overrule. template_kwargs: all of
    chat_template_kwargs but that. top_logprobs: alternatives per token, None for no log-probabilities.
    keep_alive is the pool's business and is checked there.
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


class Field(msgspec.Struct, frozen=True):
    """One row of the table. why: for accepted ones why it can't change the text, for refused ones what
    it waits for. off: whether a refused field's value asks for nothing."""

    status: Literal["honoured", "accepted", "refused"]
    why: str = ""
    off: Callable[[object], bool] = lambda value: value is None


def _one_of(*values: object) -> Callable[[object], bool]:
    """Off when null or equal to one of these; false and 0 are told apart, 0 and 0.0 are not."""

    def off(value: object) -> bool:
        return value is None or any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
        )

    return off


def _text_format(value: object) -> bool:
    return value is None or (isinstance(value, dict) and value == {"type": "text"})


def _honoured() -> Field:
    return Field("honoured")


def _accepted(why: str) -> Field:
    return Field("accepted", why)


def _refused(why: str, off: Callable[[object], bool] | None = None) -> Field:
    return Field("refused", why, off) if off else Field("refused", why)


_TOOLS = "tool calls are not built yet"
_STRUCTURE = "structured output is not built yet"
_PENALTIES = "penalties are not built yet"
_LOGPROBS = "log-probabilities are not built yet"
_MEDIA = "this server answers in text only"
_NO_EFFECT_HERE = "a label of the client's own; no part of the model's input"

FIELDS: dict[str, Field] = {
    "model": _honoured(),
    "messages": _honoured(),
    "stream": _honoured(),
    "stream_options": _honoured(),
    "max_tokens": _honoured(),
    "max_completion_tokens": _honoured(),
    "temperature": _honoured(),
    "top_p": _honoured(),
    "top_k": _honoured(),
    "min_p": _honoured(),
    "seed": _honoured(),
    "stop": _honoured(),
    "keep_alive": _accepted("how long the model stays loaded afterwards: the pool acts on it"),
    "user": _accepted(_NO_EFFECT_HERE),
    "metadata": _accepted(_NO_EFFECT_HERE),
    "safety_identifier": _accepted(_NO_EFFECT_HERE),
    "store": _accepted("stored completions belong to the Responses protocol; a chat is never stored"),
    "service_tier": _accepted("one machine has one tier"),
    "prompt_cache_key": _accepted("prefixes are found by their tokens, whatever the key"),
    "tools": _refused(_TOOLS, _one_of([])),
    "tool_choice": _refused(_TOOLS, _one_of("none", "auto")),
    # Either says something of tools alone, and those are refused by their own field.
    "parallel_tool_calls": _refused(_TOOLS, _one_of(True, False)),
    "functions": _refused(_TOOLS, _one_of([])),
    "function_call": _refused(_TOOLS, _one_of("none", "auto")),
    "response_format": _refused(_STRUCTURE, _text_format),
    "guided_grammar": _refused(_STRUCTURE),
    "guided_regex": _refused(_STRUCTURE),
    "guided_choice": _refused(_STRUCTURE),
    "guided_json": _refused(_STRUCTURE),
    "structured_outputs": _refused(_STRUCTURE),
    "logprobs": _refused(_LOGPROBS, _one_of(False)),
    "top_logprobs": _refused(_LOGPROBS, _one_of(0, -1)),
    "presence_penalty": _refused(_PENALTIES, _one_of(0)),
    "presence_context_size": _refused(_PENALTIES),
    "frequency_penalty": _refused(_PENALTIES, _one_of(0)),
    "frequency_context_size": _refused(_PENALTIES),
    "repetition_penalty": _refused(_PENALTIES, _one_of(1)),
    "repetition_context_size": _refused(_PENALTIES),
    "logit_bias": _refused("logit bias is not built yet", _one_of({})),
    "xtc_probability": _refused("XTC sampling is not built yet", _one_of(0)),
    "xtc_threshold": _refused("XTC sampling is not built yet"),
    "n": _refused("one answer per request so far; send the request again for another", _one_of(1)),
    "chat_template_kwargs": _refused("template variables are not built yet", _one_of({})),
    "reasoning_effort": _refused("reasoning is not built yet"),
    "adapter": _refused("adapters are not built yet", _one_of("none")),
    "modalities": _refused(_MEDIA, _one_of(["text"])),
    "audio": _refused(_MEDIA),
    "prediction": _refused("predicted outputs are not built"),
    "web_search_options": _refused("this server searches nothing"),
    "verbosity": _refused("verbosity is not built"),
}

_MESSAGE_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What clients send back with an assistant's message, and the values of each that say nothing.
_MESSAGE_FIELDS_OFF: dict[str, Callable[[object], bool]] = {
    "tool_calls": _one_of([]),
    "tool_call_id": _one_of(),
    "function_call": _one_of(),
    "refusal": _one_of(),
    "annotations": _one_of([]),
    "audio": _one_of(),
    "reasoning": _one_of(""),
    "reasoning_content": _one_of(""),
}
_MESSAGE_FIELDS = ("role", "content", "name", *_MESSAGE_FIELDS_OFF)


def parse(body: bytes) -> ChatRequest:
    """A body as a request. Raises ApiError 400 naming the field, its value and what would work."""
    return read_request(read.json_object(body))


def read_request(fields: dict[str, Any]) -> ChatRequest:
    """`parse` for a body that is decoded already."""
    for name, value in fields.items():
        _check_field(name, value)
    stream = read.boolean("stream", fields.get("stream"), default=False)
    return ChatRequest(
        messages=_messages(fields.get("messages")),
        model=_model(fields.get("model")),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
        max_tokens=_max_tokens(fields),
        temperature=read.number("temperature", fields.get("temperature"), 0, 2),
        top_p=read.number("top_p", fields.get("top_p"), 0, 1, above_low=True),
        top_k=read.integer("top_k", fields.get("top_k"), 0, _COUNT_HIGH),
        min_p=read.number("min_p", fields.get("min_p"), 0, 1),
        seed=read.integer("seed", fields.get("seed"), SEED_LOW, SEED_HIGH),
        stop=_stops(fields.get("stop")),
    )


def _check_field(name: str, value: object) -> None:
    field = FIELDS.get(name)
    if field is None:
        raise read.unknown_field(name, [known for known, row in FIELDS.items() if row.status != "refused"])
    if field.status == "refused" and not field.off(value):
        raise error(
            "unsupported_parameter",
            f"{name}: {read.quoted(value)} is not supported: {field.why}; leave {name} out",
            param=name,
        )


def _model(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise read.invalid("model", f"model must be a model's name, not {read.quoted(value)}")


def _include_usage(options: object, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise read.invalid("stream_options", f"stream_options must be an object, not {read.quoted(options)}")
    if not stream:
        raise read.invalid("stream_options", "stream_options goes with stream: true only; leave it out")
    for name in options:
        # Padding against traffic analysis: nothing that a loopback answer needs.
        if name not in ("include_usage", "include_obfuscation"):
            err = read.unknown_field(name, ("include_usage",))
            raise error(err.code, f"stream_options: {err.message}", param=f"stream_options.{name}")
    if read.boolean("stream_options.include_obfuscation", options.get("include_obfuscation"), False):
        raise error(
            "unsupported_parameter",
            "stream_options.include_obfuscation is not supported; leave it out",
            param="stream_options.include_obfuscation",
        )
    return read.boolean("stream_options.include_usage", options.get("include_usage"), default=False)


def _max_tokens(fields: dict[str, Any]) -> int | None:
    old = read.integer("max_tokens", fields.get("max_tokens"), 1, _COUNT_HIGH)
    new = read.integer("max_completion_tokens", fields.get("max_completion_tokens"), 1, _COUNT_HIGH)
    if old is not None and new is not None and old != new:
        raise read.invalid(
            "max_tokens",
            f"max_tokens {old} and max_completion_tokens {new} contradict each other; send one of them",
        )
    return new if old is None else old


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise read.invalid(
            "stop", f"stop must be a non-empty string or a list of them, not {read.quoted(value)}"
        )
    if len(stops) > STOPS_LIMIT:
        raise read.invalid("stop", f"stop holds {len(stops)} strings; at most {STOPS_LIMIT} work")
    return tuple(stops)


def _messages(value: object) -> tuple[ChatMessage, ...]:
    if value is None:
        raise read.invalid("messages", "messages is missing; it must be a non-empty list of messages")
    if not isinstance(value, list) or not value:
        raise read.invalid(
            "messages", f"messages must be a non-empty list of messages, not {read.quoted(value)}"
        )
    return tuple(_message(f"messages[{place}]", message) for place, message in enumerate(value))


def _message(where: str, message: object) -> ChatMessage:
    if not isinstance(message, dict):
        raise read.invalid(where, f"{where} must be an object, not {read.quoted(message)}")
    role = message.get("role")
    if role in ("tool", "function"):
        raise _unsupported(f"{where}.role", f'role "{role}"', _TOOLS)
    if not isinstance(role, str) or role not in _MESSAGE_ROLES:
        raise read.invalid(
            f"{where}.role",
            f"{where}.role must be one of {', '.join(_MESSAGE_ROLES)}, not {read.quoted(role)}",
        )
    for name, given in message.items():
        off = _MESSAGE_FIELDS_OFF.get(name)
        if off is not None and not off(given):
            raise _unsupported(f"{where}.{name}", name, "it is not built yet")
        if name not in _MESSAGE_FIELDS:
            err = read.unknown_field(name, _MESSAGE_FIELDS)
            raise error(err.code, f"{where}: {err.message}", param=f"{where}.{name}")
    speaker = message.get("name")
    if speaker is not None and not isinstance(speaker, str):
        raise read.invalid(f"{where}.name", f"{where}.name must be a string, not {read.quoted(speaker)}")
    content = _content(f"{where}.content", message.get("content"))
    return ChatMessage(msgspec.convert(_MESSAGE_ROLES[role], _Role), content, speaker)


_Role = Literal["system", "user", "assistant"]


def _unsupported(param: str, what: str, why: str) -> ApiError:
    return error("unsupported_parameter", f"{param}: {what} is not supported: {why}", param=param)


def _content(where: str, content: object) -> str:
    """Text as it is; a list of text parts as one string."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise read.invalid(
            where, f"{where} must be a string or a list of text parts, not {read.quoted(content)}"
        )
    return "".join(_part(f"{where}[{place}]", part) for place, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if not isinstance(part, dict):
        raise read.invalid(where, f"{where} must be an object like {{type: text}}, not {read.quoted(part)}")
    kind = part.get("type")
    if kind != "text":
        raise _unsupported(
            f"{where}.type", f"a part of type {read.quoted(kind)}", "this model reads text parts only"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise read.invalid(f"{where}.text", f"{where}.text must be a string, not {read.quoted(text)}")
    for name in part:
        if name not in ("type", "text"):
            err = read.unknown_field(name, ("type", "text"))
            raise error(err.code, f"{where}: {err.message}", param=f"{where}.{name}")
    return text
