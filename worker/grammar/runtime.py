"""xgrammar, imported at the first use: it brings torch, 2.5 s and 250 MB that most workers never need."""

from __future__ import annotations

import importlib
import re
from typing import Any

from mlxpool.worker.grammar.messages import Vocabulary

# Where in its sources the compiler noticed: "[18:32:10] /path/file.cc:94: ".
_SOURCE_PLACE = re.compile(r"^\[[0-9:]+\] \S+:[0-9]+: ")


def xgrammar() -> Any:
    """The module. Takes seconds the first time: not on the event loop, not on the engine's thread."""
    return importlib.import_module("xgrammar")


def tokenizer_info(vocabulary: Vocabulary) -> Any:
    """The compiler's form of a vocabulary, padded to the width of the logits; what is padding is masked."""
    module = xgrammar()
    return module.TokenizerInfo(
        vocabulary.tokens,
        module.VocabType.RAW,
        vocab_size=vocabulary.width,
        stop_token_ids=vocabulary.stop_ids,
    )


def compiler(info: Any, threads: int) -> Any:
    """The compiler for a vocabulary. It keeps nothing: what is worth keeping is kept by whoever asked."""
    return xgrammar().GrammarCompiler(info, max_threads=threads, cache_enabled=False)


def plain_reason(reason: str) -> str:
    """A compiler's message without the place in its sources, on one line."""
    return " ".join(_SOURCE_PLACE.sub("", reason).split())
