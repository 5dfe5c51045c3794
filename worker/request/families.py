"""In which form a model writes its calls and its reasoning, and what reads them.

A model's settings name a family; without that its template and vocabulary tell. A template that reads no
`tools` belongs to a model that was never shown any: such a model is told of them in words (`toolless`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import msgspec

from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.families import NO_FAMILY
from mlxpool.worker.request import toolless
from mlxpool.worker.text.choose import choose_reasoning, choose_tools
from mlxpool.worker.text.detokeniser import ByteDetokeniser, Detokeniser, WindowDetokeniser
from mlxpool.worker.text.model import ModelText
from mlxpool.worker.text.tools.block_calls import Parse


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


def model_text(tokenizer: ChatTokenizer) -> ModelText:
    """What reads the answers of this tokenizer's model."""

    def detokeniser() -> Detokeniser:
        if tokenizer.is_byte_level:
            return ByteDetokeniser(tokenizer.token_bytes)
        return WindowDetokeniser(tokenizer.decode)

    return ModelText(detokeniser, tokenizer.token_id, tokenizer.is_special, _parser)


def _parser(family: str) -> Parse:
    """mlx-lm's parser of that family."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{family}")
    parse: Callable[..., object] = module.parse_tool_call
    return parse
