"""tokenizer.json and tokenizer_config.json out of a GGUF's metadata.

A file holds every token with its kind: text, control (stands for no text), put in by hand, byte, unknown.
The begin and end tokens, the chat template and whether a text gets a begin token are there too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from mlxpool.shared.gguf import cutters
from mlxpool.shared.gguf.facts import Facts
from mlxpool.shared.gguf.header import GgufError, Header
from mlxpool.shared.text import cut

from . import bpe, spm

_KEY = "tokenizer.ggml."
_TEXT, _UNKNOWN, _CONTROL, _BY_HAND, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Keys whose tokens end an answer, and control tokens that do where a file names only one of them.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>")


class TokenizerFiles(NamedTuple):
    """config: tokenizer_config.json. end_ids: every token that ends an answer, the main one first."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    begin_id: int | None
    end_ids: list[int]


def build(header: Header, rows: int) -> TokenizerFiles:
    """header: with its long lists. rows: of the embedding, which no token may be beyond. Raises GgufError."""
    facts = Facts(header.metadata)
    model = cutters.kind(facts)
    tokens = _list(facts, "tokens", str)
    kinds = _list(facts, "token_type", int) if facts.has(f"{_KEY}token_type") else [_TEXT] * len(tokens)
    if not tokens or len(tokens) > rows or len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise GgufError(
            f"tokenizer.ggml.tokens has {len(tokens)} ({len(set(tokens))} different) with {len(kinds)} kinds,"
            f" for {rows} rows of the embedding"
        )
    special = {name: _special(facts, name, tokens) for name in ("bos", "eos", "unknown", "padding")}
    space_first = facts.truth(f"{_KEY}add_space_prefix", model == "llama")
    if model == "gpt2":
        pre = cutters.pre(facts)
        begins = cutters.cutter(pre).begins
        made = bpe.build(tokens, _list(facts, "merges", str), pre)
    else:
        begins = True
        made = _sentencepiece(facts, tokens, kinds, special["unknown"], space_first)
    made.add_tokens(
        [
            AddedToken(token, special=kind != _BY_HAND, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _BY_HAND) or (kind == _UNKNOWN and model == "llama")
        ]
    )
    adds_begin = facts.truth(f"{_KEY}add_bos_token", begins and special["bos"] is not None)
    adds_end = facts.truth(f"{_KEY}add_eos_token", False)
    _frame(made, tokens, special["bos"] if adds_begin else None, special["eos"] if adds_end else None)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_begin,
        "add_prefix_space": space_first,
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts.count(facts.own("context_length")),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        place = special[name]
        if place is not None:
            config[f"{key}_token"] = tokens[place]
    if facts.has("tokenizer.chat_template"):
        config["chat_template"] = facts.text("tokenizer.chat_template")
    return TokenizerFiles(made, config, special["bos"], _end_ids(facts, tokens, kinds, special["unknown"]))


def _sentencepiece(
    facts: Facts, tokens: list[str], kinds: list[int], unknown: int | None, space_first: bool
) -> Tokenizer:
    scores = _list(facts, "scores", float)
    if len(scores) != len(tokens):
        raise GgufError(f"tokenizer.ggml.scores has {len(scores)} values for {len(tokens)} tokens")
    joined = {token: score for token, kind, score in zip(tokens, kinds, scores, strict=True) if kind == _TEXT}
    return spm.build(
        tokens,
        joined,
        None if unknown is None else tokens[unknown],
        has_bytes=_BYTE in kinds,
        space_first=space_first,
    )


def _frame(made: Tokenizer, tokens: list[str], begin: int | None, end: int | None) -> None:
    """Which tokens a text gets in front and behind where it is asked for with special tokens."""
    added = [place for place in (begin, end) if place is not None]
    if added:
        pieces = [
            *([tokens[begin]] if begin is not None else []),
            "$A",
            *([tokens[end]] if end is not None else []),
        ]
        made.post_processor = TemplateProcessing(
            single=pieces, special_tokens=[(tokens[place], place) for place in dict.fromkeys(added)]
        )


def _end_ids(facts: Facts, tokens: list[str], kinds: list[int], unknown: int | None) -> list[int]:
    named = [_token(facts, key, tokens) for key in _END_KEYS]
    places = {token: place for place, token in enumerate(tokens) if kinds[place] == _CONTROL}
    # A token that stands for what is unknown as well means more than an end.
    spelled = [places.get(token) for token in _END_TOKENS if places.get(token) != unknown]
    return list(dict.fromkeys(place for place in [*named, *spelled] if place is not None))


def _special(facts: Facts, name: str, tokens: list[str]) -> int | None:
    return _token(facts, f"{name}_token_id", tokens)


def _token(facts: Facts, name: str, tokens: list[str]) -> int | None:
    value = facts.get(f"{_KEY}{name}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
        raise GgufError(f"{_KEY}{name} is {cut(repr(value))}, and no token of {len(tokens)}")
    return value


def _list(facts: Facts, name: str, of: type) -> list[Any]:
    value = facts.get(f"{_KEY}{name}")
    if not isinstance(value, list) or not all(type(item) is of for item in value):
        raise GgufError(f"the GGUF has no {_KEY}{name} of the kind {of.__name__}")
    return value
