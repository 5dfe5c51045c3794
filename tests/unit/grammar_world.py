"""Compiled grammars without the service: what text a schema's grammar takes, byte by byte."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np

from mlxpool.shared.prompt.reasoning_families import REASONING_FAMILIES
from mlxpool.worker.grammar import formats
from mlxpool.worker.grammar.formats import Format
from mlxpool.worker.grammar.messages import Vocabulary
from mlxpool.worker.grammar.runtime import tokenizer_info, xgrammar
from mlxpool.worker.grammar.schema import read
from mlxpool.worker.text.tools.families import family_tokens

EOS_ID = 256
# Every marker as a special token, whose bytes are no UTF-8; and a special token that is no marker.
_MARKER_TEXTS = family_tokens().union(*(family.tokens for family in REASONING_FAMILIES.values()))
MARKERS = {text: 257 + place for place, text in enumerate(sorted(_MARKER_TEXTS))}
WIDTH = 352
UNNAMED_ID = WIDTH - 1

TOKENS = [*(bytes([byte]) for byte in range(256)), b"", *map(formats.marker_bytes, MARKERS)]


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
# What ends free text, tried in turn.
_ENDINGS = ("</parameter>", "</arg_value>", *(family.tags[0][1] for family in REASONING_FAMILIES.values()))
_HARMONY_ENDING = "<|end|><|start|>assistant"
_FREE = 90


def walk(form: Format, seed: int, soft_limit: int = 60, hard_limit: int = 400) -> list[int] | None:
    """The tokens of a random answer, None where it didn't end in time. Past the soft limit it heads home."""
    rng = random.Random(seed)
    matcher = xgrammar().GrammarMatcher(compiled(form))
    mask = np.zeros(WIDTH // 32, dtype=np.int32)
    tokens: list[int] = []
    ending: list[int] = []
    while len(tokens) < hard_limit:
        mask[:] = -1
        matcher.fill_next_token_bitmask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert UNNAMED_ID not in allowed
        hurried = len(tokens) > soft_limit
        if EOS_ID in allowed and (hurried or rng.random() < 0.5 or len(allowed) == 1):
            return tokens
        readable = [token for token in allowed if 32 < token < 127 or token > EOS_ID]
        token = rng.choice(readable or [token for token in allowed if token != EOS_ID])
        if hurried or rng.random() < 0.3:
            marks = [token for token in allowed if token > EOS_ID]
            closings = [rng.choice(marks)] if marks else _CLOSING
            token = next((closing for closing in closings if closing in allowed), token)
            if hurried and not ending and len(allowed) > _FREE and rng.random() < 0.5:
                ending = list(rng.choice((*_ENDINGS, _HARMONY_ENDING)).encode())
        if ending:
            wished = ending.pop(0)
            token, ending = (wished, ending) if wished in allowed else (token, [])
        assert matcher.accept_token(token)
        tokens.append(token)
    return None


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens).decode(errors="replace")
