"""The closed table of `POST /v1/completions`: chat's rows, where the fields are the same, and its own."""

from __future__ import annotations

from mlxpool.shared.api import sampling
from mlxpool.shared.api.chat_fields import FIELDS as CHAT
from mlxpool.shared.api.chat_fields import OPTION_ADVICE
from mlxpool.shared.api.table import Field, honoured, refused

# Each is rows of one batch; more wait for each other anyway.
PROMPTS_LIMIT = 64

# Behaviour of the protocol since it exists is 16 tokens, which cuts every answer; without any limit a model
# that ends no turn goes on to the end of its context.
USUAL_MAX_TOKENS = 512

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": PROMPTS_LIMIT},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": PROMPTS_LIMIT},
    ]
}
_OWN: dict[str, Field] = {
    "prompt": honoured(
        f"a non-empty string, a list of token ids, or a list of at most {PROMPTS_LIMIT} of either",
        "goes to the model as it is; each has n answers, those of the first prompt first",
        "needed",
        schema=_PROMPT,
    ),
    "max_tokens": honoured(
        sampling.MAX_TOKENS.text,
        "the ceiling on each answer, clamped to the room left",
        f"the server's, else {USUAL_MAX_TOKENS}",
        schema=sampling.MAX_TOKENS.schema,
    ),
    "n": honoured(
        sampling.CHOICES.text, "so many answers to each prompt", "1", schema=sampling.CHOICES.schema
    ),
    "logprobs": honoured(
        sampling.ALTERNATIVES.text,
        "each token's log-probability, and so many of the likeliest at its place",
        schema=sampling.ALTERNATIVES.schema,
    ),
    "echo": refused("an answer holds no prompt here", False, instead="put the prompt before it yourself"),
    "suffix": refused("filling in between two texts is not built", ""),
    "best_of": refused("answers are not ranked", 1, instead="send n instead"),
}
# Of a conversation, which this protocol has not.
_CHATS_ALONE = {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "chat_template_kwargs", "reasoning_effort", "thinking_budget", "functions", "function_call", "modalities",
    "audio", "prediction", "web_search_options", "verbosity", "moderation",
}  # fmt: skip

FIELDS: dict[str, Field] = {
    "model": CHAT["model"],
    "prompt": _OWN["prompt"],
    **{name: row for name, row in CHAT.items() if name not in _CHATS_ALONE},
    **_OWN,
}

_CHAT_PATH = "a chat to /v1/chat/completions"
ADVICE: dict[str, str] = {
    "input": "prompt",
    "prompts": "prompt",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    **OPTION_ADVICE,
    **dict.fromkeys(
        (
            "messages",
            "tools",
            "tool_choice",
            "functions",
            "function_call",
            "system",
            "chat_template_kwargs",
            "reasoning_effort",
        ),
        _CHAT_PATH,
    ),
}
