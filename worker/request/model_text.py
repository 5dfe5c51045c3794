"""What reads the answers of a model, from its tokenizer."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from mlxpool.shared.chat import ChatTokenizer
from mlxpool.worker.text.detokeniser import ByteDetokeniser, Detokeniser, WindowDetokeniser
from mlxpool.worker.text.model import ModelText
from mlxpool.worker.text.tools.block_calls import Parse

_SOME_TEXT = "a"


def model_text(tokenizer: ChatTokenizer) -> ModelText:
    """What reads the answers of this tokenizer's model."""

    before = tokenizer.encode(_SOME_TEXT)

    def detokeniser(continues: bool) -> Detokeniser:
        if tokenizer.is_byte_level:
            return ByteDetokeniser(tokenizer.token_bytes, continues)
        return WindowDetokeniser(tokenizer.decode, before if continues else ())

    return ModelText(detokeniser, tokenizer.token_id, tokenizer.is_special, _parser)


def _parser(family: str) -> Parse:
    """mlx-lm's parser of that family."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{family}")
    parse: Callable[..., object] = module.parse_tool_call
    return parse
