"""Log-probabilities of a sampled token and of the likeliest ones at its place.

They are of the distribution that the draw saw before temperature and filters: after bias, penalties and
grammar. What the device computes for one token is packed into one array, read with the token in one transfer.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.text.events import Logprobs, TokenLogprob

# JSON has no infinity; what OpenAI's API says of tokens that can't come.
_LEAST = -9999.0


def reading(scores: mx.array, token: mx.array, top: int) -> mx.array:
    """Packed [1 + 2 top] float32: the token's log-probability, those of the `top` likeliest, and their ids.

    scores [1, vocabulary] float32; token [1]. At most as many as the vocabulary has.
    """
    logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, token[:, None], axis=-1)
    top = min(top, scores.shape[-1])
    if not top:
        return chosen.reshape(-1)
    if top < scores.shape[-1]:
        ids = mx.argpartition(-logprobs, kth=top - 1, axis=-1)[..., :top]
    else:
        ids = mx.argsort(-logprobs, axis=-1)
    best = mx.take_along_axis(logprobs, ids, axis=-1)
    return mx.concatenate([chosen, best, ids.astype(mx.uint32).view(mx.float32)], axis=-1).reshape(-1)


def event(
    token: int, packed: npt.NDArray[np.float32], token_bytes: Callable[[int], bytes], chars: int = 0
) -> Logprobs:
    """What `reading` computed for this token; of equally likely ones the lower id comes first. chars: what it
    added to the answer."""
    top = len(packed) // 2
    ids = packed[1 + top :].view(np.uint32).tolist()
    ranked = sorted(zip(packed[1 : 1 + top].tolist(), ids, strict=True), key=lambda one: (-one[0], one[1]))
    return Logprobs(
        _named(token, float(packed[0]), token_bytes),
        tuple(_named(other, value, token_bytes) for value, other in ranked),
        chars,
    )


def _named(token: int, logprob: float, token_bytes: Callable[[int], bytes]) -> TokenLogprob:
    data = token_bytes(token)
    # Not max(): a NaN, which a grammar that allows nothing would give, is none of JSON's numbers either.
    return TokenLogprob(data.decode("utf-8", "replace"), data, logprob if logprob > _LEAST else _LEAST)
