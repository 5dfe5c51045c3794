"""SentencePiece vocabularies as `tokenizers` has them: merges out of scores.

SentencePiece joins the two neighbours whose joined token has the best score, so every way to cut a token into
two tokens is a merge of that token's rank. Bytes that no token has are spelled byte by byte. Tokens that a
model's makers put in by hand are found in the text before anything else; they are not joined from others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

# How a vocabulary writes a space.
SPACE = "▁"


def merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, best first; equal ones as their tokens come."""
    ranked: list[tuple[float, int, str, str]] = []
    for place, (token, score) in enumerate(scores.items()):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                ranked.append((-score, place, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def build(
    tokens: Sequence[str],
    joined: Mapping[str, float],
    unknown: str | None,
    *,
    has_bytes: bool,
    space_first: bool,
) -> Tokenizer:
    """tokens: by id. joined: those that text is joined into, with their scores, by id. unknown: the token for
    what has none. space_first: a text begins as if a space came before it."""
    made = Tokenizer(
        models.BPE(
            vocab={token: place for place, token in enumerate(tokens)},
            merges=merges_of(joined),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if space_first else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_first:
        steps.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(steps)
    return made
