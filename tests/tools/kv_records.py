"""Records of prompts on disk, real ones with nothing of use in them."""

from __future__ import annotations

import os
from pathlib import Path

from mlxpool.shared.kv import folder
from mlxpool.shared.kv.budget import Budget
from mlxpool.shared.kv.names import FileName, blocks, file_name
from mlxpool.shared.kv.record_file import Head, Tensor, encode

_NO_LIMIT = 1 << 40
TOKENS = 256


def fingerprint(letter: str) -> str:
    """A folder's name that is easy to tell from others."""
    return letter * 32


def write_record(
    root: Path, own: str, model: str, number: int = 0, *, data_bytes: int = 1000, used_s: float | None = None
) -> Path:
    """Writes a record of the model's folder `own`, the same for the same number. used_s: its time of use."""
    budget = Budget(root, _NO_LIMIT)
    folder.describe(budget, folder.About(model, own))
    file = FileName(name=number.to_bytes(16, "big"), parent=b"\xff" * 16, start=0, end=TOKENS, kind="slice")
    head = Head(file, own, tuple(range(TOKENS)), {"0.keys": Tensor("U8", (data_bytes,))}, {})
    data = b"".join(encode(head, {"0.keys": memoryview(bytes(data_bytes))}))
    temp = budget.create(own, len(data)).temp
    assert temp is not None
    os.write(temp.descriptor, data)
    os.close(temp.descriptor)
    budget.publish(temp, file_name(file))
    path = root / own / file_name(file)
    if used_s is not None:
        os.utime(path, (used_s, used_s))
    return path


def held_bytes(*records: Path) -> int:
    """What these take of the budget."""
    return sum(blocks(path.stat().st_size) for path in records)


def flip(path: Path, place: int = -1) -> None:
    """Turns one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
