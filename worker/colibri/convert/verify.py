"""Reading a conversion's result again: every record and every dense file against the hash it was written
with, and one expert of each layer packed from the source a second time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from mlxpool.shared.colibri.records import RecordIndex, RecordLayer, WrittenFile

from . import numbers, state, writing
from .plan import Layer
from .source import Source

# Between the experts of two layers that are packed a second time, so that they are not always the first.
_SAMPLE_STEP = 7
# What the kernel is asked to forget of a file before it is read, so that the disk answers.
_WHOLE_FILE = 0


def index_faults(folder: Path, index: RecordIndex, progress: Callable[[int], None]) -> list[str]:
    """Everything in a folder that is not as it was written, one line each; [] where all of it is. progress:
    bytes read since the last word. Raises OSError."""
    faults: list[str] = []
    for layer in index.layers:
        faults += layer_faults(folder, layer, progress)
    for file in index.dense:
        faults += dense_faults(folder, file, progress)
    return faults


def layer_faults(folder: Path, layer: RecordLayer, progress: Callable[[int], None]) -> list[str]:
    """Experts of a layer whose record is not as it was written. Raises OSError."""
    faults: list[str] = []
    data = memoryview(bytearray(layer.record_bytes))
    with (folder / layer.file).open("rb", buffering=0) as file:
        _forget(file.fileno())
        for expert, due in enumerate(layer.xxh3):
            got = _read_whole(file.fileno(), data, expert * layer.stride_bytes)
            where = f"{layer.file}: layer {layer.layer}, expert {expert}"
            if got < layer.record_bytes:
                faults.append(f"{where} is cut short by {layer.record_bytes - got} bytes")
            elif xxhash.xxh3_64_hexdigest(data) != due:
                faults.append(f"{where} is not as it was written")
            progress(layer.stride_bytes)
    return faults


def dense_faults(folder: Path, file: WrittenFile, progress: Callable[[int], None]) -> list[str]:
    """Whether a dense file is not as it was written. Raises OSError."""
    size = os.stat(folder / file.name).st_size
    if size != file.size_bytes:
        progress(file.size_bytes)
        return [f"{file.name}: has {size} bytes where {file.size_bytes} were written"]
    if state.hash_of(folder / file.name, progress) != file.xxh3:
        return [f"{file.name} is not as it was written"]
    return []


def sample_faults(source: Source, layers: Sequence[Layer], index: RecordIndex) -> list[str]:
    """Of one expert per layer, whether the source still gives the record that is there. Raises OSError."""
    written = {layer.layer: layer for layer in index.layers}
    faults: list[str] = []
    with writing.opened(source) as files:
        for layer in layers:
            number = layer.record.layer
            expert = number * _SAMPLE_STEP % layer.record.experts
            digest = xxhash.xxh3_64()
            for part in numbers.record(numbers.read(files, layer.experts, expert), layer.recipe):
                digest.update(part.data)
            if digest.hexdigest() != written[number].xxh3[expert]:
                faults.append(
                    f"{layer.record.file}: layer {number}, expert {expert} is not what the source gives"
                )
    return faults


def _read_whole(descriptor: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view) and (got := os.preadv(descriptor, [view[done:]], offset + done)):
        done += got
    return done


def _forget(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, _WHOLE_FILE, os.POSIX_FADV_DONTNEED)
