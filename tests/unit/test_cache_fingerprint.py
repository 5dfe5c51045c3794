"""A fingerprint is the same for the same model wherever it lies, and another for anything that differs."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxpool.shared import checkpoint
from mlxpool.worker.cache import fingerprint as module
from mlxpool.worker.cache.fingerprint import Fingerprint, fingerprint
from mlxpool.worker.cache.records import Layout, Leaf

LAYOUT = Layout((Leaf("KVCache", True), Leaf("RotatingKVCache", False)))
WORKER: dict[str, Any] = {"layout": LAYOUT, "dtype": "float32", "backend": "cpu", "kv": "float32"}


def made(folder: Path) -> Path:
    """A model folder of two weight files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 10000}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text("{}")
    noise = np.random.default_rng(0)
    for shard in (1, 2):
        tensors = {
            f"layer.{shard}.{name}": noise.standard_normal((64, 500)).astype(np.float32) for name in "ab"
        }
        save_file(tensors, folder / f"model-0000{shard}-of-00002.safetensors")
    return folder


def printed(folder: Path, **changes: Any) -> Fingerprint:
    return fingerprint(checkpoint.read(folder), **(WORKER | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "model")


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place, 2 if place < 0 else 0)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_copy_elsewhere_that_keeps_the_times_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    copy = shutil.copytree(folder, tmp_path / "far" / "another-name")
    assert printed(copy) == printed(folder)
    assert len(printed(folder).hash) == 32


def test_what_is_no_part_of_the_model_changes_nothing(folder: Path) -> None:
    before = printed(folder)
    (folder / "README.md").write_text("hello")
    (folder / "original.bin").write_text("hello")
    assert printed(folder) == before


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda folder: (folder / "config.json").write_text(
        '{"model_type": "llama", "rope_theta": 20000}'
    ),
    "tokenizer": lambda folder: (folder / "tokenizer.json").write_text('{"version": "2.0"}'),
    "tokenizer's config": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "first byte of weights": lambda folder: flip(
        folder / "model-00001-of-00002.safetensors", -2 * 64 * 500 * 4
    ),
    "last byte of weights": lambda folder: flip(folder / "model-00002-of-00002.safetensors", -1),
    "middle of a tensor": lambda folder: flip(folder / "model-00002-of-00002.safetensors", -64 * 500 * 2),
    # Where no sample is taken.
    "a few bytes by hand": lambda folder: flip(folder / "model-00001-of-00002.safetensors", -64 * 500 * 3),
    "a shard's name": lambda folder: (folder / "model-00002-of-00002.safetensors").rename(
        folder / "model-2.safetensors"
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_model_has_another_fingerprint(folder: Path, what: str) -> None:
    before = printed(folder)
    CHANGES[what](folder)
    assert printed(folder).hash != before.hash


@pytest.mark.parametrize(
    "change",
    [
        {"layout": Layout((Leaf("KVCache", True), Leaf("KVCache", True)))},
        {"layout": Layout((Leaf("KVCache", True), Leaf("ArraysCache", False)))},
        {"dtype": "bfloat16"},
        {"backend": "metal"},
        {"kv": "8 bits"},
    ],
    ids=str,
)
def test_another_way_to_compute_it_is_another_model(folder: Path, change: dict[str, Any]) -> None:
    assert printed(folder, **change).hash != printed(folder).hash


@pytest.mark.parametrize("package", ["mlx", "mlx-lm"])
def test_another_version_of_the_library_is_another_model(
    folder: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = printed(folder)
    real = module.importlib.metadata.version
    monkeypatch.setattr(
        module.importlib.metadata, "version", lambda name: "9" if name == package else real(name)
    )
    assert printed(folder).hash != before.hash


def test_another_format_of_files_is_another_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = printed(folder)
    monkeypatch.setattr(module, "FORMAT", "mlxpool-kv-9")
    assert printed(folder).hash != before.hash


def test_what_went_in_is_told_by_name(folder: Path) -> None:
    about = printed(folder).about
    assert (about["kv"], about["backend"], about["dtype"], about["model_type"]) == (
        "float32",
        "cpu",
        "float32",
        "llama",
    )
    assert {"config", "tokenizer", "weights", "layout", "mlx", "mlx_lm", "format"} <= about.keys()
    assert not any(str(folder) in text for text in about.values())


def test_a_few_kilobytes_of_each_tensor_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = checkpoint.read(folder)
    large = np.zeros((2048, 2048), np.float32)
    save_file({f"layer.{place}": large for place in range(4)}, folder / "model-00001-of-00002.safetensors")
    taken = []
    real = module.os.pread
    monkeypatch.setattr(
        module.os, "pread", lambda fd, count, place: taken.append(count) or real(fd, count, place)
    )
    begun = time.perf_counter()
    fingerprint(read, **WORKER)
    assert time.perf_counter() - begun < 0.5, "milliseconds on a quiet machine"
    assert sum(taken) < 200_000


def test_of_very_many_tensors_some_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(
        {f"expert.{place:05}": np.full(8, place, np.float32) for place in range(5000)},
        folder / "model-00001-of-00002.safetensors",
    )
    before = printed(folder)
    flip(folder / "model-00001-of-00002.safetensors", -5000 * 32)
    assert printed(folder).hash != before.hash
    samples = []
    real = module.os.pread
    monkeypatch.setattr(module.os, "pread", lambda *args: samples.append(1) or real(*args))
    printed(folder)
    assert len(samples) < 2200


def test_a_weight_file_that_is_gone_is_an_error_to_the_caller(folder: Path) -> None:
    read = checkpoint.read(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(OSError):
        fingerprint(read, **WORKER)


def test_records_without_a_header_are_sampled_all_over(folder: Path) -> None:
    (folder / "experts").mkdir()
    record = folder / "experts" / "003.bin"
    record.write_bytes(bytes(400_000))
    found = checkpoint.read(folder)
    read = msgspec.structs.replace(found, files=(*found.files, "experts/003.bin"))
    kept = record.stat()
    before = fingerprint(read, **WORKER)
    assert before.hash != printed(folder).hash
    assert fingerprint(read, **WORKER) == before
    for place in (0, 204_400, 399_999):
        flip(record, place)
        os.utime(record, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        assert fingerprint(read, **WORKER).hash != before.hash, place
        flip(record, place)
        os.utime(record, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        assert fingerprint(read, **WORKER) == before
    with record.open("ab") as file:
        file.write(b"\0")
    assert fingerprint(read, **WORKER).hash != before.hash


def test_sixty_thousand_tensors_of_experts_take_no_time(folder: Path) -> None:
    entries: dict[str, Any] = {}
    for place in range(60_000):
        entries[f"model.layers.{place // 768}.mlp.experts.{place % 768}.gate_proj.weight"] = {
            "dtype": "U8",
            "shape": [1000],
            "data_offsets": [place * 1000, (place + 1) * 1000],
        }
    header = json.dumps(entries).encode()
    with (folder / "model-00003.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 60_000_000)
    read = checkpoint.read(folder)
    begun = time.perf_counter()
    fingerprint(read, **WORKER)
    assert time.perf_counter() - begun < 3.0, "0.2 s on a quiet machine"
