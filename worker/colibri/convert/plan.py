"""What a conversion will write, and how large each file is, before any of it is written. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from mlxpool.shared.checkpoint import DTYPE_BITS
from mlxpool.shared.colibri import records
from mlxpool.shared.colibri.layout import Projection, Quantised
from mlxpool.shared.colibri.records import Field, Recipe, RecordLayer
from mlxpool.shared.job_tasks import SHARD_BYTES

from .numbers import packing, shapes
from .source import Experts, Source

_LENGTH_BYTES = 8
_HEADER_ALIGN_BYTES = 8


class Layer(NamedTuple):
    """Experts and the file they become. record: without hashes."""

    experts: Experts
    recipe: Recipe
    record: RecordLayer

    @property
    def size_bytes(self) -> int:
        """Of the file: every record is padded, the last one too."""
        return self.record.stride_bytes * self.record.experts


class Tensor(NamedTuple):
    """A dense tensor. dtype: as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class DenseFile(NamedTuple):
    """A safetensors file to be. header: length and table, what comes before the tensors."""

    name: str
    tensors: tuple[Tensor, ...]
    header: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(tensor.size_bytes for tensor in self.tensors)


def layer(experts: Experts, recipe: Recipe, module: str, said: Mapping[str, Any]) -> Layer:
    """The record of a layer's experts. module: their path in the model. said: config.json's quantization.
    Raises ConvertError."""
    fields, end = [], 0
    for part in shapes(experts, recipe):
        size = math.prod(part.shape) * DTYPE_BITS[part.dtype] // 8
        fields.append(Field(part.projection, part.part, part.dtype, part.shape, end, size))
        end += size
    packed: dict[Projection, Quantised] = packing(experts, recipe, said)
    record = RecordLayer(
        layer=experts.layer,
        module=module,
        file=f"{records.EXPERTS_FOLDER}/{experts.layer:03}.bin",
        experts=experts.count,
        record_bytes=end,
        stride_bytes=records.record_stride(end),
        fields=tuple(fields),
        packing=packed,
        xxh3=(),
    )
    return Layer(experts, recipe, record)


def draft_module(experts: Experts) -> str:
    """Where the runtime has a draft layer's experts."""
    return re.sub(r"^.*\.layers\.\d+\.", "mtp.", experts.module)


def dense_files(tensors: Sequence[Tensor]) -> list[DenseFile]:
    """The tensors in files, in order, none larger than SHARD_BYTES but for one with a single tensor."""
    files: list[list[Tensor]] = []
    held = 0
    for tensor in tensors:
        if not files or held + tensor.size_bytes > SHARD_BYTES:
            files.append([])
            held = 0
        files[-1].append(tensor)
        held += tensor.size_bytes
    return [
        DenseFile(f"dense-{number:05}.safetensors", tuple(members), _header(members))
        for number, members in enumerate(files, 1)
    ]


def _header(tensors: Sequence[Tensor]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in tensors:
        offsets = (end, end + tensor.size_bytes)
        table[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        end += tensor.size_bytes
    said = msgspec.json.encode(table)
    said += b" " * (-len(said) % _HEADER_ALIGN_BYTES)
    return len(said).to_bytes(_LENGTH_BYTES, "little") + said


def result_config(source: Source, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """config.json to be: the source's, with how the result is packed."""
    config = {
        key: value
        for key, value in source.config.items()
        if key not in ("quantization", "quantization_config")
    }
    if quantization:
        config |= {"quantization": dict(quantization), "quantization_config": dict(quantization)}
    return config
