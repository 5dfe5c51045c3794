"""Experts on their way into a device's memory: what arrives is what was read, whichever thread read it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mlxpool.shared.colibri.layout import Artifact, ExpertLayout, Part, Piece, Strided
from mlxpool.worker.colibri.contract import Rows
from mlxpool.worker.colibri.device_copies import DeviceCopies, DeviceError, with_device_copies
from mlxpool.worker.colibri.faults import ReadFault

_SIZES = {("gate_proj", "weight"): 5000, ("up_proj", "weight"): 4096, ("down_proj", "scales"): 3}


def _layout(layer: int) -> ExpertLayout:
    parts = tuple(Part(*key, "U8", (size,), size, key[0]) for key, size in _SIZES.items())  # type: ignore[arg-type]
    pieces = tuple(Piece(part.piece, "U8", part.shape, part.size_bytes, Strided("f", 0, 0)) for part in parts)
    return ExpertLayout(layer, f"layers.{layer}", 64, pieces, parts, {})


class _Source:
    """Every byte of an expert says which one it is."""

    def __init__(self) -> None:
        layers = (_layout(0), _layout(1))
        self.artifact = Artifact("", "stacked", "", {}, layers, None, {}, {}, False, (), "")
        self.closed = False

    def layout(self, layer: int) -> ExpertLayout:
        return self.artifact.layouts[layer]

    def fill(self, layer: int, expert: int, rows: Rows) -> int:
        assert all(row.ctypes.data % 4096 == 0 for row in rows.values())
        if expert == 63:
            raise ReadFault(layer, expert, "f", "gone")
        for row in rows.values():
            row[:] = layer * 64 + expert
        return sum(row.nbytes for row in rows.values())

    def close(self) -> None:
        self.closed = True


class _Driver:
    def __init__(self) -> None:
        self.buffers: list[Any] = []
        self.full = False

    def locked(self, size_bytes: int) -> Any:
        self.buffers.append(np.zeros(size_bytes, np.uint8))
        return self.buffers[-1]

    def copy(self, pairs: list[tuple[Any, Any]]) -> None:
        if self.full:
            raise DeviceError("cuMemcpyHtoDAsync_v2 failed with status 700")
        for held, row in pairs:
            assert any(np.shares_memory(held, one) for one in self.buffers)
            row[:] = held


def _rows() -> dict[Any, Any]:
    return {key: np.zeros(size, np.uint8) for key, size in _SIZES.items()}


def test_many_threads_copy_without_mixing_experts_up() -> None:
    source, driver = _Source(), _Driver()
    copies = DeviceCopies(source, driver)  # type: ignore[arg-type]
    asked = [(layer, expert, _rows()) for layer in (0, 1) for expert in range(63)]
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda one: copies.fill(*one), asked))
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
        copies.fill(1, 63, _rows())
    driver.full = True
    with pytest.raises(ReadFault, match="layer 0, expert 2 .* status 700"):
        copies.fill(0, 2, _rows())
    driver.full = False
    rows = _rows()
    copies.fill(0, 2, rows)
    assert (rows["up_proj", "weight"] == 2).all()


def test_other_backends_read_straight_into_their_memory() -> None:
    source = _Source()
    assert with_device_copies(source, "cpu") is source
    assert with_device_copies(source, "metal") is source


def test_without_a_driver_the_processor_writes(capfd: pytest.CaptureFixture[str]) -> None:
    source = _Source()
    assert with_device_copies(source, "cuda") is source
    assert "libcuda.so.1" in capfd.readouterr().err
