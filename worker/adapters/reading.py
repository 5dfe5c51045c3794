"""An adapter's files as arrays of numpy, read once and checked.

Size, hash and numbers are those of one reading, and a folder whose files are replaced meanwhile is refused,
so that what is read is either the old adapter or the new one. No mx call is made here: it runs on any thread,
beside the engine.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from mlxpool.shared import adapters
from mlxpool.shared.adapters import WEIGHTS_FILE, Adapter, AdapterError
from mlxpool.shared.checkpoint import Tensor
from mlxpool.shared.files import open_regular
from mlxpool.shared.text import cut

Numbers = npt.NDArray[Any]

_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
# All ones: infinities and what is no number.
_BF16_EXPONENT = 0x7F80


class Read(NamedTuple):
    """What an adapter's files hold. arrays: by tensor's name; those of BF16 as the bits they are. digest: of
    names, numbers and scale: equal where two adapters do the same. stamp: of the files, from before they were
    read."""

    facts: Adapter
    arrays: dict[str, Numbers]
    digest: bytes
    stamp: adapters.Stamp


def read(folder: Path, limit_bytes: int) -> Read:
    """The adapter in `folder`. Raises AdapterError, also where its file is larger than `limit_bytes`."""
    stamp = adapters.stamp(folder)
    config = adapters.read_config(folder)
    try:
        with open_regular(folder / WEIGHTS_FILE) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > limit_bytes:
                what = f"has {size_bytes:,} bytes; all adapters of this model may take {limit_bytes:,}"
                raise AdapterError(f"{WEIGHTS_FILE}: {what}")
            raw = file.read(size_bytes)
    except OSError as problem:
        raise AdapterError(f"{WEIGHTS_FILE}: can't be read: {problem.strerror}") from None
    if adapters.stamp(folder) != stamp:
        # Else one adapter's scale could meet another one's numbers.
        raise AdapterError("its files were replaced while they were read; try again")
    try:
        entries = deserialize(raw)  # type: ignore[no-untyped-call]
    except (SafetensorError, UnicodeDecodeError) as problem:
        what = cut(str(problem), 200)
        raise AdapterError(f"{WEIGHTS_FILE}: no whole safetensors file: {what}") from None
    tensors = {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), len(entry["data"])) for name, entry in entries
    }
    facts = adapters.described(config, tensors)
    arrays = {name: _numbers(name, entry["data"], tensors[name]) for name, entry in entries}
    return Read(facts, arrays, _digest(facts, tensors, arrays), stamp)


def _numbers(name: str, data: bytearray, tensor: Tensor) -> Numbers:
    numbers: Numbers = np.frombuffer(data, dtype=_TYPES[tensor.dtype]).reshape(tensor.shape)
    is_bits = tensor.dtype == "BF16"
    finite = (numbers & _BF16_EXPONENT) != _BF16_EXPONENT if is_bits else np.isfinite(numbers)
    if not finite.all():
        raise AdapterError(f"{WEIGHTS_FILE}: {cut(name)!r} holds infinities, or what is no number")
    return numbers


def _digest(facts: Adapter, tensors: dict[str, Tensor], arrays: dict[str, Numbers]) -> bytes:
    hashed = hashlib.blake2b(repr(facts.scale).encode(), digest_size=16)
    for name in sorted(arrays):
        hashed.update(f"\0{name}\0{tensors[name].dtype}\0{tensors[name].shape}\0".encode())
        hashed.update(np.ascontiguousarray(arrays[name]).data)
    return hashed.digest()
