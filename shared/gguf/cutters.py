"""How byte-level BPE vocabularies cut text before its bytes are joined.

A file names its cutter (`tokenizer.ggml.pre`) and holds nothing of it. The patterns are those that the models
were published with; a name that is not in the table is refused, because another cutter gives other tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from mlxpool.shared.text import cut

from .facts import Facts
from .header import GgufError

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
KINDS = ("gpt2", "llama")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LETTERS_OF_CASE = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")


class Cutter(NamedTuple):
    """patterns: applied one after the other; what each matches stands alone. composed: accents are put into
    their letters first. whole_words: a word that is a token is taken without joining. begins: a text gets the
    begin token where the file does not say."""

    patterns: tuple[str, ...]
    composed: bool = False
    whole_words: bool = False
    begins: bool = False


_LLAMA3 = Cutter((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, begins=True)
_QWEN2 = Cutter((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), composed=True)
_UPPER, _LOWER = _LETTERS_OF_CASE
_TEKKEN = Cutter(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    whole_words=True,
    begins=True,
)

# What GGUF calls them. smollm and gpt-2 are built of the library's own steps below.
CUTTERS: dict[str, Cutter] = {
    "default": Cutter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Cutter(()),
    "smollm": Cutter(()),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def cutter(name: str) -> Cutter:
    """Raises GgufError for a name that is not known."""
    if name not in CUTTERS:
        raise GgufError(
            f"tokenizer.ggml.pre is {cut(repr(name))}; of gpt2's kind this import knows {', '.join(CUTTERS)}"
        )
    return CUTTERS[name]


def kind(facts: Facts) -> str:
    """How the vocabulary was made: "gpt2" is byte-level BPE, "llama" SentencePiece's. Raises GgufError where
    that, or its cutter, is not known."""
    model = facts.text(MODEL)
    if model not in KINDS:
        raise GgufError(f"{MODEL} is {cut(repr(model))}; this import knows {', '.join(KINDS)}")
    if model == "gpt2":
        cutter(pre(facts))
    return model


def pre(facts: Facts) -> str:
    """The name of the cutter."""
    return facts.text(PRE) if facts.has(PRE) else "default"
