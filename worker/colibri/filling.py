"""One expert's bytes into a slot's rows: straight where slots hold what files do, else by way of a buffer.

Segments of one expert are read by several threads, so what a row is made of is kept with the expert, in a
buffer of a pool, until all of it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mlxpool.shared.colibri.layout import ExpertLayout, Part, Piece
from mlxpool.worker.colibri import disk
from mlxpool.worker.colibri.contract import Rows
from mlxpool.worker.colibri.disk import Bytes
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.segments import Segment

# Of the widest numbers that slots hold: an array has to begin at a multiple of it.
WIDEST_BYTES = 4
# How parts are made that are read where they belong.
_IN_PLACE = ("copy", "offset")


class Files(Protocol):
    def read(self, segment: Segment, targets: Sequence[Bytes]) -> None:
        """Fill the targets, one after the other. Raises OSError, or disk.Ended."""
        ...


class FileFilling:
    """contract.Filling from files. buffers: of buffer_bytes at least, taken from only where they are needed.

    Raises ValueError where a row is not of its part's size.
    """

    def __init__(
        self, files: Files, layout: ExpertLayout, expert: int, rows: Rows, buffers: disk.Pool
    ) -> None:
        self._files, self._layout, self._expert, self._rows = files, layout, expert, rows
        self._buffers = buffers
        self._buffer: Bytes | None = None
        for part in layout.parts:
            row = rows[part.projection, part.part]
            if row.nbytes != part.size_bytes:
                raise ValueError(
                    f"{part.projection}.{part.part}: a row of {row.nbytes}, not {part.size_bytes} bytes"
                )
        self._targets = {
            part.piece: rows[part.projection, part.part] for part in layout.parts if part.fill in _IN_PLACE
        }
        through = [piece for piece in layout.pieces if piece.name not in self._targets]
        if through:
            self._buffer = buffers.take()
            place = 0
            for piece in through:
                start = place + phase(piece, expert)
                self._targets[piece.name] = self._buffer[start : start + piece.size_bytes]
                place += room_bytes(piece.size_bytes)
        self._pieces = [self._targets[piece.name] for piece in layout.pieces]

    def read(self, segment: Segment) -> None:
        targets = [self._pieces[span.piece][span.start : span.stop] for span in segment.spans]
        try:
            self._files.read(segment, targets)
        except disk.Ended as ended:
            raise ReadFault(self._layout.layer, self._expert, segment.file, str(ended)) from None
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise ReadFault(self._layout.layer, self._expert, segment.file, reason) from None

    def finish(self) -> None:
        for part in self._layout.parts:
            if part.fill != "copy":
                row = self._rows[part.projection, part.part]
                _convert(part, self._layout, self._targets[part.piece], row)

    def release(self) -> None:
        if self._buffer is not None:
            self._buffers.give(self._buffer)
            self._buffer = None


def buffer_bytes(layout: ExpertLayout) -> int:
    """What an expert needs beside its rows until it is whole."""
    in_place = {part.piece for part in layout.parts if part.fill in _IN_PLACE}
    return sum(room_bytes(piece.size_bytes) for piece in layout.pieces if piece.name not in in_place)


def phase(piece: Piece, expert: int) -> int:
    """How far behind a block's beginning memory has to begin for direct reads to go straight into it; 0 where
    no array could begin there."""
    _, offset = piece.places.at(expert)
    behind = offset % disk.BLOCK_BYTES
    return behind if behind % WIDEST_BYTES == 0 else 0


def room_bytes(size_bytes: int) -> int:
    """For so many bytes to begin at a block, or at any phase behind one."""
    return (-(-size_bytes // disk.BLOCK_BYTES) + 1) * disk.BLOCK_BYTES


def _convert(part: Part, layout: ExpertLayout, read: Bytes, row: Bytes) -> None:
    if part.fill == "offset":
        np.bitwise_xor(row, np.uint8(0x80), out=row)
    elif part.fill == "widen":
        piece = next(piece for piece in layout.pieces if piece.name == part.piece)
        if piece.dtype == "BF16":
            np.left_shift(read.view("<u2"), np.uint32(16), out=row.view("<u4"))
        else:
            np.copyto(row.view("<f4"), read.view("<f2"))
    else:
        scales = brain_floats(read.view("<u4"))
        if part.fill == "group_biases":
            wide = scales.astype(np.uint32) << np.uint32(16)
            # Eight times a float is exact: the bias's rounding is the scale's.
            scales = ((wide.view(np.float32) * np.float32(-8)).view(np.uint32) >> np.uint32(16)).astype("<u2")
        np.copyto(row.view("<u2"), scales)


def brain_floats(raw: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """bfloat16 of float32, both as their bits, to nearest and to even."""
    return ((raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        "<u2"
    )
