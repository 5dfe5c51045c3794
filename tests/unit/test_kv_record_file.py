"""One file of a record: readable by others, and never taken for what it isn't or isn't any more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from mlxpool.shared.kv import record_file
from mlxpool.shared.kv.names import FileName, file_name
from mlxpool.shared.kv.record_file import (
    Head,
    RecordError,
    Tensor,
    encode,
    groups,
    read_data,
    read_head,
    verify,
)

PRINT = "ab" * 16
FILE = FileName(b"n" * 16, b"p" * 16, 256, 260, "state")
KEYS = np.arange(600, dtype=np.float32).reshape(2, 300)
VALUES = np.arange(6, dtype=np.uint16).reshape(1, 6)
BUFFERS = {"0.keys": memoryview(KEYS).cast("B"), "0.values": memoryview(VALUES).cast("B")}


def head(**changes: Any) -> Head:
    plain = Head(
        FILE,
        PRINT,
        (1, 2, 3, 2**32 - 1),
        {"0.keys": Tensor("F32", KEYS.shape), "0.values": Tensor("BF16", VALUES.shape)},
        {"0": [260, 0, -1]},
    )
    return msgspec.structs.replace(plain, **changes)


def content(**changes: Any) -> bytes:
    return b"".join(encode(head(**changes), BUFFERS))


def stored(folder: Path, data: bytes, file: FileName = FILE) -> Path:
    path = folder / file_name(file)
    path.write_bytes(data)
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = stored(tmp_path, content())
    verify(path, PRINT)
    descriptor = record_file.open_record(path)
    read = read_head(descriptor, FILE, PRINT)
    os.close(descriptor)
    assert (read.ids, read.scalars, read.tensors) == (head().ids, head().scalars, head().tensors)
    assert read.data_start % 64 == 0


def test_other_programs_read_the_file(tmp_path: Path) -> None:
    path = stored(tmp_path, content())
    arrays, metadata = mx.load(str(path), return_metadata=True)
    assert np.array_equal(np.array(arrays["0.keys"]), KEYS)
    assert np.array_equal(np.array(arrays["0.values"].view(mx.uint16)), VALUES)
    assert metadata["ids"] == "1 2 3 4294967295"
    with safe_open(str(path), "np") as opened:
        assert opened.metadata()["fingerprint"] == PRINT
        assert np.array_equal(opened.get_tensor("0.keys"), KEYS)


@contextlib.contextmanager
def flipped(path: Path, place: int) -> Iterator[None]:
    """The file with one bit of one byte the other way round."""
    descriptor = os.open(path, os.O_RDWR)
    was = os.pread(descriptor, 1, place)
    os.pwrite(descriptor, bytes([was[0] ^ 1 << place % 8]), place)
    yield
    os.pwrite(descriptor, was, place)
    os.close(descriptor)


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    whole = content()
    path = stored(tmp_path, whole)
    padding = range(whole.index(b"}" + b" " * 50) + 1, len(whole) - KEYS.nbytes - VALUES.nbytes)
    for place in range(len(whole)):
        if place in padding and place % 40:
            continue
        with flipped(path, place), pytest.raises(RecordError) as told:
            verify(path, PRINT)
        assert "\n" not in str(told.value)
    verify(path, PRINT)


def test_a_bit_of_the_header_is_noticed_before_any_data(tmp_path: Path) -> None:
    whole = content()
    path = stored(tmp_path, whole)
    for place in range(0, len(whole) - KEYS.nbytes - VALUES.nbytes, 5):
        descriptor = record_file.open_record(path)
        with flipped(path, place), pytest.raises(RecordError):
            read_head(descriptor, FILE, PRINT)
        os.close(descriptor)


def test_every_truncation_is_noticed_by_the_head_alone(tmp_path: Path) -> None:
    whole = content()
    path = stored(tmp_path, whole)
    for length in range(len(whole) - 1, -1, -3):
        os.truncate(path, length)
        descriptor = record_file.open_record(path)
        with pytest.raises(RecordError):
            read_head(descriptor, FILE, PRINT)
        os.close(descriptor)


def test_a_byte_too_many_is_noticed(tmp_path: Path) -> None:
    for more in (b"\0", b"x" * 4096):
        with pytest.raises(RecordError, match="were written"):
            verify(stored(tmp_path, content() + more), PRINT)


def other_heads() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "fingerprint", {"fingerprint": "cd" * 16}
    for field, value in {
        "name": b"x" * 16,
        "parent": b"x" * 16,
        "start": 255,
        "end": 261,
        "kind": "slice",
    }.items():
        file = msgspec.structs.replace(FILE, **{field: value})
        yield field, {"file": file, "ids": tuple(range(file.end - file.start))}
    yield "too few ids", {"ids": (1, 2, 3)}
    yield "an id that is too many", {"ids": (1, 2, 3, 4, 5)}


@pytest.mark.parametrize(("what", "changes"), list(other_heads()))
def test_a_whole_file_of_something_else_is_refused(
    what: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(RecordError):
        verify(stored(tmp_path, content(**changes)), PRINT)


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(record_file, "FORMAT", "mlxpool-kv-0")
        path = stored(tmp_path, content())
    with pytest.raises(RecordError, match="mlxpool-kv-0"):
        verify(path, PRINT)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b'"F32"', b'"F64"'),
        (b'"BF16"', b'"BF99"'),
        (b"[2,300]", b"[3,300]"),
        (b"[2,300]", b"[-2,30]"),
        (b"[0,2400]", b"[8,2408]"),
        (b'"0.values":{', b'"0.valuex":{'),
        (b'"scalars"', b'"scalarz"'),
        (b'"state"', b'"stare"'),
    ],
)
def test_a_header_that_agrees_with_its_hash_is_still_read_with_care(
    was: bytes, now: bytes, tmp_path: Path
) -> None:
    whole = content()
    start = len(whole) - KEYS.nbytes - VALUES.nbytes
    header = whole[:start].replace(was, now)
    assert header != whole[:start]
    assert len(header) == start
    begin, end = record_file._HASH_BEGIN, record_file._HASH_END
    blank = header[:begin] + b"0" * 32 + header[end:]
    signed = header[:begin] + record_file.hash_bytes(blank).encode() + header[end:]
    with pytest.raises(RecordError):
        verify(stored(tmp_path, signed + whole[start:]), PRINT)


def test_a_length_of_gigabytes_is_not_believed(tmp_path: Path) -> None:
    path = stored(tmp_path, (2**40).to_bytes(8, "little") + content()[8:])
    with pytest.raises(RecordError, match="header of"):
        verify(path, PRINT)


def test_links_pipes_and_folders_are_no_records(tmp_path: Path) -> None:
    real = stored(tmp_path, content())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = elsewhere / real.name
    path.symlink_to(real)
    with pytest.raises(OSError, match="symbolic"):
        verify(path, PRINT)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordError, match="regular"):
        verify(path, PRINT)
    path.unlink()
    path.mkdir()
    with pytest.raises(RecordError, match="regular"):
        verify(path, PRINT)


def test_thousands_of_tensors_and_empty_ones_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {f"{place}": np.full((place % 3,), place, dtype=np.uint32) for place in range(2500)}
    tensors = {name: Tensor("U32", array.shape) for name, array in arrays.items()}
    many = head(tensors=tensors)
    path = stored(
        tmp_path, b"".join(encode(many, {name: array.view(np.uint8).data for name, array in arrays.items()}))
    )
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], place: int) -> int:
        assert len(buffers) <= 1024
        return preadv(descriptor, [buffers[0][:3]] if len(buffers) % 2 else buffers[:5], place)

    monkeypatch.setattr(os, "preadv", short)
    descriptor = record_file.open_record(path)
    read = read_head(descriptor, FILE, PRINT)
    back = {name: np.empty_like(array) for name, array in arrays.items()}
    views = {name: array.view(np.uint8).data for name, array in back.items()}
    assert (
        sum(read_data(descriptor, read, names, views, check=True) for names in groups(read))
        == read.data_bytes
    )
    os.close(descriptor)
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)


def test_tensors_are_read_in_runs_of_some_megabytes(tmp_path: Path) -> None:
    megabyte = Tensor("U8", (2**20,))
    large = head(tensors={f"{place}": megabyte for place in range(20)} | {"last": Tensor("U8", (2**25,))})
    runs = groups(large)
    assert [len(run) for run in runs] == [8, 8, 4, 1]
    assert [name for run in runs for name in run] == list(large.tensors)
