"""Byte-level BPE vocabularies as `tokenizers` has them: a cutter's patterns, then the merges."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlxpool.shared.gguf.cutters import cutter
from mlxpool.shared.gguf.header import GgufError
from mlxpool.shared.text import cut


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
