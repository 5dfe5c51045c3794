"""A model's GGUF files: one, or the parts `NAME-00001-of-0000N.gguf` that one was split into.

The first part's metadata is the model's; each part has a header of its own for its tensors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mlxpool.shared.text import cut

from .header import GgufError, Header, TensorInfo, read

MAX_PARTS = 999
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_COUNT, _TENSORS = "split.count", "split.tensors.count"


def stem(path: Path) -> str:
    """What the model's file is called, without ending and number of the part."""
    part = _PART.fullmatch(path.name)
    return part["stem"] if part else path.name.removesuffix(".gguf")


def paths(path: Path) -> list[Path]:
    """The files that belong to the one named, in order; it may be any of the parts. Raises GgufError."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    number, count = int(part["number"]), int(part["count"])
    if not 1 <= number <= count <= MAX_PARTS:
        raise GgufError(f"{path.name} can't be part {number} of {count}")
    named = [path.with_name(f"{part['stem']}-{at:05d}-of-{count:05d}.gguf") for at in range(1, count + 1)]
    missing = [each.name for each in named if not each.exists()]
    if missing:
        raise GgufError(
            f"of {count} parts {len(missing)} are missing, first {missing[0]}; they belong beside it"
        )
    return named


def read_all(path: Path, *, with_long_lists: bool) -> Header:
    """The header of the model whose file, or any part of it, is named. Raises GgufError."""
    named = paths(path)
    first = read(named[0], with_long_lists=with_long_lists)
    count = _whole(first.metadata.get(_COUNT, 1))
    if count > 1 and count != len(named):
        raise GgufError(
            f"{path.name} is one of {count} parts; name them NAME-00001-of-{count:05d}.gguf and so on"
        )
    tensors: dict[str, TensorInfo] = dict(first.tensors)
    for other in named[1:]:
        for name, tensor in read(other, with_long_lists=False).tensors.items():
            if name in tensors:
                raise GgufError(f"tensor {cut(name)} is in {tensors[name].path.name} and in {other.name}")
            tensors[name] = tensor
    promised = first.metadata.get(_TENSORS)
    if promised is not None and _whole(promised) != len(tensors):
        raise GgufError(
            f"{first.path.name} promises {cut(str(promised))} tensors, the parts hold {len(tensors)}"
        )
    return Header(first.path, first.metadata, tensors)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
