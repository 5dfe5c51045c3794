"""Experts into the memory of an NVIDIA device without page faults.

MLX's arrays are managed memory there: the processor can write them, but each page that moves to and fro costs
a fault: 170 MB written by the processor took 56 ms to reach the device (H200), at a sixteenth of what the bus
can do. So what is read goes into a page-locked buffer, and from there to the slot by a copy of the driver's,
which moves no page. Each segment is copied while the next is being read; what has to be converted follows at
the end. There is a buffer of one expert for each that is under way: one more than there are reading threads
at most.

The driver is called through ctypes, which lets go of the GIL meanwhile; nothing here is an mx call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri.layout import ExpertLayout
from mlxpool.worker.colibri import disk
from mlxpool.worker.colibri.contract import ExpertSource, Filling, Rows
from mlxpool.worker.colibri.disk import Bytes
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.filling import phase, room_bytes
from mlxpool.worker.colibri.segments import Segment

_DRIVER = "libcuda.so.1"


class DeviceError(Exception):
    """A call of the driver failed; one line that names it."""


class Driver:
    """The calls that a copy needs. Raises DeviceError, also where there is no such driver."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_DRIVER)
        except OSError as problem:
            raise DeviceError(f"no {_DRIVER}: {problem}") from None
        self._call("cuInit", ctypes.c_uint(0))
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._context = ctypes.c_void_p()
        # The context that MLX's own calls run in.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuCtxSetCurrent", self._context)
        self._stream = ctypes.c_void_p()
        # Waits for nothing that MLX has under way, and nothing of MLX's waits for it.
        non_blocking = ctypes.c_uint(1)
        self._call("cuStreamCreate", ctypes.byref(self._stream), non_blocking)
        self._ends_with(self, "cuStreamDestroy_v2", self._stream.value)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(f"{_DRIVER} has no {name}")
        status = function(*arguments)
        if status != 0:
            raise DeviceError(f"{name} failed with status {status}")

    def _ends_with(self, holder: Any, name: str, value: int | None) -> None:
        """Call the driver when nobody holds `holder` any more. Not at the process's end: the driver may be
        gone by then."""
        give_back = functools.partial(_give_back, self._library, self._context)
        weakref.finalize(holder, give_back, name, value).atexit = False

    def locked(self, size_bytes: int) -> Bytes:
        """A page-locked buffer, given back when nobody holds it or a part of it any more."""
        self._call("cuCtxSetCurrent", self._context)
        place = ctypes.c_void_p()
        for_every_context = ctypes.c_uint(1)
        self._call("cuMemHostAlloc", ctypes.byref(place), ctypes.c_size_t(size_bytes), for_every_context)
        assert place.value is not None
        memory = (ctypes.c_uint8 * size_bytes).from_address(place.value)
        self._ends_with(memory, "cuMemFreeHost", place.value)
        return np.ctypeslib.as_array(memory)

    def begin_copies(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Copy from page-locked bytes to managed ones, of equal lengths each. They are under way until
        `end_copies` has returned, those before one that is refused too."""
        self._call("cuCtxSetCurrent", self._context)
        for held, row in pairs:
            if held.nbytes != row.nbytes:
                raise DeviceError(f"{held.nbytes} bytes don't fit into a row of {row.nbytes}")
            self._call(
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_uint64(row.ctypes.data),
                ctypes.c_void_p(held.ctypes.data),
                ctypes.c_size_t(held.nbytes),
                self._stream,
            )

    def end_copies(self) -> None:
        """Nothing that was begun before, by any thread, is under way when this returns or raises."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuStreamSynchronize", self._stream)


def _give_back(library: Any, context: ctypes.c_void_p, name: str, value: int | None) -> None:
    library.cuCtxSetCurrent(context)
    getattr(library, name)(ctypes.c_void_p(value))


class _Copied:
    """contract.Filling by way of a page-locked buffer, which it has until it is released."""

    def __init__(self, copies: DeviceCopies, layer: int, expert: int, rows: Rows, buffer: Bytes) -> None:
        self._copies, self._layer, self._expert, self._rows = copies, layer, expert, rows
        self._buffer = buffer
        layout = copies.layout(layer)
        self._held = _cut(buffer, rows, layout, expert)
        # What is as the disk has it, by its piece's place in the layout, and what is made at the end.
        read = {part.piece: (part.projection, part.part) for part in layout.parts if part.fill == "copy"}
        self._read = [read.get(piece.name) for piece in layout.pieces]
        self._made = [(part.projection, part.part) for part in layout.parts if part.fill != "copy"]
        self._under_way = False
        self._inner = copies.source.begin(layer, expert, self._held)

    def read(self, segment: Segment) -> None:
        self._inner.read(segment)
        pairs = []
        for span in segment.spans:
            if (key := self._read[span.piece]) is not None:
                part = slice(span.start, span.stop)
                pairs.append((self._held[key][part], self._rows[key][part]))
        self._copy(pairs)

    def finish(self) -> None:
        self._inner.finish()
        self._copy([(self._held[key], self._rows[key]) for key in self._made])
        self._end()

    def release(self) -> None:
        # After a fault: what arrives later would be written into a slot that is another's next.
        with contextlib.suppress(ReadFault):
            self._end()
        self._inner.release()
        self._copies.buffers.give(self._buffer)

    def _copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        if not pairs:
            return
        self._under_way = True
        try:
            self._copies.driver.begin_copies(pairs)
        except DeviceError as problem:
            raise _fault(self._layer, self._expert, problem) from None

    def _end(self) -> None:
        if not self._under_way:
            return
        try:
            self._copies.driver.end_copies()
        except DeviceError as problem:
            raise _fault(self._layer, self._expert, problem) from None
        self._under_way = False


class DeviceCopies(ExpertSource):
    """An `ExpertSource` over another one. Keeps as many buffers as experts were ever under way at once, until
    it is closed."""

    def __init__(self, source: ExpertSource, driver: Driver) -> None:
        self.source, self.driver = source, driver
        self.artifact = source.artifact
        layouts = source.artifact.layouts.values()
        self._bytes = max((sum(room_bytes(p.size_bytes) for p in one.parts) for one in layouts), default=0)
        self.buffers = disk.Pool(self._locked)

    def layout(self, layer: int) -> ExpertLayout:
        return self.source.layout(layer)

    def segments(self, layer: int, expert: int, most_bytes: int) -> Sequence[Segment]:
        return self.source.segments(layer, expert, most_bytes)

    def begin(self, layer: int, expert: int, rows: Rows) -> Filling:
        try:
            buffer = self.buffers.take()
        except DeviceError as problem:
            raise _fault(layer, expert, problem) from None
        try:
            return _Copied(self, layer, expert, rows, buffer)
        except BaseException:
            self.buffers.give(buffer)
            raise

    def _locked(self) -> Bytes:
        space = self.driver.locked(self._bytes + disk.BLOCK_BYTES)
        start = -disk.address(space) % disk.BLOCK_BYTES
        return space[start : start + self._bytes]

    def overwritten(self) -> str | None:
        return self.source.overwritten()

    def close(self) -> None:
        self.source.close()
        self.buffers.clear()


def _cut(buffer: Bytes, rows: Rows, layout: ExpertLayout, expert: int) -> Rows:
    """The buffer as rows like these, each laid as its bytes are in their file."""
    pieces = {piece.name: piece for piece in layout.pieces}
    found, place = {}, 0
    for part in layout.parts:
        row = rows[part.projection, part.part]
        start = place + phase(pieces[part.piece], expert)
        found[part.projection, part.part] = buffer[start : start + row.nbytes]
        place += room_bytes(row.nbytes)
    return found


def _fault(layer: int, expert: int, problem: DeviceError) -> ReadFault:
    return ReadFault(layer, expert, "host memory", str(problem))


def with_device_copies(source: ExpertSource, backend: Backend) -> ExpertSource:
    """The source itself where memory is the processor's own, or where the driver can't be called."""
    if backend != "cuda":
        return source
    try:
        return DeviceCopies(source, Driver())
    except DeviceError as problem:
        sys.stderr.write(f"experts are written by the processor: {problem}\n")
        sys.stderr.flush()
        return source
