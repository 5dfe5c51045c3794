"""Which tokens the grammars of some rows allow next, as one array over the vocabulary.

A matcher writes bits, which are widened to a bool per token for the device. A grammar comes back to few
states (inside a string, after a comma), so the device keeps the masks it was given last, found by their bits:
on a GPU a new array of this size costs more than all the rest of a draw (0.4 ms on an H200). Engine thread
only.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlxpool.worker.engine.row import Row

_WORD_BITS = 32

# Masks kept: at a vocabulary of 150,000 they take 19 MB.
_KEPT_MASKS = 128

# Little-endian words: bit i of word w is bit i % 8 of byte 4 w + i // 8.
assert sys.byteorder == "little"


class Masks:
    """The masks of one model's rows. vocabulary: the width of the logits."""

    def __init__(self) -> None:
        self._words = np.zeros(0, np.int32)
        self._kept: OrderedDict[bytes, mx.array] = OrderedDict()  # bool [1, vocabulary]

    def allowed(
        self, rows: Sequence[Row], vocabulary: int, failed: Callable[[Row, Exception], None]
    ) -> mx.array | None:
        """Per row and token, bool [rows, vocabulary], whether it may come next; None where every token may.

        Ids past what a matcher writes are no tokens and may not come. A matcher that fails is told to
        `failed`, and its row is left free.
        """
        words = -(-vocabulary // _WORD_BITS)
        if len(self._words) != words:
            self._words = np.zeros(words, np.int32)
        lines: list[mx.array | None] = [self._line(row, vocabulary, failed) for row in rows]
        if all(line is None for line in lines):
            return None
        if len(lines) == 1:
            return lines[0]
        self._words[:] = -1
        return mx.concatenate([self._found(vocabulary) if line is None else line for line in lines])

    def _line(self, row: Row, vocabulary: int, failed: Callable[[Row, Exception], None]) -> mx.array | None:
        if row.constraint is None:
            return None
        self._words[:] = 0
        try:
            return self._found(vocabulary) if row.constraint.fill(self._words) else None
        except Exception as err:
            failed(row, err)
            return None

    def _found(self, vocabulary: int) -> mx.array:
        """The mask of the words as they are now."""
        bits = self._words.tobytes()
        kept = self._kept.get(bits)
        if kept is not None and kept.shape[-1] == vocabulary:
            self._kept.move_to_end(bits)
            return kept
        wide = np.unpackbits(self._words.view(np.uint8), count=vocabulary, bitorder="little")
        made = self._kept[bits] = mx.array(wide.view(np.bool_)[None])
        if len(self._kept) > _KEPT_MASKS:
            self._kept.popitem(last=False)
        return made
