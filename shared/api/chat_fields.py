"""The closed table of `POST /v1/chat/completions`: every field, and what becomes of it.

Accepted are only fields that can't change the text of a local server; each says why. What is not in the
table is unknown, and refused too.
"""

from __future__ import annotations

from mlxpool.shared.adapters import ID_PATTERN, SET_LIMIT
from mlxpool.shared.api import read, sampling
from mlxpool.shared.api.structure import CHOICES_LIMIT
from mlxpool.shared.api.table import Field, a_boolean, accepted, an_object, honoured, refused
from mlxpool.shared.api.tools import TOOL_NAME, TOOLS_LIMIT

# Six names: Anthropic's `max` is its protocol's own word for the deepest (anthropic_fields).
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

LABEL = "a label of the client's own; no part of the model's input"
_TEXT_ONLY = "this server answers in text only"
CACHE = "prefixes are found by their tokens and kept by their use"
_PENALISES = "of the tokens that the window holds"
_WINDOW = "the window: how many of the last tokens, prompt included; 0 is all of them"
_BOOL = "true, false"

TEXT = {"type": "string"}
FILLED = {"type": "string", "minLength": 1}
BOOL = {"type": "boolean"}
OBJECT = {"type": "object"}
STREAM_OPTIONS = {
    "type": "object",
    "properties": {"include_usage": BOOL, "include_obfuscation": {"enum": [False]}},
    "additionalProperties": False,
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}},
    },
}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "additionalProperties": False,
}
_TOOLS = {
    "type": "array",
    "maxItems": TOOLS_LIMIT,
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        "additionalProperties": False,
    },
}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": FILLED}},
            },
            "additionalProperties": False,
        },
    ]
}
_LOGIT_BIAS = {
    "type": "object",
    "maxProperties": sampling.LOGIT_BIAS_LIMIT,
    "propertyNames": {"pattern": f"^({sampling.TOKEN_ID.pattern})$"},
    "additionalProperties": sampling.LOGIT_BIAS.schema,
}
_RESPONSE_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
}
_CHOICE = {
    "type": "array",
    "items": FILLED,
    "minItems": 1,
    "maxItems": CHOICES_LIMIT,
    "uniqueItems": True,
}
_STRUCTURED = {
    "type": "object",
    "properties": {
        "json": {"type": ["object", "boolean", "string", "null"]},
        "regex": {"type": ["string", "null"]},
        "choice": {"anyOf": [_CHOICE, {"type": "null"}]},
        "grammar": {"type": ["string", "null"]},
        "json_object": {"enum": [True, None]},
    },
}

_ADAPTERS = rf"^{ID_PATTERN}(\+{ID_PATTERN}){{0,{SET_LIMIT - 1}}}$"


FIELDS: dict[str, Field] = {
    "model": honoured("a model's name or an alias", "who answers", "the configured default", schema=TEXT),
    "messages": honoured("a non-empty list", "the conversation, see below", "needed", schema=_MESSAGES),
    "stream": honoured(_BOOL, "answer in server-sent events", "false", schema=BOOL),
    "stream_options": honoured(
        '{"include_usage": true}',
        "with stream: true, usage in a last chunk of its own",
        schema=STREAM_OPTIONS,
    ),
    "max_tokens": honoured(
        sampling.MAX_TOKENS.text,
        "the ceiling on the answer, clamped to the room left",
        "the room left",
        schema=sampling.MAX_TOKENS.schema,
    ),
    "max_completion_tokens": honoured(
        sampling.MAX_TOKENS.text, "max_tokens by its newer name", schema=sampling.MAX_TOKENS.schema
    ),
    "temperature": honoured(
        sampling.TEMPERATURE.text,
        "0 takes the most likely token",
        "the server's, the model's, else 0.7",
        schema=sampling.TEMPERATURE.schema,
    ),
    "top_p": honoured(
        sampling.TOP_P.text,
        "the likeliest tokens that make up this share",
        "the server's, the model's, else 1",
        schema=sampling.TOP_P.schema,
    ),
    "top_k": honoured(
        sampling.TOP_K.text,
        "the likeliest so many; 0 is all",
        "the server's, the model's, else 0",
        schema=sampling.TOP_K.schema,
    ),
    "min_p": honoured(
        sampling.MIN_P.text,
        "at least this share of the likeliest one's probability",
        "the model's, else 0",
        schema=sampling.MIN_P.schema,
    ),
    "seed": honoured(
        "whole number of 64 bits",
        "the same tokens again, whatever else is in the batch",
        "fresh each time",
        schema=sampling.SEED.schema,
    ),
    "stop": honoured(
        f"a string or at most {sampling.STOPS_LIMIT}, each of at most {sampling.STOP_LIMIT_CHARS} characters",
        "the answer ends before the first of them",
        "none",
        schema={"anyOf": [sampling.STOP_SCHEMA, sampling.STOPS_SCHEMA]},
    ),
    "n": honoured(
        sampling.CHOICES.text, "so many answers to one prompt", "1", schema=sampling.CHOICES.schema
    ),
    "repetition_penalty": honoured(
        sampling.REPETITION.text,
        f"more than 1 lowers the logits {_PENALISES}, as a factor",
        "the model's, else 1",
        schema=sampling.REPETITION.schema,
    ),
    "repetition_context_size": honoured(
        sampling.PENALTY_CONTEXT.text, _WINDOW, "20", schema=sampling.PENALTY_CONTEXT.schema
    ),
    "presence_penalty": honoured(
        sampling.PENALTY.text, f"is taken off the logits {_PENALISES}", "0", schema=sampling.PENALTY.schema
    ),
    "presence_context_size": honoured(
        sampling.PENALTY_CONTEXT.text, _WINDOW, "20", schema=sampling.PENALTY_CONTEXT.schema
    ),
    "frequency_penalty": honoured(
        sampling.PENALTY.text,
        f"is taken off the logits {_PENALISES}, once for each time",
        "0",
        schema=sampling.PENALTY.schema,
    ),
    "frequency_context_size": honoured(
        sampling.PENALTY_CONTEXT.text, _WINDOW, "20", schema=sampling.PENALTY_CONTEXT.schema
    ),
    "xtc_probability": honoured(
        sampling.XTC_PROBABILITY.text,
        "how often all but the least likely token above the threshold are left out; never an end of turn or "
        "the bare newline",
        "0",
        schema=sampling.XTC_PROBABILITY.schema,
    ),
    "xtc_threshold": honoured(
        sampling.XTC_THRESHOLD.text,
        "from which probability on; above a half no second token could have it",
        "0.1",
        schema=sampling.XTC_THRESHOLD.schema,
    ),
    "logit_bias": honoured(
        f"an object of at most {sampling.LOGIT_BIAS_LIMIT} token ids, each with a number, "
        f"{sampling.LOGIT_BIAS.text}",
        "is added to the tokens' logits",
        schema=_LOGIT_BIAS,
    ),
    "logprobs": honoured(_BOOL, "each token's log-probability", "false", schema=BOOL),
    "top_logprobs": honoured(
        f"0 to {sampling.TOP_LOGPROBS_HIGH}, or -1 for unset; more than 0 with logprobs: true only",
        "so many of the likeliest tokens at each place",
        "0",
        schema=sampling.TOP_LOGPROBS.schema,
    ),
    "tools": honoured(
        f"a list of at most {TOOLS_LIMIT} functions, see below", "what the model may call", schema=_TOOLS
    ),
    "tool_choice": honoured(
        '"none", "auto", "required", or {"type": "function", "function": {"name": "…"}}',
        "whether it must; the last two are enforced, and need tools",
        '"auto"',
        schema=_TOOL_CHOICE,
    ),
    "parallel_tool_calls": honoured(_BOOL, "false: at most one call in an answer", "true", schema=BOOL),
    "guided_grammar": honoured("EBNF text", "a grammar for the answer, see below", schema=FILLED),
    "response_format": honoured(
        '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", …}',
        "JSON, or JSON of a schema, see below",
        schema=_RESPONSE_FORMAT,
    ),
    "structured_outputs": honoured(
        "an object with one of json, regex, choice, grammar, json_object: true",
        "vLLM's way to say the same",
        schema=_STRUCTURED,
    ),
    "guided_json": honoured(
        "a JSON schema",
        "structured_outputs.json by its older name",
        schema={"type": ["object", "boolean", "string"]},
    ),
    "guided_regex": honoured("a regular expression", "a pattern for the whole answer", schema=FILLED),
    "guided_choice": honoured(
        f"a list of at most {CHOICES_LIMIT} different strings", "the answer is one of them", schema=_CHOICE
    ),
    "chat_template_kwargs": honoured(
        "an object",
        "variables for the model's chat template; enable_thinking (or thinking) is a bool",
        schema=OBJECT,
    ),
    "reasoning_effort": honoured(
        ", ".join(f'"{effort}"' for effort in EFFORTS),
        "none switches thinking off; chat_template_kwargs.enable_thinking goes before it",
        "the server's, else the model's",
        schema={"enum": list(EFFORTS)},
    ),
    "thinking_budget": honoured(
        sampling.THINKING_BUDGET.text,
        "the reasoning is ended after so many tokens, and the answer follows",
        "no limit of its own",
        schema=sampling.THINKING_BUDGET.schema,
    ),
    "adapter": honoured(
        f'an id, several joined with + (at most {SET_LIMIT}), or "none"',
        "the adapters that are added to the model for this answer",
        "the model's setting, else none",
        schema={"type": "string", "pattern": _ADAPTERS},
    ),
    "keep_alive": accepted(
        'seconds, a duration like "15m", 0, or -1 for ever',
        "how long the model stays loaded afterwards: the pool acts on it",
        lambda _, value: read.keep_alive(value),
        schema={"type": ["number", "string"]},
    ),
    "user": accepted("a string", LABEL, read.string, schema=TEXT),
    "metadata": accepted("an object", LABEL, an_object, schema=OBJECT),
    "safety_identifier": accepted("a string", LABEL, read.string, schema=TEXT),
    "store": accepted(
        _BOOL,
        "stored completions belong to the Responses protocol; a chat is never stored",
        a_boolean,
        schema=BOOL,
    ),
    "service_tier": accepted("a string", "one machine has one tier", read.string, schema=TEXT),
    "prompt_cache_key": accepted("a string", CACHE, read.string, schema=TEXT),
    "prompt_cache_retention": accepted("a string", CACHE, read.string, schema=TEXT),
    "prompt_cache_options": accepted("an object", CACHE, an_object, schema=OBJECT),
    "functions": refused("functions are declared as tools now", [], instead="send tools instead"),
    "function_call": refused(
        "calls are asked for by tool_choice now", "none", "auto", instead="send tool_choice instead"
    ),
    "modalities": refused(_TEXT_ONLY, ["text"]),
    "audio": refused(_TEXT_ONLY),
    "prediction": refused("predicted outputs are not built"),
    "web_search_options": refused("this server searches nothing"),
    "verbosity": refused("verbosity is not built; say it in a system message", "medium"),
    "moderation": refused("this server moderates nothing"),
}

# What other servers call an option that there is, or where their clients put it; then a chat's own fields.
OPTION_ADVICE: dict[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
    "format": "response_format",
    "json_schema": "response_format",
    "grammar": "guided_grammar",
    "regex": "guided_regex",
}
ADVICE: dict[str, str] = {
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "thinking": "chat_template_kwargs.enable_thinking",
    "thinking_token_budget": "thinking_budget",
    "reasoning_budget": "thinking_budget",
    "preserve_thinking": "chat_template_kwargs.preserve_thinking",
    "reasoning": "reasoning_effort",
    **OPTION_ADVICE,
    "prompt": "messages",
    "input": "messages",
    "system": "a system message in messages",
}
