"""The files of a conversion, written one expert and one tensor at a time.

While one expert is packed on this thread, the next ones are read and the last one is hashed and written on
others: the disk is never waited for where it keeps up.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import msgspec
import xxhash

from mlxpool.shared.colibri.records import RecordLayer, WrittenFile
from mlxpool.shared.files import open_regular, write_whole

from . import numbers
from .plan import DenseFile, Layer
from .source import Source

# Of experts that have been read and wait to be packed; one is always read ahead.
_AHEAD_BYTES = 256 * 2**20
_MOST_AHEAD = 8
_WRITES_AHEAD = 2

Count = Callable[[int], None]


@contextlib.contextmanager
def opened(source: Source) -> Iterator[dict[str, int]]:
    """Descriptors of a source's files, by name. Raises OSError."""
    with contextlib.ExitStack() as open_files:
        yield {
            file.name: open_files.enter_context(open_regular(source.folder / file.name)).fileno()
            for file in source.files
        }


def layer(stage: Path, layer: Layer, files: Mapping[str, int], count: Count) -> RecordLayer:
    """Write a layer's records; returns its entry with hashes. files: descriptors of the source, by name.
    count: bytes written since the last word. Raises ConvertError, OSError."""
    record = layer.record
    path = stage / record.file
    path.parent.mkdir(exist_ok=True)
    hashes: list[str] = []
    write_whole(path, lambda file: hashes.extend(_records(file, layer, files, count)))
    return msgspec.structs.replace(record, xxh3=tuple(hashes))


def _records(file: BinaryIO, layer: Layer, files: Mapping[str, int], count: Count) -> list[str]:
    experts, record = layer.experts, layer.record
    padding = bytes(record.stride_bytes - record.record_bytes)

    def write(parts: list[numbers.Bytes]) -> str:
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part.data)
            file.write(part.data)
        file.write(padding)
        return digest.hexdigest()

    ahead = max(1, min(_MOST_AHEAD, _AHEAD_BYTES // experts.size_bytes))
    reads: deque[Future[numbers.Raw]] = deque()
    writes: deque[Future[str]] = deque()
    hashes: list[str] = []
    with ThreadPoolExecutor(ahead) as readers, ThreadPoolExecutor(1) as writer:
        for expert in range(experts.count + ahead):
            if expert < experts.count:
                reads.append(readers.submit(numbers.read, files, experts, expert))
            if expert < ahead:
                continue
            parts = numbers.record(reads.popleft().result(), layer.recipe)
            _check(layer, parts)
            writes.append(writer.submit(write, parts))
            if len(writes) > _WRITES_AHEAD:
                hashes.append(writes.popleft().result())
                count(record.stride_bytes)
        for written in writes:
            hashes.append(written.result())
            count(record.stride_bytes)
    return hashes


def _check(layer: Layer, parts: list[numbers.Bytes]) -> None:
    """What was planned is what is written: sizes in experts.json are not those of another MLX."""
    due = [field.size_bytes for field in layer.record.fields]
    if [part.nbytes for part in parts] != due:
        raise AssertionError(
            f"layer {layer.record.layer}: parts of {[part.nbytes for part in parts]} for {due}"
        )


def dense(stage: Path, planned: DenseFile, tensors: dict[str, mx.array], count: Count) -> WrittenFile:
    """Write a dense file; its tensors are taken out of `tensors`, so that each is freed once it is written.
    Raises OSError."""
    digest = xxhash.xxh3_64(planned.header)

    def write(file: BinaryIO) -> None:
        file.write(planned.header)
        for tensor in planned.tensors:
            data = numbers.to_bytes(tensors.pop(tensor.name))
            if data.nbytes != tensor.size_bytes:
                raise AssertionError(f"{tensor.name}: {data.nbytes} bytes for {tensor.size_bytes}")
            digest.update(data.data)
            file.write(data.data)
            count(data.nbytes)

    write_whole(stage / planned.name, write)
    mx.clear_cache()
    return WrittenFile(planned.name, planned.size_bytes, digest.hexdigest())
