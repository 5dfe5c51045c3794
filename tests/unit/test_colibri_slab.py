"""Slots in memory: what is written from outside is what MLX computes with, and memory that is given back."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxpool.shared.colibri.layout import ExpertLayout, Part, Piece, Quantised, Strided
from mlxpool.worker.colibri import huge_pages
from mlxpool.worker.colibri import slab as slabs
from mlxpool.worker.colibri.huge_pages import HUGE_BYTES
from mlxpool.worker.colibri.slab import PAGE_BYTES, Slab, Staging, Writing, writing

MODES: tuple[Writing, ...] = ("direct", "assign")


def _layout(large: int = 4096) -> ExpertLayout:
    """Parts of every type that a slot holds, some of them no whole pages."""
    parts = (
        Part("gate_proj", "weight", "U32", (16, large // 64), large, piece="gate_proj.weight"),
        Part("gate_proj", "scales", "BF16", (16, 3), 96, piece="gate_proj.scales"),
        Part("gate_proj", "biases", "F16", (16, 3), 96, piece="gate_proj.biases"),
        Part("up_proj", "scales", "U8", (7,), 7, piece="up_proj.scales"),
        Part("down_proj", "row_scales", "F32", (5,), 20, piece="down_proj.weight.qs"),
    )
    place = Strided("x", 0, 0)
    pieces = tuple(Piece(one.piece, one.dtype, one.shape, one.size_bytes, place) for one in parts)
    return ExpertLayout(0, "mlp", 8, pieces, parts, {"gate_proj": Quantised("affine", 4, 64)})


def _put(slab: Slab, slot: int, seed: int) -> dict[object, np.ndarray]:
    draw = np.random.default_rng(seed)
    rows = slab.rows(slot) if slab.mode == "direct" else Staging().take(slab.layout)
    for row in rows.values():
        row[:] = draw.integers(0, 60, row.size, np.uint8)
    if slab.mode == "assign":
        slab.assign(slot, rows)
    return {key: row.copy() for key, row in rows.items()}


def _bytes(slab: Slab, slot: int) -> dict[object, np.ndarray]:
    """As MLX has them, by way of an operation of its own."""
    found = {}
    for key, array in slab.arrays.items():
        one = array[slot].view(mx.uint8)
        found[key] = np.array(mx.where(one > 255, 0, one).astype(mx.uint8)).reshape(-1)
    return found


def _same(one: dict[object, np.ndarray], other: dict[object, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_into_a_slot_is_there_and_nowhere_else(mode: Writing) -> None:
    slab = Slab(_layout(), 5, mode)
    written = {slot: _put(slab, slot, slot) for slot in (0, 4, 2, 4)}
    assert all(_same(_bytes(slab, slot), rows) for slot, rows in written.items())
    assert all(not row.any() for slot in (1, 3) for row in _bytes(slab, slot).values())
    assert slab.held_bytes == 5 * (4096 + 96 + 96 + 7 + 20)
    assert [str(one.dtype).split(".")[-1] for one in slab.arrays.values()] == [
        "uint32",
        "bfloat16",
        "float16",
        "uint8",
        "float32",
    ]


def test_rows_of_whole_pages_begin_on_a_page() -> None:
    slab = Slab(_layout(2 * PAGE_BYTES), 3, "direct")
    for slot in range(3):
        assert slab.rows(slot)["gate_proj", "weight"].ctypes.data % PAGE_BYTES == 0
    for row in Staging().take(slab.layout).values():
        assert row.ctypes.data % PAGE_BYTES == 0


@pytest.mark.parametrize("mode", MODES)
def test_other_numbers_of_slots_keep_what_stays(mode: Writing) -> None:
    slab = Slab(_layout(), 4, mode)
    written = [_put(slab, slot, slot) for slot in range(4)]
    slab.resize(2, [1, 3])
    assert _same(_bytes(slab, 0), written[1])
    assert _same(_bytes(slab, 1), written[3])
    slab.resize(6, [0, 1])
    assert _same(_bytes(slab, 1), written[3])
    other = _put(slab, 5, 9)
    assert _same(_bytes(slab, 5), other)
    slab.resize(1, [])
    assert slab.slots == 1


@pytest.mark.parametrize("mode", MODES)
def test_memory_of_slots_that_are_given_back_is_free(mode: Writing) -> None:
    slab = Slab(_layout(1 << 20), 16, mode)
    before = mx.get_active_memory() + mx.get_cache_memory()
    slab.resize(2, [0, 5])
    after = mx.get_active_memory() + mx.get_cache_memory()
    assert before - after > 13 << 20
    del slab
    mx.clear_cache()
    assert after - mx.get_active_memory() > 1 << 20


def test_a_product_that_waits_to_run_reads_what_lay_there_when_it_was_asked_for() -> None:
    slab = Slab(_layout(), 2, "direct")
    written = _put(slab, 0, 1)
    product = slab.arrays["up_proj", "scales"][0] + 0
    slab.hold(product)
    slab.settle()
    _put(slab, 0, 2)
    assert np.array_equal(np.array(product), written["up_proj", "scales"])


def test_a_product_that_fails_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = Slab(_layout(), 2, "direct")
    slab.hold(slab.arrays["up_proj", "scales"][0] + 0)

    def fails(*_: object) -> None:
        raise RuntimeError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fails)
        with pytest.raises(RuntimeError, match="no memory is left"):
            slab.settle()
    product = slab.arrays["up_proj", "scales"][1] + 0
    slab.hold(product)
    slab.settle()
    assert product.shape == slab.arrays["up_proj", "scales"].shape[1:]


def test_products_that_have_run_are_not_kept() -> None:
    slab = Slab(_layout(), 2, "direct")
    mx.clear_cache()
    before = mx.get_active_memory()
    for _ in range(200):
        product = mx.broadcast_to(slab.arrays["up_proj", "scales"][0][:1], (1 << 16,)) + 0
        slab.hold(product)
        mx.eval(product)
    del product
    assert mx.get_active_memory() - before < 16 << 16


def test_the_mode_of_writing_is_what_the_backend_can_do() -> None:
    assert writing("auto") == "direct"
    assert writing("direct") == "direct"
    assert writing("assign") == "assign"


def test_a_backend_that_does_not_see_writes_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpool.worker.colibri.slab._sees_outside_writes", lambda: False)
    assert writing("auto") == "assign"
    with pytest.raises(ValueError, match='"assign" works here'):
        writing("direct")


def test_buffers_of_the_host_are_used_again() -> None:
    staging, layout = Staging(), _layout()
    first = staging.take(layout)
    second = staging.take(layout)
    assert first is not second
    staging.give(layout, first)
    assert staging.take(layout) is first


def test_a_part_may_be_of_more_bytes_than_an_axis_has_numbers() -> None:
    # 255 slots of 24 MiB: MLX counts along one axis in 32 bits. Nothing of it is computed.
    part = Part("up_proj", "weight", "U32", (6144, 1024), 24 * 2**20, piece="up_proj.weight", phase=8)
    assert slabs._view(slabs._pages(part, 255), part, 255, 8).shape == (255, 6144, 1024)


def test_a_slot_that_is_not_there_is_no_kernels_to_read() -> None:
    slab = Slab(_layout(), 5, "direct")
    assert slab.places([4, 0, 2]).tolist() == [4, 0, 2]
    assert slab.places(np.array([], np.int64)).shape == (0,)
    for beyond in ([0, 5], [-1]):
        with pytest.raises(IndexError, match="of 5"):
            slab.places(beyond)
    slab.resize(2, [0, 1])
    with pytest.raises(IndexError, match="slots 2 to 2 of 2"):
        slab.places([2])


def _huge_bytes(place: int) -> int:
    """Of the mapping that an address is in, as the kernel counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, end = (int(one, 16) for one in first.split("-"))
            inside = start <= place < end
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has huge pages for who asks")
def test_large_slabs_lie_in_huge_pages_if_there_are_any() -> None:
    plain = mmap.mmap(-1, 8 * HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    plain.madvise(mmap.MADV_HUGEPAGE)
    plain.write(bytes(8 * HUGE_BYTES))
    with memoryview(plain) as view:
        given = _huge_bytes(np.frombuffer(view, np.uint8).ctypes.data + HUGE_BYTES)
    slab = Slab(_layout(8 * HUGE_BYTES), 2, "direct")
    if given:
        row = slab.rows(1)["gate_proj", "weight"]
        assert _huge_bytes(row.ctypes.data) >= 8 * HUGE_BYTES
    assert not any(row.any() for slot in range(2) for row in _bytes(slab, slot).values())
    written = _put(slab, 1, 3)
    assert _same(_bytes(slab, 1), written)


@pytest.mark.parametrize("setting", ["always [madvise] never\n", "always madvise [never]\n", None])
def test_where_the_system_has_no_huge_pages_nothing_is_lost(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    class Refusing:
        def __init__(self, _: object) -> None:
            self.madvise = lambda _place, _size, advice: refused.append(advice) or -1

    monkeypatch.setattr(huge_pages.ctypes, "CDLL", Refusing)
    monkeypatch.setattr(huge_pages, "_SETTING", tmp_path / "enabled")
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
    memory = np.ones(2 * HUGE_BYTES, np.uint8)
    assert not huge_pages.move_zeros(memory)
    assert memory.all()
    # Where they are off nobody is asked.
    is_asked = sys.platform == "linux" and "[never]" not in (setting or "")
    assert refused == [getattr(mmap, "MADV_HUGEPAGE", 14)][:is_asked]
