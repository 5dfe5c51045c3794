"""Which tokens the grammars of some rows allow next, as one array over the vocabulary.

A matcher writes bits; they are widened to bytes on the host, where that takes microseconds, so that all the
device does is one `where` for all rows together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mlxpool.worker.engine.row import Row

_WORD_BITS = 32

# Little-endian words: bit i of word w is bit i % 8 of byte 4 w + i // 8.
assert sys.byteorder == "little"


def allowed(
    rows: Sequence[Row], vocabulary: int, failed: Callable[[Row, Exception], None]
) -> npt.NDArray[np.bool_] | None:
    """Per row and token [rows, vocabulary] whether it may come next; None where every token of every row may.

    vocabulary: the width of the logits. Ids past what a matcher writes are no tokens and may not come. A
    matcher that fails is told to `failed`, and its row is left free.
    """
    words = np.full((len(rows), -(-vocabulary // _WORD_BITS)), -1, dtype=np.int32)
    masked = False
    for row, line in zip(rows, words, strict=True):
        if row.constraint is None or row.ended:
            continue
        line[:] = 0
        filled = False
        try:
            filled = row.constraint.fill(line)
        except Exception as err:
            failed(row, err)
        if not filled:
            line[:] = -1
        masked = masked or filled
    if not masked:
        return None
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocabulary, bitorder="little")
    return bits.view(np.bool_)
