"""What must be equal for a record to mean the same thing, as one hash: the name of a model's folder on disk.

It covers config.json, the tokenizer's files, each weight file's name, header, size and time of writing with
samples of its tensors' bytes, the cache classes, how KV is held, the backend, the type that is computed in,
the versions of mlx and mlx-lm, and the format of the files. No path is in it: a copy elsewhere that keeps its
files' times is the same model. Adapters are not in it either: they are in the records' namespace.

Weights are sampled because reading them all would double the time of a load: SAMPLE_BYTES at the start, the
middle and the end of each tensor, of a checkpoint with more than MAX_SAMPLED tensors an even choice of them.
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

import msgspec
import xxhash

from mlxpool.shared.checkpoint import CONFIG_FILE, Checkpoint
from mlxpool.shared.files import open_regular
from mlxpool.shared.kv.record_file import FORMAT
from mlxpool.worker.cache.records import Layout

# A page: what a disk reads for the first byte of it anyway.
SAMPLE_BYTES = 4096
# A merged fine-tune's tensors number some hundreds; raw expert checkpoints have tens of thousands, whose
# samples would take seconds from a cold disk.
MAX_SAMPLED = 2048

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


class _Span(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)


_SPANS = msgspec.json.Decoder(dict[str, _Span])


def fingerprint(checkpoint: Checkpoint, *, layout: Layout, dtype: str, backend: str, kv: str) -> Fingerprint:
    """The fingerprint of a model as this worker computes it.

    dtype: what is computed in. kv: how keys and values are held. Raises OSError, also where a weight file is
    no longer the one that the checkpoint was read from.
    """
    folder = checkpoint.folder
    about = {
        "format": FORMAT,
        "model_type": checkpoint.model_type,
        "config": _file_hash(folder / CONFIG_FILE),
        "tokenizer": _joined(
            f"{name}={_file_hash(folder / name)}" for name in _TOKENIZER_FILES if (folder / name).is_file()
        ),
        "weights": _weights(checkpoint),
        "layout": _joined([msgspec.json.encode(layout).decode()]),
        "kv": kv,
        "dtype": dtype,
        "backend": backend,
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
    }
    return Fingerprint(_joined(f"{key}={value}" for key, value in sorted(about.items())), about)


def _weights(checkpoint: Checkpoint) -> str:
    every = -(-len(checkpoint.tensors) // MAX_SAMPLED)
    lines = []
    for name in sorted(checkpoint.files):
        with open_regular(checkpoint.folder / name) as file:
            descriptor = file.fileno()
            status = os.fstat(descriptor)
            length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
            header = os.pread(descriptor, length, _LENGTH_BYTES)
            digest = xxhash.xxh3_128(header)
            for sample in _samples(descriptor, header, _LENGTH_BYTES + length, every):
                digest.update(sample)
            lines.append(f"{name}={status.st_size}={status.st_mtime_ns}={digest.hexdigest()}")
    return _joined(lines)


def _samples(descriptor: int, header: bytes, data_start: int, every: int) -> Iterator[bytes]:
    """Bytes from the start, the middle and the end of each `every`th tensor."""
    try:
        spans = _SPANS.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise OSError(f"a weight file has changed: {problem}") from None
    spans.pop("__metadata__", None)
    for name in sorted(spans)[::every]:
        begin, end = spans[name].data_offsets
        middle = max(begin, (begin + end - SAMPLE_BYTES) // 2)
        for place in sorted({begin, middle, max(begin, end - SAMPLE_BYTES)}):
            yield os.pread(descriptor, min(SAMPLE_BYTES, end - place), data_start + place)


def _file_hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _joined(lines: Iterator[str] | list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=_HASH_BYTES).hexdigest()
