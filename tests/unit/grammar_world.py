"""Compiled grammars without the service: what text a schema's grammar takes, byte by byte."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np

from mlxpool.worker.grammar import formats
from mlxpool.worker.grammar.formats import Format
from mlxpool.worker.grammar.messages import Vocabulary
from mlxpool.worker.grammar.runtime import tokenizer_info, xgrammar
from mlxpool.worker.grammar.schema import read

EOS_ID = 256
# A special token that grammars name, with bytes that are no UTF-8; and one that none does.
MARKER, MARKER_ID = "<|mark|>", 257
UNNAMED_ID = 258
WIDTH = 288

TOKENS = [*(bytes([byte]) for byte in range(256)), b"", b"\xff<|mark|>", b""]


@functools.cache
def compiler() -> Any:
    vocabulary = Vocabulary(TOKENS, [EOS_ID], WIDTH)
    return xgrammar().GrammarCompiler(tokenizer_info(vocabulary), max_threads=1, cache_enabled=False)


@functools.lru_cache(64)
def _compiled(text: str) -> Any:
    return compiler().compile_structural_tag(text)


def compiled(form: Format) -> Any:
    """A format's compiled grammar; RuntimeError where the compiler refuses."""
    return _compiled(json.dumps({"type": "structural_tag", "format": form}))


def takes(form: Format, *parts: str | int) -> bool:
    """Whether the grammar takes this whole answer, texts byte by byte and tokens by id, and then its end."""
    matcher = xgrammar().GrammarMatcher(compiled(form))
    for part in parts:
        ids = [part] if isinstance(part, int) else part.encode()
        if not all(matcher.accept_token(token) for token in ids):
            return False
    return bool(matcher.accept_token(EOS_ID))


def schema_takes(schema: Any, text: str) -> bool:
    """Whether a JSON schema's grammar takes a text; the schema may use nothing unenforced."""
    reading = read(schema)
    assert not reading.unenforced, reading.unenforced
    return takes(formats.json_schema(reading.schema), text)


# What a walk picks from once it should come to an end, the first that is allowed.
_CLOSING = b'"]}0elus1'


def walk(form: Format, seed: int, soft_limit: int = 60, hard_limit: int = 400) -> str | None:
    """A random answer of the grammar, None where it didn't end in time. Past the soft limit it heads home."""
    rng = random.Random(seed)
    matcher = xgrammar().GrammarMatcher(compiled(form))
    mask = np.zeros(WIDTH // 32, dtype=np.int32)
    text = bytearray()
    while len(text) < hard_limit:
        mask[:] = -1
        matcher.fill_next_token_bitmask(mask)
        allowed = [token for token in range(WIDTH) if mask[token // 32] >> token % 32 & 1]
        if EOS_ID in allowed and (len(text) > soft_limit or rng.random() < 0.5 or len(allowed) == 1):
            return text.decode(errors="replace")
        plain = [token for token in allowed if 32 < token < 127] or [
            token for token in allowed if token < 256
        ]
        token = rng.choice(plain)
        if len(text) > soft_limit or rng.random() < 0.3:
            token = next((closing for closing in _CLOSING if closing in allowed), token)
        assert matcher.accept_token(token)
        text.append(token)
    return None
