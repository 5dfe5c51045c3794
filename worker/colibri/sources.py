"""Experts read from an artifact's files straight into a slot's memory, whatever the form.

Where slots hold what the disk holds, a read's target is the slot itself.

Files are opened once, so that one that is deleted or replaced later is still read as it was.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.launch import IoMode
from mlxpool.shared.colibri.layout import Artifact, ExpertLayout, Piece, Strided
from mlxpool.shared.files import open_regular
from mlxpool.worker.colibri import disk
from mlxpool.worker.colibri.contract import ExpertSource, Filling, Rows
from mlxpool.worker.colibri.disk import Bytes
from mlxpool.worker.colibri.filling import WIDEST_BYTES, FileFilling, buffer_bytes
from mlxpool.worker.colibri.segments import Segment, segments


class FileSource(ExpertSource):
    """Over files.

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
        self._edges = disk.Edges()
        # As many in use as experts are under way.
        size = max((buffer_bytes(layout) for layout in self._layouts.values()), default=0)
        self._buffers = disk.Pool(lambda: disk.blocks(size))

    def layout(self, layer: int) -> ExpertLayout:
        return self._layouts[layer]

    def segments(self, layer: int, expert: int, most_bytes: int) -> list[Segment]:
        layout = self._layouts[layer]
        if not 0 <= expert < layout.experts:
            raise ValueError(f"layer {layer} has {layout.experts} experts, no {expert}")
        return segments(layout, expert, most_bytes)

    def begin(self, layer: int, expert: int, rows: Rows) -> Filling:
        layout = self._layouts[layer]
        return FileFilling(self, layout, expert, rows, self._buffers)

    def read(self, segment: Segment, targets: Sequence[Bytes]) -> None:
        """Fill the targets, one after the other. Raises OSError, or disk.Ended."""
        descriptor = self._descriptors[segment.file]
        if self.io == "direct":
            disk.read_direct(descriptor, segment.offset, targets, self.unit, self._edges)
        else:
            disk.read_into(descriptor, segment.offset, targets)
        if self.io == "uncached":
            disk.drop_pages(descriptor, segment.offset, segment.size)

    def overwritten(self) -> str | None:
        for name, one in sorted(self._descriptors.items()):
            # A disk that went away says nothing of its files. Who reads one of them is told.
            with contextlib.suppress(OSError):
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
            msgspec.structs.replace(part, phase=phase if is_kept and phase % WIDEST_BYTES == 0 else 0)
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
