"""In which form a model writes its calls and its reasoning.

A model's settings name a family; without that its template and vocabulary tell. A template that reads no
`tools` belongs to a model that was never shown any: such a model is told of them in words (`toolless`).
"""

from __future__ import annotations

import msgspec

from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.families import NO_FAMILY
from mlxpool.shared.prompt import toolless
from mlxpool.shared.prompt.choose import choose_reasoning, choose_tools


class Families(msgspec.Struct, frozen=True):
    """tools: None where calls are never looked for. knows_tools: whether the chat template renders them."""

    tools: str | None
    reasoning: str | None
    knows_tools: bool


def families(tokenizer: ChatTokenizer, tools: str | None = None, reasoning: str | None = None) -> Families:
    """tools, reasoning: what the model's settings name, None for what the model itself shows."""
    source = tokenizer.template_source

    def has_token(text: str) -> bool:
        return tokenizer.token_id(text) is not None

    knows_tools = "tools" in tokenizer.template_reads
    shown = choose_tools(source, has_token) if knows_tools else toolless.FAMILY
    found = (tools or shown or toolless.FAMILY, reasoning or choose_reasoning(source, has_token))
    named = [None if name == NO_FAMILY else name for name in found]
    return Families(named[0], named[1], knows_tools)
