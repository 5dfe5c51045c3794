"""What to read for one expert: few ranges of its files, cut into segments that several threads fetch at once.

What lies side by side on disk is one run: a record whole, of colibri's container the three matrices and the
three scales, of stacked files each part alone. With one expert missing, a thread that took its runs in turn
would leave the disk one request; so each is cut, at blocks of the file, where direct reads stay direct.
"""

from __future__ import annotations

from typing import NamedTuple

from mlxpool.shared.colibri.layout import ExpertLayout
from mlxpool.worker.colibri import disk

# What one read fetches at least, where a run has it: enough for a disk to be as fast as it is, and worth a
# thread's turn (some 50 us).
SEGMENT_BYTES = 2**20


class Run(NamedTuple):
    """Bytes that lie side by side in one file. pieces: indices into the layout's, in their order on disk."""

    file: str
    offset: int
    pieces: tuple[int, ...]


class Span(NamedTuple):
    """The bytes [start, stop) of a piece. piece: its index in the layout's."""

    piece: int
    start: int
    stop: int


class Segment(NamedTuple):
    """One read: size bytes of a file, and what of which pieces they are, one after the other."""

    file: str
    offset: int
    size: int
    spans: tuple[Span, ...]


def runs(layout: ExpertLayout, expert: int) -> list[Run]:
    """As few as there can be, pieces not asked for left out."""
    places = sorted((*piece.places.at(expert), index) for index, piece in enumerate(layout.pieces))
    found: list[Run] = []
    end = -1
    for file, offset, index in places:
        if found and found[-1].file == file and offset == end:
            found[-1] = found[-1]._replace(pieces=(*found[-1].pieces, index))
        else:
            found.append(Run(file, offset, (index,)))
        end = offset + layout.pieces[index].size_bytes
    return found


def segments(layout: ExpertLayout, expert: int, most_bytes: int) -> list[Segment]:
    """All of the expert's bytes, each once. A run is cut into as many equal segments as none needs to be
    larger than most_bytes (but for what the cuts were moved by, less than a block)."""
    found: list[Segment] = []
    for run in runs(layout, expert):
        size = sum(layout.pieces[index].size_bytes for index in run.pieces)
        count = max(-(-size // most_bytes), 1)
        cuts = [run.offset + size * number // count for number in range(1, count)]
        cuts = [cut - cut % disk.BLOCK_BYTES for cut in cuts]
        pieces = iter(run.pieces)
        piece = next(pieces)
        start = 0
        at = run.offset
        for cut in (*cuts, run.offset + size):
            if cut <= at < run.offset + size:
                continue
            begin, spans = at, []
            while at < cut:
                left = layout.pieces[piece].size_bytes - start
                if left == 0:
                    piece, start = next(pieces), 0
                    continue
                took = min(left, cut - at)
                spans.append(Span(piece, start, start + took))
                start, at = start + took, at + took
            found.append(Segment(run.file, begin, cut - begin, tuple(spans)))
    return found
