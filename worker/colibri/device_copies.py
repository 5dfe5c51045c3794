"""Experts into the memory of an NVIDIA device without page faults.

MLX's arrays are managed memory there: the processor can write them, but each page that moves to and fro costs
a fault: 170 MB written by the processor took 56 ms to reach the device (H200), at a sixteenth of what the bus
can do. So what is read goes into a page-locked buffer of the reading thread, and from there to the slot by a
copy of the driver's, which moves no page. The buffers are as many as there are threads, of one expert each.

The driver is called through ctypes, which lets go of the GIL meanwhile; nothing here is an mx call.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri.layout import Artifact, ExpertLayout
from mlxpool.worker.colibri.contract import ExpertSource, Rows
from mlxpool.worker.colibri.faults import ReadFault

_DRIVER = "libcuda.so.1"

# What reads without the page cache ask of a buffer's address and of each part's place in it.
_ALIGN_BYTES = 4096


class DeviceError(Exception):
    """A call of the driver failed; one line that names it."""


class Driver:
    """The calls that a copy needs. Raises DeviceError, also where there is no such driver."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_DRIVER)
        except OSError as problem:
            raise DeviceError(f"no {_DRIVER}: {problem}") from None
        self._threads = threading.local()
        self._call("cuInit", ctypes.c_uint(0))
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._context = ctypes.c_void_p()
        # The context that MLX's own calls run in.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(f"{_DRIVER} has no {name}")
        status = function(*arguments)
        if status != 0:
            raise DeviceError(f"{name} failed with status {status}")

    def _stream(self) -> ctypes.c_void_p:
        """The calling thread's own, until the thread ends."""
        stream: ctypes.c_void_p | None = getattr(self._threads, "stream", None)
        if stream is None:
            self._call("cuCtxSetCurrent", self._context)
            stream = ctypes.c_void_p()
            # Waits for nothing that MLX has under way, and nothing of MLX's waits for it.
            non_blocking = ctypes.c_uint(1)
            self._call("cuStreamCreate", ctypes.byref(stream), non_blocking)
            self._ends_with(stream, "cuStreamDestroy_v2", stream.value)
            self._threads.stream = stream
        return stream

    def _ends_with(self, holder: Any, name: str, value: int | None) -> None:
        """Call the driver when nobody holds `holder` any more. Not at the process's end: the driver may be
        gone by then."""
        weakref.finalize(holder, self._give_back, name, value).atexit = False

    def locked(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """A page-locked buffer, given back when nobody holds it or a part of it any more."""
        self._call("cuCtxSetCurrent", self._context)
        place = ctypes.c_void_p()
        for_every_context = ctypes.c_uint(1)
        self._call("cuMemHostAlloc", ctypes.byref(place), ctypes.c_size_t(size_bytes), for_every_context)
        assert place.value is not None
        memory = (ctypes.c_uint8 * size_bytes).from_address(place.value)
        self._ends_with(memory, "cuMemFreeHost", place.value)
        return np.ctypeslib.as_array(memory)

    def _give_back(self, name: str, value: int | None) -> None:
        with contextlib.suppress(DeviceError):
            self._call("cuCtxSetCurrent", self._context)
            self._call(name, ctypes.c_void_p(value))

    def copy(self, pairs: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]) -> None:
        """Copy from page-locked bytes to managed ones, of equal lengths each; nothing of it is under way when
        this returns or raises."""
        stream = self._stream()
        try:
            for held, row in pairs:
                if held.nbytes != row.nbytes:
                    raise DeviceError(f"{held.nbytes} bytes don't fit into a row of {row.nbytes}")
                self._call(
                    "cuMemcpyHtoDAsync_v2",
                    ctypes.c_uint64(row.ctypes.data),
                    ctypes.c_void_p(held.ctypes.data),
                    ctypes.c_size_t(held.nbytes),
                    stream,
                )
        finally:
            # Where a copy is refused too: those before it must not write into a slot that is another's next.
            self._call("cuStreamSynchronize", stream)


class DeviceCopies:
    """An `ExpertSource` over another one. A thread that has called `fill` keeps its buffer until it ends."""

    def __init__(self, source: ExpertSource, driver: Driver) -> None:
        self._source, self._driver = source, driver
        self._buffers = threading.local()
        layouts = source.artifact.layouts.values()
        self._bytes = max((sum(_room(p.size_bytes) for p in one.parts) for one in layouts), default=0)

    @property
    def artifact(self) -> Artifact:
        return self._source.artifact

    def layout(self, layer: int) -> ExpertLayout:
        return self._source.layout(layer)

    def fill(self, layer: int, expert: int, rows: Rows) -> int:
        """As of any source. Raises ReadFault, also where the driver won't copy."""
        try:
            held = self._held(rows)
        except DeviceError as problem:
            raise ReadFault(layer, expert, "host memory", str(problem)) from None
        read_bytes = self._source.fill(layer, expert, held)
        try:
            self._driver.copy([(held[key], row) for key, row in rows.items()])
        except DeviceError as problem:
            raise ReadFault(layer, expert, "host memory", str(problem)) from None
        return read_bytes

    def _held(self, rows: Rows) -> Rows:
        """The thread's buffer cut into rows like these."""
        buffer: npt.NDArray[np.uint8] | None = getattr(self._buffers, "bytes", None)
        if buffer is None:
            space = self._driver.locked(self._bytes + _ALIGN_BYTES)
            start = -space.ctypes.data % _ALIGN_BYTES
            buffer = self._buffers.bytes = space[start : start + self._bytes]
        found, place = {}, 0
        for key, row in rows.items():
            found[key] = buffer[place : place + row.nbytes]
            place += _room(row.nbytes)
        return found

    def overwritten(self) -> str | None:
        return self._source.overwritten()

    def close(self) -> None:
        self._source.close()


def _room(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


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
