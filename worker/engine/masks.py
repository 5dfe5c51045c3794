"""Which tokens the grammars of some rows allow next, as one array over the vocabulary.

A matcher writes bits into memory that the device reads as well: an array made once per group of rows, because
a new one of that size costs a GPU more than all the rest (0.4 ms on an H200). The bits are widened on the
device, byte by byte with a table. Engine thread only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.engine.row import Row

_WORD_BITS = 32

# Little-endian words: bit i of word w is bit i % 8 of byte 4 w + i // 8.
assert sys.byteorder == "little"


class MaskBoard:
    """The masks of a group's draws, one after the other.

    What a draw was given must have been used before the next is written: its tokens have been read by then.
    """

    def __init__(self) -> None:
        self._words: mx.array | None = None  # int32 [rows, words]
        self._written: npt.NDArray[np.int32] = np.zeros((0, 0), np.int32)  # the same memory
        self._bits: mx.array | None = None  # bool [256, 8]

    def write(
        self, rows: Sequence[Row], vocabulary: int, failed: Callable[[Row, Exception], None]
    ) -> mx.array | None:
        """Per row and token, bool [rows, vocabulary], whether it may come next; None where every token may.

        vocabulary: the width of the logits. Ids past what a matcher writes are no tokens and may not come. A
        matcher that fails is told to `failed`, and its row is left free.
        """
        shape = (len(rows), -(-vocabulary // _WORD_BITS))
        if self._words is None or self._words.shape != shape:
            self._words = mx.array(np.zeros(shape, np.int32))
            mx.eval(self._words)
            self._written = np.array(self._words, copy=False)
        masked = False
        for row, line in zip(rows, self._written, strict=True):
            filled = False
            if row.constraint is not None:
                line[:] = 0
                try:
                    filled = row.constraint.fill(line)
                except Exception as err:
                    failed(row, err)
            if not filled:
                line[:] = -1
            masked = masked or filled
        if not masked:
            return None
        if self._bits is None:
            self._bits = mx.array(
                np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(
                    np.bool_
                )
            )
        widened = self._bits[self._words.view(mx.uint8)]
        return widened.reshape(len(rows), -1)[:, :vocabulary]
