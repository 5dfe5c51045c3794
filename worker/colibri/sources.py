"""Experts read from an artifact's files straight into a slot's memory, whatever the form.

What lies side by side on disk is fetched by one read: a record whole, of colibri's container the three
matrices and the three scales, of stacked files each part alone. Where slots hold what the disk holds, the
read's target is the slot itself.

Files are opened once, so that one that is deleted or replaced later is still read as it was.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.launch import IoMode
from mlxpool.shared.colibri.layout import Artifact, ExpertLayout, Part, Piece, Strided
from mlxpool.shared.files import open_regular
from mlxpool.worker.colibri import disk
from mlxpool.worker.colibri.contract import Rows
from mlxpool.worker.colibri.faults import ReadFault

Bytes = npt.NDArray[np.uint8]

# Of the widest numbers that slots hold: an array has to begin at a multiple of it.
_WIDEST_BYTES = 4


class Run(NamedTuple):
    """Bytes that lie side by side in one file. pieces: indices into the layout's, in their order on disk."""

    file: str
    offset: int
    pieces: tuple[int, ...]


def runs(layout: ExpertLayout, expert: int) -> list[Run]:
    """What to read for one expert: as few runs as there can be, pieces not asked for left out."""
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


class FileSource:
    """contract.ExpertSource over files.

    artifact: with layouts as this backend's slots hold them. io: the mode in use; io_reason: why it is not
    the one asked for, "" where it is. unit: of direct reads.
    """

    def __init__(self, artifact: Artifact, files: dict[str, BinaryIO], mode: disk.Mode) -> None:
        self.artifact = artifact
        self.io, self.io_reason, self.unit = mode
        self._files = files
        self._descriptors = {name: file.fileno() for name, file in files.items()}
        self._opened = {name: _state(one) for name, one in self._descriptors.items()}
        self._layouts = artifact.layouts
        self._scratch = disk.Scratch()

    def layout(self, layer: int) -> ExpertLayout:
        return self._layouts[layer]

    def fill(self, layer: int, expert: int, rows: Rows) -> int:
        layout = self._layouts[layer]
        if not 0 <= expert < layout.experts:
            raise ValueError(f"layer {layer} has {layout.experts} experts, no {expert}")
        targets, converted = _targets(layout, rows, self._scratch)
        for run in runs(layout, expert):
            self._read(layer, expert, run, [targets[index] for index in run.pieces])
        for part, read in converted:
            _convert(part, layout, read, rows[part.projection, part.part])
        return layout.record_bytes

    def _read(self, layer: int, expert: int, run: Run, targets: Sequence[Bytes]) -> None:
        descriptor = self._descriptors[run.file]
        try:
            if self.io == "direct":
                disk.read_direct(descriptor, run.offset, targets, self.unit, self._scratch)
            else:
                disk.read_into(descriptor, run.offset, targets)
            if self.io == "uncached":
                disk.drop_pages(descriptor, run.offset, sum(target.nbytes for target in targets))
        except disk.Ended as ended:
            raise ReadFault(layer, expert, run.file, str(ended)) from None
        except OSError as problem:
            raise ReadFault(layer, expert, run.file, problem.strerror or str(problem)) from None

    def overwritten(self) -> str | None:
        for name, one in sorted(self._descriptors.items()):
            if _state(one) != self._opened[name]:
                return name
        return None

    def close(self) -> None:
        """Nothing may be read any more, nor be under way."""
        for file in self._files.values():
            file.close()


def _state(descriptor: int) -> tuple[int, int]:
    """What changes when an open file is written: its size, and when that was last done."""
    said = os.fstat(descriptor)
    return said.st_size, said.st_mtime_ns


def open_source(artifact: Artifact, backend: Backend, io: IoMode = "auto") -> FileSource:
    """The artifact's experts, their files open. Raises CheckpointError where one of them isn't as the headers
    said."""
    needed = _ends(artifact)
    disk.allow_files(len(needed))
    files: dict[str, BinaryIO] = {}
    try:
        for name, (end, holds) in needed.items():
            files[name] = open_regular(Path(artifact.folder) / name)
            size = os.fstat(files[name].fileno()).st_size
            if size < end:
                raise CheckpointError(f"{name}: {end - size} bytes shorter than it was: {holds} is not whole")
        mode = disk.prepare([file.fileno() for file in files.values()], io)
    except (OSError, CheckpointError) as problem:
        for file in files.values():
            file.close()
        if isinstance(problem, OSError):
            if problem.filename is None:
                # Of a file that is open already a system says only its number.
                raise CheckpointError(f"{artifact.folder}: its experts can't be read: {problem}") from None
            name = Path(str(problem.filename)).name
            raise CheckpointError(f"{name}: can't be opened: {problem.strerror}") from None
        raise
    held = artifacts.on_backend(artifact, backend)
    # Elsewhere no driver is that strict, and kernels may want more of an address than is known here.
    return FileSource(in_phase(held, mode.unit) if backend == "cpu" else held, files, mode)


def in_phase(artifact: Artifact, unit: disk.Unit) -> Artifact:
    """The artifact with slots laid as the files are, wherever direct reads would else go through a buffer."""
    mtp = artifact.mtp
    return msgspec.structs.replace(
        artifact,
        layers=tuple(_in_phase(layout, unit) for layout in artifact.layers),
        mtp=None if mtp is None else _in_phase(mtp, unit),
    )


def _in_phase(layout: ExpertLayout, unit: disk.Unit) -> ExpertLayout:
    places = {piece.name: piece.places for piece in layout.pieces}
    parts = []
    for part in layout.parts:
        of = places[part.piece]
        begins = (of.offset, of.offset + of.stride) if isinstance(of, Strided) else of.offsets
        # Where a layer's experts lie in several files, as in most of them.
        (phase, _), *_ = Counter(offset % unit.address for offset in begins).most_common(1)
        is_kept = part.size_bytes % unit.address == 0 and part.fill in ("copy", "offset")
        parts.append(
            msgspec.structs.replace(part, phase=phase if is_kept and phase % _WIDEST_BYTES == 0 else 0)
        )
    return msgspec.structs.replace(layout, parts=tuple(parts))


def _ends(artifact: Artifact) -> dict[str, tuple[int, str]]:
    """Per file with experts, how long it must be at least, and what lies there."""
    ends: dict[str, tuple[int, str]] = {}
    for layout in artifact.layouts.values():
        for piece in layout.pieces:
            for file, expert in _last(piece, layout.experts):
                end = piece.places.at(expert)[1] + piece.size_bytes
                if end > ends.get(file, (0, ""))[0]:
                    ends[file] = end, f"layer {layout.layer}, expert {expert}"
    return ends


def _last(piece: Piece, experts: int) -> list[tuple[str, int]]:
    """Per file, the expert whose piece lies last in it."""
    places = piece.places
    if isinstance(places, Strided):
        return [(places.file, experts - 1)]
    last: dict[int, int] = {}
    for expert, (file, offset) in enumerate(zip(places.of, places.offsets, strict=True)):
        if file not in last or offset > places.offsets[last[file]]:
            last[file] = expert
    return [(places.files[file], expert) for file, expert in last.items()]


def _targets(
    layout: ExpertLayout, rows: Rows, scratch: disk.Scratch
) -> tuple[list[Bytes], list[tuple[Part, Bytes]]]:
    """Where each piece is read to; parts that are made of one afterwards, with the bytes to make them of."""
    by_piece: dict[str, Bytes] = {}
    converted: list[tuple[Part, Bytes]] = []
    sizes = {piece.name: piece.size_bytes for piece in layout.pieces}
    for part in layout.parts:
        row = rows[part.projection, part.part]
        if row.nbytes != part.size_bytes:
            raise ValueError(
                f"{part.projection}.{part.part}: a row of {row.nbytes}, not {part.size_bytes} bytes"
            )
        if part.fill in ("copy", "offset"):
            by_piece[part.piece] = row
        elif part.piece not in by_piece:
            by_piece[part.piece] = scratch.take(part.piece, sizes[part.piece])
        if part.fill != "copy":
            converted.append((part, by_piece[part.piece]))
    return [by_piece[piece.name] for piece in layout.pieces], converted


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
