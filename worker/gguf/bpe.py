"""Byte-level BPE vocabularies as `tokenizers` has them: how text is cut before its bytes are joined.

A file names its cutter (`tokenizer.ggml.pre`) and holds nothing of it. The patterns are those that the models
were published with; a name that is not in the table is refused, because another cutter gives other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlxpool.shared.gguf.header import GgufError
from mlxpool.shared.text import cut

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


def build(tokens: Sequence[str], merges: Sequence[str], name: str) -> Tokenizer:
    """tokens: by id. merges: pairs with a space between, best first. Raises GgufError."""
    chosen = cutter(name)
    vocab = {token: place for place, token in enumerate(tokens)}
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise GgufError(
                f"tokenizer.ggml.merges has {cut(repr(merge))}, which joins no two tokens into one"
            )
        pairs.append((left, right))
    made = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=chosen.whole_words))
    if chosen.composed:
        made.normalizer = normalizers.NFC()
    if chosen.patterns:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in chosen.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    else:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if name == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made
