"""Reader of `chat_template_kwargs`: variables for the model's chat template, and the switch of its thinking.

A client may set whatever its model's template reads, but nothing that the server itself hands to the
template: such a name would be overruled or would break the call. Nor the arguments of Hugging Face's own
function around a template, which no template sees.
"""

from __future__ import annotations

from typing import Any

from mlxpool.shared.api import read

# What templates call the switch; the first that a template reads is told.
SWITCHES = ("enable_thinking", "thinking")

RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "self",
    "bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token",
    "raise_exception", "strftime_now",
    "chat_template", "tokenize", "continue_final_message", "return_dict", "return_tensors",
    "return_assistant_tokens_mask", "add_special_tokens", "padding", "truncation", "max_length",
})  # fmt: skip

# Each is a variable of the render; no template reads a tenth as many.
VARIABLES_LIMIT = 64


def read_template_kwargs(name: str, value: object) -> tuple[bool | None, dict[str, Any]]:
    """(thinking, the other variables); (None, {}) for null. Raises ApiError 400."""
    if value is None:
        return None, {}
    given = read.mapping(name, value, '{"enable_thinking": false}')
    if len(given) > VARIABLES_LIMIT:
        raise read.invalid(name, f"{name} holds {len(given)} variables; at most {VARIABLES_LIMIT} work")
    for key in given:
        if key in RESERVED:
            raise read.unsupported(
                f"{name}.{key}", f"{name}.{key} is not supported: the server sets {key} itself; leave it out"
            )
        if not key.isidentifier():
            raise read.invalid(
                f"{name}.{key}", f"{name} holds {read.quoted(key)}, which is no name of a variable"
            )
    others = {key: inner for key, inner in given.items() if key not in SWITCHES}
    return _thinking(name, given), others


def _thinking(name: str, given: dict[str, Any]) -> bool | None:
    said = {
        key: read.boolean(f"{name}.{key}", given[key], default=False)
        for key in SWITCHES
        if given.get(key) is not None
    }
    if len(set(said.values())) > 1:
        raise read.invalid(
            f"{name}.thinking", f"{name}.enable_thinking and {name}.thinking contradict each other; send one"
        )
    return next(iter(said.values()), None)
