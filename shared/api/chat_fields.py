"""The closed table of `POST /v1/chat/completions`: every field, and what becomes of it.

Accepted are only fields that can't change the text of a local server; each says why. What is not in the
table is unknown, and refused too.
"""

from __future__ import annotations

from mlxpool.shared.api import read, sampling
from mlxpool.shared.api.structure import CHOICES_LIMIT
from mlxpool.shared.api.table import Field, accepted, honoured, refused
from mlxpool.shared.api.tools import TOOLS_LIMIT

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

_LABEL = "a label of the client's own; no part of the model's input"
_TEXT_ONLY = "this server answers in text only"
_CACHE = "prefixes are found by their tokens and kept by their use"
_PENALISES = "of the tokens that the window holds"
_WINDOW = "the window: how many of the last tokens, prompt included; 0 is all of them"
_BOOL = "true, false"


def _mapping(name: str, value: object) -> object:
    return read.mapping(name, value)


def _boolean(name: str, value: object) -> object:
    return read.boolean(name, value, default=False)


FIELDS: dict[str, Field] = {
    "model": honoured("a model's name or an alias", "who answers", "the configured default"),
    "messages": honoured("a non-empty list", "the conversation, see below", "needed"),
    "stream": honoured(_BOOL, "answer in server-sent events", "false"),
    "stream_options": honoured(
        '{"include_usage": true}', "with stream: true, usage in a last chunk of its own"
    ),
    "max_tokens": honoured(
        sampling.MAX_TOKENS.text, "the ceiling on the answer, clamped to the room left", "the room left"
    ),
    "max_completion_tokens": honoured(sampling.MAX_TOKENS.text, "max_tokens by its newer name"),
    "temperature": honoured(
        sampling.TEMPERATURE.text, "0 takes the most likely token", "the server's, the model's, else 0.7"
    ),
    "top_p": honoured(
        sampling.TOP_P.text,
        "the likeliest tokens that make up this share",
        "the server's, the model's, else 1",
    ),
    "top_k": honoured(
        sampling.TOP_K.text, "the likeliest so many; 0 is all", "the server's, the model's, else 0"
    ),
    "min_p": honoured(
        sampling.MIN_P.text, "at least this share of the likeliest one's probability", "the model's, else 0"
    ),
    "seed": honoured(
        "whole number of 64 bits", "the same tokens again, whatever else is in the batch", "fresh each time"
    ),
    "stop": honoured(
        f"a string or at most {sampling.STOPS_LIMIT}, each of at most {sampling.STOP_LIMIT_CHARS} characters",
        "the answer ends before the first of them",
        "none",
    ),
    "n": honoured(sampling.CHOICES.text, "so many answers to one prompt", "1"),
    "repetition_penalty": honoured(
        sampling.REPETITION.text,
        f"more than 1 lowers the logits {_PENALISES}, as a factor",
        "the model's, else 1",
    ),
    "repetition_context_size": honoured(sampling.PENALTY_CONTEXT.text, _WINDOW, "20"),
    "presence_penalty": honoured(sampling.PENALTY.text, f"is taken off the logits {_PENALISES}", "0"),
    "presence_context_size": honoured(sampling.PENALTY_CONTEXT.text, _WINDOW, "20"),
    "frequency_penalty": honoured(
        sampling.PENALTY.text, f"is taken off the logits {_PENALISES}, once for each time", "0"
    ),
    "frequency_context_size": honoured(sampling.PENALTY_CONTEXT.text, _WINDOW, "20"),
    "xtc_probability": honoured(
        sampling.XTC_PROBABILITY.text,
        "how often all but the least likely token above the threshold are left out; never an end of turn or "
        "the bare newline",
        "0",
    ),
    "xtc_threshold": honoured(
        sampling.XTC_THRESHOLD.text,
        "from which probability on; above a half no second token could have it",
        "0.1",
    ),
    "logit_bias": honoured(
        f"an object of at most {sampling.LOGIT_BIAS_LIMIT} token ids, each with a number, "
        f"{sampling.LOGIT_BIAS.text}",
        "is added to the tokens' logits",
    ),
    "logprobs": honoured(_BOOL, "each token's log-probability", "false"),
    "top_logprobs": honoured(
        f"0 to {sampling.TOP_LOGPROBS_HIGH}, or -1 for unset; more than 0 with logprobs: true only",
        "so many of the likeliest tokens at each place",
        "0",
    ),
    "tools": honoured(f"a list of at most {TOOLS_LIMIT} functions, see below", "what the model may call"),
    "tool_choice": honoured(
        '"none", "auto", "required", or {"type": "function", "function": {"name": "…"}}',
        "whether it must; the last two are enforced, and need tools",
        '"auto"',
    ),
    "parallel_tool_calls": honoured(_BOOL, "false: at most one call in an answer", "true"),
    "guided_grammar": honoured("EBNF text", "a grammar for the answer, see below"),
    "response_format": honoured(
        '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", …}',
        "JSON, or JSON of a schema, see below",
    ),
    "structured_outputs": honoured(
        "an object with one of json, regex, choice, grammar, json_object: true", "vLLM's way to say the same"
    ),
    "guided_json": honoured("a JSON schema", "structured_outputs.json by its older name"),
    "guided_regex": honoured("a regular expression", "a pattern for the whole answer"),
    "guided_choice": honoured(
        f"a list of at most {CHOICES_LIMIT} different strings", "the answer is one of them"
    ),
    "chat_template_kwargs": honoured(
        "an object", "variables for the model's chat template; enable_thinking (or thinking) is a bool"
    ),
    "reasoning_effort": honoured(
        ", ".join(f'"{effort}"' for effort in EFFORTS),
        "none switches thinking off; chat_template_kwargs.enable_thinking goes before it",
        "the server's, else the model's",
    ),
    "keep_alive": accepted(
        'seconds, a duration like "15m", 0, or -1 for ever',
        "how long the model stays loaded afterwards: the pool acts on it",
        lambda _, value: read.keep_alive(value),
    ),
    "user": accepted("a string", _LABEL, read.string),
    "metadata": accepted("an object", _LABEL, _mapping),
    "safety_identifier": accepted("a string", _LABEL, read.string),
    "store": accepted(
        _BOOL, "stored completions belong to the Responses protocol; a chat is never stored", _boolean
    ),
    "service_tier": accepted("a string", "one machine has one tier", read.string),
    "prompt_cache_key": accepted("a string", _CACHE, read.string),
    "prompt_cache_retention": accepted("a string", _CACHE, read.string),
    "prompt_cache_options": accepted("an object", _CACHE, _mapping),
    "functions": refused("functions are declared as tools now", [], instead="send tools instead"),
    "function_call": refused(
        "calls are asked for by tool_choice now", "none", "auto", instead="send tool_choice instead"
    ),
    "adapter": refused("adapters are not built yet", "none"),
    "modalities": refused(_TEXT_ONLY, ["text"]),
    "audio": refused(_TEXT_ONLY),
    "prediction": refused("predicted outputs are not built"),
    "web_search_options": refused("this server searches nothing"),
    "verbosity": refused("verbosity is not built; say it in a system message"),
    "moderation": refused("this server moderates nothing"),
}

# What other servers call a field that there is, or where their clients put it.
ADVICE: dict[str, str] = {
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "thinking": "chat_template_kwargs.enable_thinking",
    "preserve_thinking": "chat_template_kwargs.preserve_thinking",
    "reasoning": "reasoning_effort",
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
    "prompt": "messages",
    "input": "messages",
    "system": "a system message in messages",
}
