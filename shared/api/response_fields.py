"""The closed table of `POST /v1/responses`: every field, and what becomes of it.

What chat has under the same name is chat's own row. The history of responses is the parent's business: it
resolves `previous_response_id`, keeps what is stored and runs what goes on in the background.
"""

from __future__ import annotations

from typing import Any

from mlxpool.shared.api import read, sampling
from mlxpool.shared.api.chat_fields import BOOL, EFFORTS, OBJECT, TEXT
from mlxpool.shared.api.chat_fields import FIELDS as CHAT
from mlxpool.shared.api.response_object import SUMMARIES, VERBOSITIES
from mlxpool.shared.api.table import Field, accepted, an_object, honoured, refused
from mlxpool.shared.api.tools import TOOLS_LIMIT
from mlxpool.shared.text import cut

SEALED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
INCLUDES = (
    SEALED,
    LOGPROBS,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)

_BOOL = "true, false"
# Chat's rows as they are.
_SAME = (
    "model", "stream", "stop", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "seed",
    "repetition_penalty", "repetition_context_size", "presence_penalty", "presence_context_size",
    "frequency_penalty", "frequency_context_size", "xtc_probability", "xtc_threshold", "logit_bias",
    "guided_grammar", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "chat_template_kwargs", "thinking_budget", "keep_alive", "user", "safety_identifier", "service_tier",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "adapter", "moderation",
)  # fmt: skip

_INPUT_ITEM = {"type": "object", "properties": {"type": TEXT}}
_TOOL = {"type": "object", "required": ["type"], "properties": {"type": TEXT}}
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["function", "custom", "allowed_tools"]}},
        },
    ]
}


def _nullable(*names: str) -> dict[str, Any]:
    return {"enum": [*names, None]}


def _metadata(name: str, value: object) -> object:
    given = read.mapping(name, value, '{"key": "value"}')
    for key, inner in given.items():
        if not isinstance(inner, str):
            raise read.invalid(
                f"{name}.{key}", f"{name}.{cut(key)} must be a string, not {read.quoted(inner)}"
            )
    return given


def _management(name: str, value: object) -> object:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise read.invalid(name, f"{name} must be a list of objects, not {read.quoted(value)}")
    return value


FIELDS: dict[str, Field] = {
    "input": honoured(
        "a string, or a non-empty list of items",
        "the conversation, or what is new in it; see below",
        "needed",
        {"anyOf": [TEXT, {"type": "array", "minItems": 1, "items": _INPUT_ITEM}]},
    ),
    "instructions": honoured(
        "a string",
        "the system message, of this response alone",
        "that of previous_response_id, else none",
        TEXT,
    ),
    "previous_response_id": honoured(
        "the id of a stored response", "its input and output go before this input", "none", TEXT
    ),
    "max_output_tokens": honoured(
        sampling.MAX_TOKENS.text,
        "the ceiling on the answer, reasoning included, clamped to the room left",
        "the room left",
        sampling.MAX_TOKENS.schema,
    ),
    "stream_options": honoured(
        '{"include_obfuscation": false}',
        "with stream: true; events are never padded",
        schema={
            "type": "object",
            "properties": {"include_obfuscation": {"enum": [False, None]}},
            "additionalProperties": False,
        },
    ),
    "tools": honoured(
        f"a list of at most {TOOLS_LIMIT} tools of type function, custom or namespace",
        "what the model may call; a tool of another type is left out with a warning",
        schema={"type": "array", "items": _TOOL, "maxItems": TOOLS_LIMIT},
    ),
    "tool_choice": honoured(
        '"none", "auto", "required", or an object of type function, custom or allowed_tools',
        "whether it must; allowed_tools: only those are shown to the model",
        '"auto"',
        _CHOICE,
    ),
    "text": honoured(
        'an object with format: {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", …}',
        "JSON, or JSON of a schema; verbosity is taken with a warning",
        schema={
            "type": "object",
            "properties": {"format": OBJECT, "verbosity": _nullable(*VERBOSITIES)},
            "additionalProperties": False,
        },
    ),
    "reasoning": honoured(
        f"an object with effort ({', '.join(EFFORTS)}) and summary ({', '.join(SUMMARIES)})",
        "how deep to think; summary: what was thought comes as the item's summary, not as its content",
        schema={
            "type": "object",
            "properties": {
                "effort": _nullable(*EFFORTS),
                "summary": _nullable(*SUMMARIES),
                "generate_summary": _nullable(*SUMMARIES),
                "context": _nullable("auto"),
                "mode": _nullable("standard"),
            },
            "additionalProperties": False,
        },
    ),
    "include": honoured(
        f"a list of {SEALED}, {LOGPROBS}",
        "what an answer holds besides; of tools that do not run here there is nothing to include",
        schema={"type": "array", "items": {"enum": list(INCLUDES)}},
    ),
    "top_logprobs": honoured(
        sampling.ALTERNATIVES.text,
        "so many of the likeliest tokens at each place; more than 0 includes log-probabilities",
        "0",
        sampling.ALTERNATIVES.schema,
    ),
    "store": honoured(_BOOL, "whether the response is kept", "true", BOOL),
    "background": honoured(_BOOL, "answer at once, and run without the client", "false", BOOL),
    **{name: CHAT[name] for name in _SAME},
    "metadata": accepted(
        "an object of strings", "a label of the client's own, echoed", _metadata,
        {"type": "object", "additionalProperties": TEXT},
    ),
    "client_metadata": accepted("an object", "what an agent notes for its vendor", an_object, OBJECT),
    "context_management": accepted(
        "a list of objects",
        "nothing is compacted by itself: a prompt that is too long is refused, and POST "
        "/v1/responses/compact makes it short",
        _management,
        {"type": "array", "items": OBJECT},
    ),
    "truncation": refused(
        "nothing is cut from a conversation",
        "disabled",
        instead="send disabled, and compact the conversation",
    ),
    "max_tool_calls": refused("only tools that a vendor runs are counted, and none runs here"),
    "prompt": refused("stored prompts are not built", instead="send instructions and input instead"),
    "conversation": refused(
        "conversations are not built", instead="send previous_response_id instead"
    ),
    "n": refused("a response is one answer", 1, instead="send the request as often as you need"),
}  # fmt: skip

# What other protocols call a field that there is.
ADVICE: dict[str, str] = {
    "messages": "input",
    "system": "instructions",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "max_new_tokens": "max_output_tokens",
    "response_format": "text.format",
    "format": "text.format",
    "json_schema": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "thinking": "reasoning.effort",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "logprobs": f'include: ["{LOGPROBS}"]',
    "functions": "tools",
    "function_call": "tool_choice",
    "stop_sequences": "stop",
    "grammar": "guided_grammar",
    "regex": "guided_regex",
}
