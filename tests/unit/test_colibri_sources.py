"""Experts read from real files: every form, in every mode, to the byte."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact
from mlxpool.shared.colibri.launch import IoMode
from mlxpool.shared.colibri.layout import ExpertLayout, Piece, Scattered, Strided
from mlxpool.worker.colibri import disk
from mlxpool.worker.colibri import reader as readers
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.reader import Reader
from mlxpool.worker.colibri.segments import Run, runs, segments
from mlxpool.worker.colibri.sources import FileSource, open_source
from tests import tiny_glm
from tests.tools.expert_fill import fill

Rows = dict[tuple[str, str], npt.NDArray[np.uint8]]
MODES: tuple[IoMode, ...] = ("direct", "uncached", "buffered")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Two layers of experts and the draft layer's, so that every test is done in a moment.
SMALL: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 5, "indexer_types": ["full"] * 3}
CONFIG = tiny_glm.config(**SMALL)


@pytest.fixture(scope="module")
def numbers() -> tiny_glm.Weights:
    return tiny_glm.weights(CONFIG)


@pytest.fixture(scope="module")
def forms(numbers: tiny_glm.Weights, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("forms")
    writers: dict[str, Callable[[Path], Path]] = {
        "stacked": lambda to: tiny_glm.write_stacked(to, CONFIG, numbers, mtp=True),
        "records": lambda to: tiny_glm.write_records(to, CONFIG, numbers),
        "experts": lambda to: tiny_glm.write_experts(to, CONFIG, numbers),
        "halves": lambda to: tiny_glm.write_experts(to, CONFIG, numbers, dtype="F16"),
        "row": lambda to: tiny_glm.write_container(to, CONFIG, numbers),
        "grouped": lambda to: tiny_glm.write_container(to, CONFIG, numbers, scheme="grouped"),
    }

    def folder(name: str) -> Path:
        if not (root / name).exists():
            writers[name](root / name)
        return root / name

    return folder


def opened(folder: Path, io: IoMode = "buffered", backend: Backend = "cpu") -> FileSource:
    return open_source(artifact.read(folder), backend, io)


def new_rows(layout: ExpertLayout, *, at: int | None = None) -> Rows:
    """A slot full of rubbish. at: bytes from a block's beginning; None to let it fall where it falls."""
    made = {}
    for part in layout.parts:
        if at is None:
            row = np.empty(part.size_bytes, np.uint8)
        else:
            row = disk.blocks(part.size_bytes + disk.BLOCK_BYTES)[at : at + part.size_bytes]
        row[:] = 0xA5
        made[part.projection, part.part] = row
    return made


def read(source: FileSource, layer: int, expert: int, *, at: int | None = None) -> Rows:
    rows = new_rows(source.layout(layer), at=at)
    assert fill(source, layer, expert, rows) == source.layout(layer).record_bytes
    return rows


def original(numbers: Mapping[str, Any], layer: int, expert: int, projection: str) -> tiny_glm.Floats:
    found: tiny_glm.Floats = numbers[f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"]
    return found


def brain(number: tiny_glm.Floats) -> npt.NDArray[np.uint32]:
    """To the nearest bfloat16, by an arithmetic of its own: the two neighbours, and which is nearer."""
    raw = number.view(np.uint32)
    low = raw & np.uint32(0xFFFF0000)
    high = low + np.uint32(0x10000)
    below = np.abs(number.astype(np.float64) - low.view(np.float32))
    above = np.abs(number.astype(np.float64) - high.view(np.float32))
    even = (low >> np.uint32(16)) & np.uint32(1) == 0
    nearest: npt.NDArray[np.uint32] = np.where((below < above) | ((below == above) & even), low, high)
    return nearest


@pytest.mark.parametrize("io", MODES)
def test_16_bit_floats_are_widened_exactly(
    forms: Callable[[str], Path], numbers: tiny_glm.Weights, io: IoMode
) -> None:
    for name in ("experts", "halves"):
        source = opened(forms(name), io)
        for layer, expert in ((1, 0), (2, 4), (3, 2)):
            rows = read(source, layer, expert)
            for projection in PROJECTIONS:
                number = original(numbers, layer, expert, projection)
                wanted = number.astype(np.float16).astype(np.float32)
                if name == "experts":
                    wanted = brain(number).view(np.float32)
                assert rows[projection, "weight"].tobytes() == wanted.tobytes()
        source.close()


def test_off_the_cpu_they_stay_as_they_are(forms: Callable[[str], Path], numbers: tiny_glm.Weights) -> None:
    source = opened(forms("experts"), backend="metal")
    held = read(source, 2, 1)["down_proj", "weight"]
    wanted = (brain(original(numbers, 2, 1, "down_proj")) >> np.uint32(16)).astype(np.uint16)
    assert held.tobytes() == wanted.tobytes()
    source.close()


@pytest.mark.parametrize("io", MODES)
def test_packed_experts_are_read_byte_for_byte(
    forms: Callable[[str], Path], numbers: tiny_glm.Weights, io: IoMode
) -> None:
    import mlx.core as mx

    for name in ("stacked", "records"):
        source = opened(forms(name), io)
        for layer, expert in ((1, 4), (3, 0)):
            rows = read(source, layer, expert)
            for projection in PROJECTIONS:
                number = mx.array(original(numbers, layer, expert, projection)).astype(mx.bfloat16)
                for part, wanted in zip(
                    ("weight", "scales", "biases"), mx.quantize(number, group_size=64, bits=4), strict=True
                ):
                    assert rows[projection, part].tobytes() == bytes(memoryview(wanted.view(mx.uint8)))
        source.close()


@pytest.mark.parametrize("io", MODES)
def test_colibris_halves_are_read_as_they_are_and_its_bytes_from_zero(
    forms: Callable[[str], Path], numbers: tiny_glm.Weights, io: IoMode
) -> None:
    source = opened(forms("row"), io)
    halves, bytes_ = read(source, 1, 3), read(source, 3, 3)
    for projection in PROJECTIONS:
        data, scales = tiny_glm.packed_4(original(numbers, 1, 3, projection), None)
        assert halves[projection, "weight"].tobytes() == data.data.tobytes()
        assert halves[projection, "row_scales"].tobytes() == scales.data.tobytes()
        data, scales = tiny_glm.packed_8(original(numbers, 3, 3, projection))
        counted = (data.data.view(np.int8).astype(np.int16) + 128).astype(np.uint8)
        assert bytes_[projection, "weight"].tobytes() == counted.tobytes()
        assert bytes_[projection, "row_scales"].tobytes() == scales.data.tobytes()
    source.close()


@pytest.mark.parametrize("io", MODES)
def test_colibris_groups_get_a_scale_and_a_bias_of_half_the_bits(
    forms: Callable[[str], Path], numbers: tiny_glm.Weights, io: IoMode
) -> None:
    source = opened(forms("grouped"), io)
    rows = read(source, 2, 4)
    for projection in PROJECTIONS:
        data, scales = tiny_glm.packed_4(original(numbers, 2, 4, projection), 64)
        assert rows[projection, "weight"].tobytes() == data.data.tobytes()
        rounded = brain(scales.data.reshape(-1))
        held = rows[projection, "scales"].view(np.uint16)
        assert held.tolist() == (rounded >> np.uint32(16)).tolist()
        biases = rows[projection, "biases"].view(np.uint16).astype(np.uint32) << np.uint32(16)
        assert biases.view(np.float32).tolist() == (-8 * rounded.view(np.float32)).tolist()
    source.close()


@pytest.mark.parametrize("name", ["stacked", "records", "experts", "row", "grouped"])
def test_every_mode_and_place_in_memory_gives_the_same_bytes(forms: Callable[[str], Path], name: str) -> None:
    plain = opened(forms(name))
    for io in MODES:
        source = opened(forms(name), io)
        assert source.io == io
        for layer, layout in source.artifact.layouts.items():
            for expert in (0, layout.experts - 1):
                wanted = read(plain, layer, expert, at=0)
                for at in (0, 1, 512):
                    rows = read(source, layer, expert, at=at)
                    assert all((rows[key] == wanted[key]).all() for key in wanted)
        source.close()
    plain.close()


def test_auto_takes_what_the_disk_takes(forms: Callable[[str], Path]) -> None:
    source = opened(forms("row"), "auto")
    assert (source.io, source.io_reason) in (("direct", ""), ("uncached", ""))
    source.close()


def test_where_direct_reads_are_refused_it_is_buffered_and_told(
    forms: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.os.preadv

    def refusing(descriptor: int, buffers: Any, offset: int) -> int:
        if disk.fcntl.fcntl(descriptor, disk.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(disk.os, "preadv", refusing)
    source = opened(forms("row"), "direct")
    assert (source.io, source.io_reason) == (
        "buffered",
        "the file system refuses direct reads: Invalid argument",
    )
    read(source, 1, 0)
    source.close()


def test_reads_of_any_length_are_gone_on_with(
    forms: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read may return less than was asked, anywhere: within a part, a block, a group of parts."""
    wanted = {name: read(opened(forms(name)), 2, 1) for name in ("stacked", "row", "experts")}
    real = disk.os.preadv
    draw = np.random.default_rng(3)

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        direct = disk.fcntl.fcntl(descriptor, disk.fcntl.F_GETFL) & os.O_DIRECT
        step = disk.BLOCK_BYTES if direct else 1
        total = sum(len(one) for one in buffers)
        most = step * int(draw.integers(1, max(total // step // 2, 2)))
        first = buffers[0][:most]
        return real(descriptor, [first], offset)

    monkeypatch.setattr(disk.os, "preadv", short)
    for name, rows in wanted.items():
        for io in MODES:
            source = opened(forms(name), io)
            again = read(source, 2, 1)
            assert all((rows[key] == again[key]).all() for key in rows)
            source.close()


def test_a_file_that_is_cut_while_it_is_open_is_named(numbers: tiny_glm.Weights, tmp_path: Path) -> None:
    for io in MODES:
        folder = tiny_glm.write_records(tmp_path / io, CONFIG, numbers)
        source = opened(folder, io)
        layout = source.layout(2)
        (file, offset) = layout.pieces[-1].places.at(3)
        os.truncate(folder / file, offset + 10)
        with pytest.raises(ReadFault) as fault:
            read(source, 2, 3)
        assert (fault.value.layer, fault.value.expert, fault.value.file) == (2, 3, "experts/002.bin")
        assert f"it ends at byte {offset + 10}, where" in fault.value.reason
        read(source, 2, 2)
        os.truncate(folder / file, 10)
        with pytest.raises(ReadFault, match="it ends at byte 10, where"):
            read(source, 2, 2)
        source.close()


def test_a_disks_error_is_told_with_layer_expert_and_file(
    forms: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(forms("records"))

    def broken(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(disk.os, "preadv", broken)
        with pytest.raises(ReadFault) as fault:
            read(source, 1, 4)
    assert str(fault.value) == (
        "layer 1, expert 4 could not be read from experts/001.bin: Input/output error"
    )
    read(source, 1, 4)
    source.close()


def test_files_that_are_deleted_or_replaced_are_read_as_they_were(
    numbers: tiny_glm.Weights, tmp_path: Path
) -> None:
    folder = tiny_glm.write_container(tmp_path / "row", CONFIG, numbers)
    source = opened(folder)
    before = read(source, 3, 1)
    for path in folder.glob("out-*.safetensors"):
        path.unlink()
        path.write_bytes(b"other")
    after = read(source, 3, 1)
    assert all((before[key] == after[key]).all() for key in before)
    source.close()


def test_a_file_that_went_or_shrank_since_the_headers_were_read_is_refused_at_start(
    numbers: tiny_glm.Weights, tmp_path: Path
) -> None:
    folder = tiny_glm.write_records(tmp_path / "records", CONFIG, numbers)
    found = artifact.read(folder)
    path = folder / "experts/002.bin"
    stride = path.stat().st_size // 5
    os.truncate(path, 4 * stride + 5)
    with pytest.raises(
        CheckpointError, match=r"^experts/002.bin: \d+ bytes shorter than it was: layer 2, expert 4"
    ):
        open_source(found, "cpu")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"^002.bin: can't be opened: No such file"):
        open_source(found, "cpu")
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"^002.bin: can't be opened: not a regular file"):
        open_source(found, "cpu")


def test_a_disk_that_fails_at_start_is_told_with_the_folder(
    forms: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = artifact.read(forms("records"))

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "prepare", broken)
    with pytest.raises(CheckpointError) as told:
        open_source(found, "cpu")
    assert str(told.value) == f"{found.folder}: its experts can't be read: [Errno 5] Input/output error"


def test_what_a_slot_can_not_hold_is_refused(forms: Callable[[str], Path]) -> None:
    source = opened(forms("row"))
    rows = new_rows(source.layout(1))
    with pytest.raises(ValueError, match="has 5 experts, no 5"):
        fill(source, 1, 5, rows)
    rows["up_proj", "weight"] = rows["up_proj", "weight"][1:]
    with pytest.raises(ValueError, match=r"up_proj.weight: a row of"):
        fill(source, 1, 0, rows)
    source.close()


def test_what_lies_side_by_side_is_one_read(forms: Callable[[str], Path]) -> None:
    reads = {}
    for name in ("records", "row", "stacked"):
        source = opened(forms(name))
        reads[name] = {len(runs(source.layout(1), expert)) for expert in range(5)}
        source.close()
    assert reads["records"] == {1}
    assert reads["stacked"] == {9}
    # Three matrices and three scales, or twice that where a shard's end lies between them.
    assert max(reads["row"]) <= 4
    assert min(reads["row"]) == 2


@st.composite
def layouts(draw: st.DrawFn) -> ExpertLayout:
    """Pieces anywhere in three files, often side by side."""
    pieces = []
    ends = {"a": 0, "b": 0, "c": 0}
    for index in range(draw(st.integers(1, 9))):
        size = draw(st.integers(1, 50))
        if draw(st.booleans()):
            of = tuple(draw(st.sampled_from([0, 1, 2])) for _ in range(2))
            offsets = []
            for file in of:
                name = "abc"[file]
                offsets.append(ends[name] + draw(st.sampled_from([0, 0, 7])))
                ends[name] = offsets[-1] + size
            places: Strided | Scattered = Scattered(("a", "b", "c"), of, tuple(offsets))
        else:
            name = draw(st.sampled_from("abc"))
            start = ends[name] + draw(st.sampled_from([0, 0, 7]))
            places = Strided(name, start, size)
            ends[name] = start + 2 * size
        pieces.append(Piece(f"p{index}", "U8", (size,), size, places))
    return ExpertLayout(0, "m", 2, tuple(pieces), (), {})


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(0, 1))
def test_runs_are_what_the_pieces_are_and_as_few_as_can_be(layout: ExpertLayout, expert: int) -> None:
    found = runs(layout, expert)
    seen: list[int] = []
    for run in found:
        at = run.offset
        for index in run.pieces:
            assert layout.pieces[index].places.at(expert) == (run.file, at)
            at += layout.pieces[index].size_bytes
            seen.append(index)
    assert sorted(seen) == list(range(len(layout.pieces)))

    def end(run: Run) -> tuple[str, int]:
        return run.file, run.offset + sum(layout.pieces[index].size_bytes for index in run.pieces)

    assert not {end(run) for run in found} & {(run.file, run.offset) for run in found}


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(0, 1), st.integers(1, 60), st.sampled_from([1, 8, 4096]))
def test_segments_are_every_byte_once_cut_at_blocks(
    layout: ExpertLayout, expert: int, most_bytes: int, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "BLOCK_BYTES", block)
        found = segments(layout, expert, most_bytes)
    seen: dict[int, list[tuple[int, int]]] = {}
    for segment in found:
        at = segment.offset
        assert 0 < segment.size < most_bytes + block
        for index, start, stop in segment.spans:
            assert start < stop
            file, offset = layout.pieces[index].places.at(expert)
            assert (segment.file, at) == (file, offset + start)
            at += stop - start
            seen.setdefault(index, []).append((start, stop))
        assert at == segment.offset + segment.size
    for index, piece in enumerate(layout.pieces):
        starts, stops = zip(*sorted(seen[index]), strict=True)
        assert (starts[0], stops[-1]) == (0, piece.size_bytes)
        assert starts[1:] == stops[:-1]
    begins = {(run.file, run.offset) for run in runs(layout, expert)}
    assert all(one.offset % block == 0 for one in found if (one.file, one.offset) not in begins)


def test_a_run_is_cut_into_equal_segments() -> None:
    def sizes(offset: int, size: int) -> list[int]:
        piece = Piece("w", "U8", (size,), size, Strided("f", offset, size))
        return [one.size for one in segments(ExpertLayout(0, "m", 1, (piece,), (), {}), 0, 2**21)]

    # Nowhere a small one at the end, which would cost as much as a large one.
    assert sizes(0, 3 * 2**21) == [2**21] * 3
    assert sizes(1000, 3 * 2**21) == [2**21 - 1000, 2**21, 2**21 + 1000]
    assert sizes(0, 2**21 + 4096) == [2**20, 2**20 + 4096]


@pytest.mark.parametrize("name", ["stacked", "records", "experts", "row", "grouped"])
def test_segments_read_at_once_make_the_same_experts(
    forms: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small ones, of more experts than there are threads; what is converted has buffers of its own."""
    monkeypatch.setattr(
        readers.Reader, "_cut", lambda self, one, _: self._source.segments(one.layer, one.expert, 4096)
    )
    plain = opened(forms(name))
    for io in MODES:
        source = opened(forms(name), io)
        reader = Reader(source, 4, 2**20)
        asked = [
            (layer, expert, rows, reader.submit(layer, expert, rows, demand=bool(expert % 3)))
            for layer, layout in source.artifact.layouts.items()
            for expert in range(layout.experts)
            for rows in [new_rows(layout, at=expert % 2 * 512)]
        ]
        for layer, expert, rows, read_ in asked:
            assert read_.result(60).read_bytes == source.layout(layer).record_bytes
            wanted = read(plain, layer, expert)
            assert all((rows[key] == wanted[key]).all() for key in wanted)
        reader.close()
    plain.close()


def test_a_buffer_of_an_expert_that_failed_is_used_again(
    forms: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(forms("experts"))
    made: list[int] = []
    real = disk.blocks
    monkeypatch.setattr(disk, "blocks", lambda size: made.append(size) or real(size))

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(disk.os, "preadv", broken)
        for _ in range(3):
            with pytest.raises(ReadFault, match="Input/output error"):
                fill(source, 1, 0, new_rows(source.layout(1)))
    fill(source, 2, 3, new_rows(source.layout(2)))
    assert len(made) == 1
    source.close()


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("noise") / "noise.bin"
    path.write_bytes(np.random.default_rng(5).bytes(60_001))
    return path


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offset=st.integers(0, 3000),
    sizes=st.lists(st.one_of(st.integers(0, 2000), st.integers(5000, 9000)), min_size=1, max_size=6),
    shifts=st.lists(st.one_of(st.just(None), st.integers(0, 511)), min_size=6, max_size=6),
    unit=st.sampled_from([disk.Unit(512, 4), disk.Unit(512, 512), disk.Unit(4096, 512)]),
)
def test_direct_reads_of_any_place_and_length_are_whole(
    noise: Path, offset: int, sizes: list[int], shifts: list[int | None], unit: disk.Unit
) -> None:
    """A shift of None lays a target as its file's blocks lie, so that they can go straight into it."""
    wanted = noise.read_bytes()[offset : offset + sum(sizes)]
    targets, at = [], offset
    for size, shift in zip(sizes, shifts, strict=False):
        begin = at % disk.BLOCK_BYTES if shift is None else shift
        targets.append(disk.blocks(size + disk.BLOCK_BYTES)[begin : begin + size])
        at += size
    for io in ("direct", "buffered"):
        with noise.open("rb") as file:
            mode = disk.prepare([file.fileno()], io)
            own = unit if io == "buffered" or unit.address >= mode.unit.address else mode.unit
            for target in targets:
                target[:] = 0xA5
            disk.read_direct(file.fileno(), offset, targets, own, disk.Edges())
        assert b"".join(target.tobytes() for target in targets) == wanted


def test_a_disk_that_went_away_is_not_taken_for_overwritten_files(
    forms: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(forms("stacked"))

    def gone(_: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", gone)
        assert source.overwritten() is None
    assert source.overwritten() is None
    source.close()


def test_whole_blocks_go_straight_where_they_belong(noise: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    real = disk.os.preadv

    def watched(descriptor: int, buffers: Any, offset: int) -> int:
        asked.append([len(one) for one in buffers])
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(disk.os, "preadv", watched)
    rows = [disk.blocks(20_000)[at : at + size] for at, size in ((104, 10_000), (104 + 10_000 - 8192, 9_000))]
    with noise.open("rb") as file:
        disk.read_direct(file.fileno(), 104, rows, disk.Unit(512, 512), disk.Edges())
        whole = noise.read_bytes()[104 : 104 + 19_000]
        assert b"".join(row.tobytes() for row in rows) == whole
        assert asked == [[512, 9216, 512, 8704, 512]]
        asked.clear()
        with pytest.raises(disk.Ended, match="it ends at byte 60001, where 99 more were due"):
            disk.read_direct(file.fileno(), 60_000, [rows[0][:100]], disk.Unit(), disk.Edges())


@pytest.mark.parametrize("name", ["stacked", "row"])
def test_slots_lie_as_the_files_do_where_a_driver_is_strict(
    forms: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of virtual machines, which want 512 of an address; no copying then."""
    from mlxpool.worker.colibri.slab import Slab

    plain = opened(forms(name))
    real = disk.os.preadv
    lengths: list[int] = []

    def watched(descriptor: int, buffers: Any, offset: int) -> int:
        lengths.extend(len(one) for one in buffers)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(disk, "_unit", lambda descriptor: disk.Unit(512, 512))
    monkeypatch.setattr(disk.os, "preadv", watched)
    source = opened(forms(name), "direct")
    slab = Slab(source.layout(2), 3, "direct")
    rows = slab.rows(2)
    weights = [part for part in source.layout(2).parts if part.part == "weight"]
    places = [piece.places for piece in source.layout(2).pieces if piece.name.endswith(".weight")]
    # One of those that lie as most of the layer do; a file's end may be among them.
    expert = next(
        one
        for one in range(5)
        if all(place.at(one)[1] % 512 == part.phase for place, part in zip(places, weights, strict=True))
    )
    wanted = read(plain, 2, expert)
    lengths.clear()
    fill(source, 2, expert, rows)
    assert all((rows[key] == wanted[key]).all() for key in wanted)
    # All of a matrix but its first and last block, which it may share.
    straight = [length for length in lengths if length > 8192]
    assert len(straight) == 3
    assert all(weights[0].size_bytes - 512 <= length <= weights[0].size_bytes for length in straight)
    for each in (source, plain):
        each.close()
