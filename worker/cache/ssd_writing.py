"""One piece of a record on its way into a file: room, data, head, name.

The data are written first, from where the head will end, and hashed as they go by; the head, which holds the
hashes, comes last and the name after it. So every byte is touched once, and a file that has a name is whole.

The writer's thread calls this; it keeps nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy.typing as npt
import xxhash

from mlxpool.shared.kv.names import blocks, file_name
from mlxpool.shared.kv.record_file import MAX_BUFFERS, Head, Tensor, after, header_bytes
from mlxpool.worker.cache.records import Ids, Piece
from mlxpool.worker.cache.ssd import SsdTier
from mlxpool.worker.cache.ssd_reading import file_of, flat

# Entered around every step of work, it says how many bytes the step may be; it may raise to end the writing.
Step = Callable[[], AbstractContextManager[int]]


class Waiting(msgspec.Struct, eq=False):
    """A piece that is to be written. ids: the record's own tokens. buffers: C-contiguous arrays of the
    tensors' bytes, which stay as they are until it is written. scalars: by leaf, of a state."""

    piece: Piece
    ids: Ids
    tensors: dict[str, Tensor]
    buffers: dict[str, npt.NDArray[Any]]
    scalars: dict[str, list[int]] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())


def write_piece(tier: SsdTier, waiting: Waiting, step: Step) -> bool:
    """Whether the piece is on disk; not where there is no room for it, or its folder is deleted meanwhile.
    Raises OSError, and what `step` does; nothing of the piece is then left."""
    piece = waiting.piece
    tier.describe()
    head = Head(
        file=file_of(piece),
        fingerprint=tier.fingerprint.hash,
        ids=tuple(int(token) for token in waiting.ids),
        tensors=waiting.tensors,
        scalars=waiting.scalars,
    )
    data_start = len(header_bytes(head))
    size = data_start + head.data_bytes
    temp = None
    try:
        with step():
            room = tier.budget.create(head.fingerprint, size, (piece.record.parent, piece.record.name))
            temp = room.temp
            tier.evicted(room.evicted)
        if temp is None:
            return False
        hashes = _write_data(temp.descriptor, waiting, data_start, step)
        first = header_bytes(msgspec.structs.replace(head, hashes=hashes))
        _write_all(temp.descriptor, [memoryview(first)], 0)
        if not tier.budget.publish(temp, file_name(head.file)):
            return False
    except BaseException:
        if temp is not None:
            tier.budget.discard(temp)
        raise
    finally:
        if temp is not None:
            with contextlib.suppress(OSError):
                os.close(temp.descriptor)
    tier.wrote(piece, waiting.ids, blocks(size))
    return True


def _write_data(descriptor: int, waiting: Waiting, place: int, step: Step) -> dict[str, str]:
    """Writes the tensors one behind the other from `place`; their hashes."""
    digests = {name: xxhash.xxh3_128() for name in waiting.tensors}
    rest = deque((name, flat(waiting.buffers[name])) for name in waiting.tensors)
    while rest:
        with step() as limit_bytes:
            parts = _take(rest, limit_bytes)
            for name, part in parts:
                digests[name].update(part)
            place = _write_all(descriptor, [part for _, part in parts], place)
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _take(rest: deque[tuple[str, memoryview]], limit_bytes: int) -> list[tuple[str, memoryview]]:
    """The first bytes of what is left to write, by tensor, as many as one step may have."""
    step: list[tuple[str, memoryview]] = []
    while rest and limit_bytes > 0 and len(step) < MAX_BUFFERS:
        name, view = rest.popleft()
        step.append((name, view[:limit_bytes]))
        if len(view) > limit_bytes:
            rest.appendleft((name, view[limit_bytes:]))
        limit_bytes -= len(view)
    return step


def _write_all(descriptor: int, parts: list[memoryview], place: int) -> int:
    """Writes the parts one behind the other; where the last one ends. Raises OSError."""
    parts = [part for part in parts if part]
    while parts:
        done = os.pwritev(descriptor, parts, place)
        place += done
        parts = after(parts, done)
    return place
