"""Experts on their way into a device's memory: what arrives is what was read, whichever thread read it."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mlxpool.shared.colibri.layout import Artifact, ExpertLayout, Fill, Part, Piece, Strided
from mlxpool.worker.colibri.contract import ExpertSource, Filling, Rows
from mlxpool.worker.colibri.device_copies import DeviceCopies, DeviceError, Driver, with_device_copies
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.segments import Segment, Span
from tests.tools.expert_fill import fill

_SIZES = {("gate_proj", "weight"): 5000, ("up_proj", "weight"): 4096, ("down_proj", "scales"): 3}


# Not as the disk has it before the end.
_FILLS: dict[str, Fill] = {"up_proj": "offset"}
_OFFSETS = {"gate_proj": 400, "up_proj": 8192, "down_proj": 4099}


def _layout(layer: int) -> ExpertLayout:
    parts = tuple(
        Part(*key, "U8", (size,), size, key[0], fill=_FILLS.get(key[0], "copy"))  # type: ignore[arg-type]
        for key, size in _SIZES.items()
    )
    pieces = tuple(
        Piece(part.piece, "U8", part.shape, part.size_bytes, Strided("f", _OFFSETS[part.piece], 512))
        for part in parts
    )
    return ExpertLayout(layer, f"layers.{layer}", 64, pieces, parts, {})


class _Filling:
    """A part of the expert for each two segments, in which every byte says which expert it is; what is to be
    converted says nothing before the end."""

    def __init__(self, layer: int, expert: int, rows: Rows) -> None:
        self._layer, self._expert, self._rows = layer, expert, rows
        self._left = 2 * len(rows)

    def read(self, segment: Segment) -> None:
        if self._expert == 63:
            raise ReadFault(self._layer, self._expert, "f", "gone")
        for span in segment.spans:
            projection, row = [(key[0], row) for key, row in self._rows.items()][span.piece]
            made = projection in _FILLS
            row[span.start : span.stop] = 255 if made else self._layer * 64 + self._expert
        self._left -= 1

    def finish(self) -> None:
        assert self._left == 0
        for (projection, _), row in self._rows.items():
            if projection in _FILLS:
                assert (row == 255).all()
                row[:] = self._layer * 64 + self._expert

    def release(self) -> None:
        pass


class _Source(ExpertSource):
    """Every byte of an expert says which one it is."""

    def __init__(self) -> None:
        layers = (_layout(0), _layout(1))
        self.artifact = Artifact("", "stacked", "", {}, layers, None, {}, {}, False, (), "")
        self.closed = False

    def layout(self, layer: int) -> ExpertLayout:
        return self.artifact.layouts[layer]

    def segments(self, _layer: int, _expert: int, _most_bytes: int) -> list[Segment]:
        return [
            Segment("f", 0, end - start, (Span(part, start, end),))
            for part, size in enumerate(_SIZES.values())
            for start, end in ((0, size // 2), (size // 2, size))
        ]

    def begin(self, layer: int, expert: int, rows: Rows) -> Filling:
        # As in the file, for direct reads to go straight there. Numbers have to begin at a multiple of four.
        behind = {projection: row.ctypes.data % 4096 for (projection, _), row in rows.items()}
        assert behind["gate_proj"] == (400 + 512 * expert) % 4096
        assert behind["up_proj"] == 512 * expert % 4096
        assert behind["down_proj"] == 0
        return _Filling(layer, expert, rows)

    def overwritten(self) -> str | None:
        return "f"

    def close(self) -> None:
        self.closed = True


class _Driver:
    """Copies arrive when they are waited for."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []
        self.pending: list[tuple[Any, Any]] = []
        self.full = False
        self._lock = threading.Lock()

    def locked(self, size_bytes: int) -> Any:
        self.buffers.append(np.zeros(size_bytes, np.uint8))
        return self.buffers[-1]

    def begin_copies(self, pairs: list[tuple[Any, Any]]) -> None:
        if self.full:
            raise DeviceError("cuMemcpyHtoDAsync_v2 failed with status 700")
        with self._lock:
            for held, row in pairs:
                assert any(np.shares_memory(held, one) for one in self.buffers)
                self.pending.append((held, row))

    def end_copies(self) -> None:
        with self._lock:
            for held, row in self.pending:
                row[:] = held
            self.pending.clear()


def _rows() -> dict[Any, Any]:
    return {key: np.zeros(size, np.uint8) for key, size in _SIZES.items()}


def test_many_threads_copy_without_mixing_experts_up() -> None:
    source, driver = _Source(), _Driver()
    copies = DeviceCopies(source, driver)  # type: ignore[arg-type]
    asked = [(layer, expert, _rows()) for layer in (0, 1) for expert in range(63)]
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda one: fill(copies, *one), asked))
    assert read == [sum(_SIZES.values())] * len(asked)
    for layer, expert, rows in asked:
        assert all((row == layer * 64 + expert).all() for row in rows.values())
    assert len(driver.buffers) <= 4
    copies.close()
    assert source.closed


def test_a_fault_of_the_disk_and_one_of_the_driver_name_the_expert() -> None:
    driver = _Driver()
    copies = DeviceCopies(_Source(), driver)  # type: ignore[arg-type]
    with pytest.raises(ReadFault, match="layer 1, expert 63 could not be read from f: gone"):
        fill(copies, 1, 63, _rows())
    driver.full = True
    with pytest.raises(ReadFault, match="layer 0, expert 2 .* status 700"):
        fill(copies, 0, 2, _rows())
    driver.full = False
    rows = _rows()
    fill(copies, 0, 2, rows)
    assert (rows["up_proj", "weight"] == 2).all()


def test_other_backends_read_straight_into_their_memory() -> None:
    source = _Source()
    assert with_device_copies(source, "cpu") is source
    assert with_device_copies(source, "metal") is source


def test_without_a_driver_the_processor_writes(capfd: pytest.CaptureFixture[str]) -> None:
    source = _Source()
    assert with_device_copies(source, "cuda") is source
    assert "libcuda.so.1" in capfd.readouterr().err


class _Library:
    """libcuda, whose copies arrive when somebody waits for them."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.pending: list[tuple[int, int, int]] = []
        self.refused = 2  # of copies, by place
        self.made = 0
        self.buffers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.told.append(name)
            own = getattr(type(self), f"_{name}", None)
            return 0 if own is None else int(own(self, *arguments))

        return call

    def _cuStreamCreate(self, stream: Any, _flags: Any) -> int:
        self.made += 1
        stream._obj.value = self.made
        return 0

    def _cuMemHostAlloc(self, place: Any, size: Any, _flags: Any) -> int:
        self.buffers.append(np.zeros(size.value, np.uint8))
        place._obj.value = self.buffers[-1].ctypes.data
        return 0

    def _cuMemcpyHtoDAsync_v2(self, to: Any, of: Any, size: Any, _stream: Any) -> int:
        if len(self.pending) == self.refused:
            return 700
        self.pending.append((to.value, of.value, size.value))
        return 0

    def _cuStreamSynchronize(self, _stream: Any) -> int:
        for one in self.pending:
            ctypes.memmove(*one)
        self.pending.clear()
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> _Library:
    made = _Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: made)
    return made


def test_a_copy_that_is_refused_leaves_none_under_way(library: _Library) -> None:
    # One that arrives later would overwrite what is read into the slot next.
    copies = DeviceCopies(_Source(), Driver())  # type: ignore[arg-type]
    rows = _rows()
    with pytest.raises(ReadFault, match="layer 0, expert 2 .*: cuMemcpyHtoDAsync_v2 failed with status 700"):
        fill(copies, 0, 2, rows)
    assert not library.pending
    library.refused = 99
    fill(copies, 1, 5, rows)
    assert all((row == 64 + 5).all() for row in rows.values())


def test_a_fault_of_the_disk_leaves_no_copy_under_way(library: _Library) -> None:
    library.refused = 99
    copies = DeviceCopies(_Source(), Driver())  # type: ignore[arg-type]
    filling = copies.begin(0, 1, _rows())
    filling.read(copies.segments(0, 1, 1)[0])
    assert library.pending
    filling.release()
    assert not library.pending


def test_rows_of_another_length_are_not_written(library: _Library) -> None:
    driver = Driver()
    held = driver.locked(16)
    with pytest.raises(DeviceError, match="16 bytes don't fit into a row of 15"):
        driver.begin_copies([(held, np.zeros(15, np.uint8))])
    assert "cuMemcpyHtoDAsync_v2" not in library.told


def test_the_buffers_end_with_the_source(library: _Library) -> None:
    library.refused = 99
    copies = DeviceCopies(_Source(), Driver())  # type: ignore[arg-type]
    begun = [copies.begin(0, expert, _rows()) for expert in range(3)]

    def end(filling: Filling) -> None:
        for segment in copies.segments(0, 0, 1):
            filling.read(segment)
        filling.finish()
        filling.release()

    threads = [threading.Thread(target=end, args=(filling,)) for filling in begun]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    del begun, threads, thread
    told = Counter(library.told)
    assert (told["cuStreamCreate"], told["cuMemHostAlloc"]) == (1, 3)
    assert (told["cuStreamDestroy_v2"], told["cuMemFreeHost"]) == (0, 0)
    copies.close()
    assert Counter(library.told)["cuMemFreeHost"] == 3


def test_the_stream_ends_with_the_driver(library: _Library) -> None:
    driver = Driver()
    assert Counter(library.told)["cuStreamCreate"] == 1
    del driver
    assert Counter(library.told)["cuStreamDestroy_v2"] == 1


def test_a_buffer_is_an_experts_until_it_is_released(library: _Library) -> None:
    library.refused = 99
    copies = DeviceCopies(_Source(), Driver())  # type: ignore[arg-type]
    first, second = (copies.begin(0, expert, _rows()) for expert in (1, 2))
    first.release()
    third = copies.begin(0, 3, _rows())
    assert Counter(library.told)["cuMemHostAlloc"] == 2
    for one in (second, third):
        one.release()
    assert copies.overwritten() == "f"
