"""What must be equal for a record to mean the same thing, as one hash: the name of a model's folder on disk.

It covers config.json, the tokenizer's files, each weight file's name, header, size and time of writing with
samples of its tensors' bytes, the cache classes, how KV is held, the backend, the type that is computed in,
the versions of mlx and mlx-lm, and the format of the files. No path is in it: a copy elsewhere that keeps its
files' times is the same model. Adapters are not in it either: they are in the records' namespace.

Weights are sampled because reading them all would double the time of a load: SAMPLE_BYTES at the start, the
middle and the end of each tensor, of a model with more than MAX_SAMPLED tensors an even choice of them; and
of files without a header, records of experts, at places spread over each.
What the samples can't see, a few rows edited by hand, the time of writing tells. So a copy that doesn't keep
the times reads its prompts anew: reuse is worth less than being sure.

Reads files; keeps nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import xxhash

from mlxpool.shared.checkpoint import CONFIG_FILE
from mlxpool.shared.files import open_regular
from mlxpool.shared.kv.record_file import FORMAT
from mlxpool.worker.cache.records import Layout

# A page: what a disk reads for the first byte of it anyway.
SAMPLE_BYTES = 4096
# A merged fine-tune's tensors number some hundreds; raw expert checkpoints have tens of thousands, whose
# samples would take seconds from a cold disk.
MAX_SAMPLED = 2048
# Of a file of records: those of a model are as many as its layers.
SPREAD_SAMPLES = 32

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_LENGTH_BYTES = 8
_READ_BYTES = 4 * 1024 * 1024
_HASH_BYTES = 16


class Fingerprint(msgspec.Struct, frozen=True):
    """hash: 32 hex digits. about: what went into it, by name, for people."""

    hash: str
    about: dict[str, str]


class ModelFiles(Protocol):
    """Where a model lies. files: names of those that hold its weights, relative to the folder."""

    @property
    def folder(self) -> Path: ...

    @property
    def model_type(self) -> str: ...

    @property
    def files(self) -> tuple[str, ...]: ...


class _Span(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)


_SPANS = msgspec.json.Decoder(dict[str, _Span])


def fingerprint(model: ModelFiles, *, layout: Layout, dtype: str, backend: str, kv: str) -> Fingerprint:
    """The fingerprint of a model as this worker computes it.

    dtype: what is computed in. kv: how keys and values are held. Raises OSError, also where a weight file is
    no longer the one that the model was read from.
    """
    folder = model.folder
    about = {
        "format": FORMAT,
        "model_type": model.model_type,
        "config": _file_hash(folder / CONFIG_FILE),
        "tokenizer": _joined(
            f"{name}={_file_hash(folder / name)}" for name in _TOKENIZER_FILES if (folder / name).is_file()
        ),
        "weights": _weights(model),
        "layout": _joined([msgspec.json.encode(layout).decode()]),
        "kv": kv,
        "dtype": dtype,
        "backend": backend,
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
    }
    return Fingerprint(_joined(f"{key}={value}" for key, value in sorted(about.items())), about)


def _weights(model: ModelFiles) -> str:
    headers = {name: _header(model.folder / name) for name in sorted(model.files)}
    tensors = sum(len(header.spans) for header in headers.values())
    every = max(1, -(-tensors // MAX_SAMPLED))
    lines = []
    for name, header in headers.items():
        with open_regular(model.folder / name) as file:
            descriptor = file.fileno()
            status = os.fstat(descriptor)
            digest = xxhash.xxh3_128(header.raw)
            places = header.places(every) if header.raw else _spread(status.st_size)
            for place, size_bytes in places:
                digest.update(os.pread(descriptor, size_bytes, place))
            lines.append(f"{name}={status.st_size}={status.st_mtime_ns}={digest.hexdigest()}")
    return _joined(lines)


class _Header(NamedTuple):
    """Of a safetensors file: its bytes, and where its tensors lie behind it; empty of another file."""

    raw: bytes
    spans: dict[str, _Span]

    def places(self, every: int) -> Iterator[tuple[int, int]]:
        """(place, size in bytes) at the start, the middle and the end of each `every`th tensor."""
        data_start = _LENGTH_BYTES + len(self.raw)
        for name in sorted(self.spans)[::every]:
            begin, end = self.spans[name].data_offsets
            middle = max(begin, (begin + end - SAMPLE_BYTES) // 2)
            for place in sorted({begin, middle, max(begin, end - SAMPLE_BYTES)}):
                yield data_start + place, min(SAMPLE_BYTES, end - place)


def _header(path: Path) -> _Header:
    if path.suffix != ".safetensors":
        return _Header(b"", {})
    with open_regular(path) as file:
        length = int.from_bytes(os.pread(file.fileno(), _LENGTH_BYTES, 0), "little")
        raw = os.pread(file.fileno(), length, _LENGTH_BYTES)
    try:
        spans = _SPANS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise OSError(f"a weight file has changed: {problem}") from None
    spans.pop("__metadata__", None)
    return _Header(raw, spans)


def _spread(size_bytes: int) -> Iterator[tuple[int, int]]:
    """(place, size in bytes) evenly over a file, its start and its end among them."""
    last = max(0, size_bytes - SAMPLE_BYTES)
    for place in sorted({last * number // (SPREAD_SAMPLES - 1) for number in range(SPREAD_SAMPLES)}):
        yield place, SAMPLE_BYTES


def _file_hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _joined(lines: Iterator[str] | list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=_HASH_BYTES).hexdigest()
