"""The closed table of `POST /v1/messages`; that of its count of tokens is the same, but nothing is needed
beside the messages.

Betas come as fields and headers. Those that can't change an answer here are accepted, those that would are
refused by name; the headers say nothing that the fields don't.
"""

from __future__ import annotations

from mlxpool.shared.api import read, sampling
from mlxpool.shared.api.chat_fields import BOOL, CACHE, LABEL, OBJECT, TEXT
from mlxpool.shared.api.chat_fields import FIELDS as CHAT
from mlxpool.shared.api.parts import cache_control
from mlxpool.shared.api.table import Field, accepted, an_object, honoured, refused
from mlxpool.shared.api.tools import TOOLS_LIMIT

# Anthropic's own floor, which its clients keep to.
BUDGET_LOW_TOKENS = 1024
BUDGET = sampling.Counts(BUDGET_LOW_TOKENS)

# By Anthropic's names, and what the models' templates know.
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}


def _metadata(name: str, value: object) -> object:
    given = read.mapping(name, value, '{"user_id": "…"}')
    read.only(name, given, ("user_id",))
    return read.string(f"{name}.user_id", given.get("user_id"))


_ONE_MACHINE = "one machine has one of it"

_CONTENT = {"anyOf": [TEXT, {"type": "array", "items": OBJECT}]}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": _CONTENT,
            "cache_control": {"type": ["object", "null"]},
        },
        "additionalProperties": False,
    },
}
_TOOL_CHOICE = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": TEXT,
        "disable_parallel_tool_use": BOOL,
    },
}
_THINKING = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["enabled", "disabled", "adaptive"]},
        "budget_tokens": BUDGET.schema,
        "display": {"enum": ["summarized", "omitted", None]},
    },
}
_FORMAT = {
    "type": "object",
    "required": ["type", "schema"],
    "properties": {"type": {"const": "json_schema"}, "schema": {"type": ["object", "boolean"]}},
}
_OUTPUT_CONFIG = {
    "type": "object",
    "properties": {
        "effort": {"enum": [*EFFORTS, None]},
        "format": {"anyOf": [_FORMAT, {"type": "null"}]},
    },
    "additionalProperties": False,
}


def _strings(name: str, value: object) -> object:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise read.invalid(name, f"{name} must be a list of strings, not {read.quoted(value)}")
    return value


def _context_management(name: str, value: object) -> object:
    """Edits that leave the conversation as it is; those that cut it would have to be done."""
    given = read.mapping(name, value, '{"edits": []}')
    read.only(name, given, ("edits",))
    edits = given.get("edits")
    if edits is None:
        return given
    if not isinstance(edits, list):
        raise read.invalid(f"{name}.edits", f"{name}.edits must be a list, not {read.quoted(edits)}")
    for place, edit in enumerate(edits):
        where = f"{name}.edits[{place}]"
        kind = read.mapping(where, edit).get("type")
        keep = edit.get("keep")
        keeps_all = keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all")
        if kind != "clear_thinking_20251015" or not keeps_all:
            raise read.unsupported(
                where,
                f"{where}: {read.quoted(edit)} is not supported: this server cuts no conversation; "
                'clear_thinking_20251015 with keep "all" works',
            )
    return given


FIELDS: dict[str, Field] = {
    "model": CHAT["model"],
    "messages": honoured("a non-empty list", "the conversation, see below", "needed", schema=_MESSAGES),
    "system": honoured("a string or a list of text blocks", "what the model is told first", schema=_CONTENT),
    "max_tokens": honoured(
        sampling.MAX_TOKENS.text,
        "the ceiling on the answer, clamped to the room left",
        "needed",
        schema=sampling.MAX_TOKENS.schema,
    ),
    "stream": CHAT["stream"],
    "temperature": CHAT["temperature"],
    "top_p": CHAT["top_p"],
    "top_k": CHAT["top_k"],
    "stop_sequences": honoured(
        f"a list of at most {sampling.STOPS_LIMIT}, each of at most {sampling.STOP_LIMIT_CHARS} characters",
        "the answer ends before the first of them, and `stop_sequence` says which",
        "none",
        schema=sampling.STOPS_SCHEMA,
    ),
    "tools": honoured(
        f"a list of at most {TOOLS_LIMIT} tools, see below",
        "what the model may call",
        schema={"type": "array", "items": OBJECT, "maxItems": TOOLS_LIMIT},
    ),
    "tool_choice": honoured(
        '{"type": "auto"}, "any", "none", or {"type": "tool", "name": "…"}; disable_parallel_tool_use',
        "whether it must; any and tool are enforced, and need tools",
        '{"type": "auto"}',
        schema=_TOOL_CHOICE,
    ),
    "thinking": honoured(
        '{"type": "enabled", "budget_tokens": …}, {"type": "adaptive"} or {"type": "disabled"}; display',
        f"whether the model reasons first; its reasoning is ended after budget_tokens ({BUDGET_LOW_TOKENS} "
        'or more, less than max_tokens); display "omitted" leaves its text out of the answer',
        "the server's, else the model's",
        schema=_THINKING,
    ),
    "output_config": honoured(
        '{"effort": "low" to "max", "format": {"type": "json_schema", "schema": …}}',
        "how deep the model reasons, for templates that read it (max is what other protocols call xhigh, and "
        "know by that name alone); JSON of a schema, enforced or refused",
        schema=_OUTPUT_CONFIG,
    ),
    "output_format": honoured(
        '{"type": "json_schema", "schema": …}', "output_config.format by its older name", schema=_FORMAT
    ),
    **{
        name: CHAT[name]
        for name in (
            "min_p",
            "seed",
            "repetition_penalty",
            "repetition_context_size",
            "presence_penalty",
            "presence_context_size",
            "frequency_penalty",
            "frequency_context_size",
            "xtc_probability",
            "xtc_threshold",
            "logit_bias",
            "guided_grammar",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "chat_template_kwargs",
            "adapter",
            "keep_alive",
        )
    },
    "metadata": accepted('{"user_id": "…"}', LABEL, _metadata, schema=OBJECT),
    "cache_control": accepted('{"type": "ephemeral"}', CACHE, cache_control, schema=OBJECT),
    "service_tier": accepted("a string", _ONE_MACHINE, read.string, schema=TEXT),
    "inference_geo": accepted("a string", _ONE_MACHINE, read.string, schema=TEXT),
    "speed": accepted("a string", _ONE_MACHINE, read.string, schema=TEXT),
    "user_profile_id": accepted("a string", LABEL, read.string, schema=TEXT),
    "workspace_id": accepted("a string", LABEL, read.string, schema=TEXT),
    "diagnostics": accepted("an object", "no divergence of caches is told of", an_object, schema=OBJECT),
    "betas": accepted(
        "a list of strings",
        "what a beta changes is asked for in its own field",
        _strings,
        schema={"type": "array", "items": TEXT},
    ),
    "context_management": accepted(
        '{"edits": []}, or clear_thinking_20251015 that keeps all',
        "the conversation is shown to the model as it is; other edits are refused",
        _context_management,
        schema=OBJECT,
    ),
    "container": refused("this server runs no code"),
    "mcp_servers": refused("this server calls no tools itself", []),
    "fallbacks": refused("the model that was asked for answers", []),
    "fallback_credit_token": refused("the model that was asked for answers"),
    "billing_policy": refused("this server bills nobody"),
    "compaction": refused("this server cuts no conversation"),
    "thread": refused("this protocol keeps no conversations here", instead="send all messages"),
}

ADVICE: dict[str, str] = {
    "max_completion_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "reasoning": "thinking",
    "thinking_budget": "thinking.budget_tokens",
    "enable_thinking": "thinking",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "user": "metadata.user_id",
    "prompt": "messages",
    "input": "messages",
    "instructions": "system",
}
