"""A layer's slots in memory: few large arrays that hold many experts, filled from outside of MLX.

In mode "direct" a part's array is a view of a larger array of bytes that begins on a page, so that reads
without the page cache can go straight into it; numpy has the same memory under another name, and reading
threads write through that. In mode "assign" reads go into buffers of the host (`Staging`), and the engine's
thread assigns them: for a backend whose arrays can't be written from outside. An assignment copies the whole
array where a pending graph still holds it, so nothing may be pending then.

The hazard of both: a graph that was built before a slot is overwritten and runs after it reads the new bytes.
So a slab is told of every product that reads it and isn't known to have run (`hold`), and whoever is about to
overwrite a slot calls `settle` before. Owned by the engine's thread; only rows are others' to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.shared.colibri.launch import WriteMode
from mlxpool.shared.colibri.layout import ExpertLayout, Part, PartName, Projection
from mlxpool.worker.colibri.contract import Rows
from mlxpool.worker.colibri.huge_pages import move_zeros

Bytes = npt.NDArray[np.uint8]
Key = tuple[Projection, PartName]
Writing = Literal["direct", "assign"]

# What the strictest disk asks of an address that it reads into without the page cache.
PAGE_BYTES = 4096

# Products that are kept to be asked whether they have run. They are of steps, so the older ones have; without
# a bound those of a layer that nothing is missing from would be kept for ever.
_PENDING = 8

# Experts that are on their way through buffers of the host at once, at most, in one of two groups: a slot is
# there twice until it is assigned.
STAGED = 16

_TYPES: dict[str, mx.Dtype] = {
    "U8": mx.uint8,
    "U32": mx.uint32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
}


# By bytes.
_WIDE: dict[int, mx.Dtype] = {8: mx.uint64, 4: mx.uint32, 1: mx.uint8}


class _Direct(NamedTuple):
    """array: [slots, *shape] of the part's type. rows: the same memory as bytes [slots, size_bytes]. Both end
    with the last reference to either."""

    array: mx.array
    rows: Bytes


def _direct(part: Part, slots: int) -> _Direct:
    whole = _pages(part, slots)
    mx.eval(whole)
    host: Bytes = np.array(whole, copy=False).reshape(-1).view(np.uint8)
    move_zeros(host)
    start = (part.phase - host.ctypes.data) % PAGE_BYTES
    rows = host[start : start + slots * part.size_bytes].reshape(slots, part.size_bytes)
    array = _view(whole, part, slots, start)
    mx.eval(array)
    return _Direct(array, rows)


def _pages(part: Part, slots: int) -> mx.array:
    """Room for a part of so many slots that begins anywhere in the first page.

    In pages, because an axis has less than 2^31 elements and a large part more bytes; and of the widest
    numbers that a slot is whole in, because a view of some of it is taken along one axis.
    """
    width = next(width for width in _WIDE if part.size_bytes % width == 0 and part.phase % width == 0)
    pages = -(-slots * part.size_bytes // PAGE_BYTES) + 1
    return mx.zeros((pages, PAGE_BYTES // width), _WIDE[width])


def _view(whole: mx.array, part: Part, slots: int, start: int) -> mx.array:
    """The part in `whole`, from byte `start` on."""
    width = whole.itemsize
    numbers = part.size_bytes // width
    flat = mx.as_strided(whole, (slots, numbers), (numbers, 1), start // width)
    return flat.view(_TYPES[part.dtype]).reshape(slots, *part.shape)


def writing(wanted: WriteMode) -> Writing:
    """What `auto` comes to here: whether MLX sees what is written from outside.

    Raises ValueError where "direct" is asked for and isn't possible.
    """
    if wanted == "assign":
        return "assign"
    if _sees_outside_writes():
        return "direct"
    if wanted == "direct":
        raise ValueError(
            'write = "direct" needs a backend whose arrays can be written from outside; "assign" works here'
        )
    return "assign"


def _sees_outside_writes() -> bool:
    # Two pages and a bit: the view begins somewhere inside, as a slab's do.
    part = Part("gate_proj", "weight", "U32", (PAGE_BYTES // 2,), 2 * PAGE_BYTES, piece="")
    try:
        held = _direct(part, 1)
    except (TypeError, ValueError, RuntimeError, BufferError):
        return False
    written = np.arange(PAGE_BYTES // 2, dtype=np.uint32)
    for value in (written, written[::-1]):
        held.rows[0] = value.copy().view(np.uint8)
        if not np.array_equal(np.array(held.array[0] + 0), value):
            return False
    return True


class Slab:
    """Slots for experts of one layout. Nothing is in them at first."""

    def __init__(self, layout: ExpertLayout, slots: int, mode: Writing) -> None:
        self.layout = layout
        self.slots = slots
        self.mode = mode
        self.arrays: dict[Key, mx.array] = {}
        self._rows: dict[Key, Bytes] = {}
        self._pending: list[mx.array] = []
        for part in layout.parts:
            self._allocate(part, slots)

    def _allocate(self, part: Part, slots: int) -> None:
        key: Key = (part.projection, part.part)
        if self.mode == "direct":
            self.arrays[key], self._rows[key] = _direct(part, slots)
        else:
            self.arrays[key] = mx.zeros((slots, *part.shape), _TYPES[part.dtype])
            mx.eval(self.arrays[key])

    @property
    def held_bytes(self) -> int:
        return self.slots * self.layout.held_bytes

    def rows(self, slot: int) -> Rows:
        """What a reading thread may write: the slot's parts. In mode "direct" alone."""
        return {key: rows[slot] for key, rows in self._rows.items()}

    def assign(self, slot: int, staged: Rows) -> None:
        """Copy what was read into the slot. In mode "assign" alone, and with nothing pending."""
        for part in self.layout.parts:
            key: Key = (part.projection, part.part)
            array = self.arrays[key]
            array[slot] = _typed(staged[key], part)
            mx.eval(array)

    def places(self, slots: Sequence[int] | npt.NDArray[Any]) -> mx.array:
        """These slots for a kernel, which checks nothing: what lies beyond the last one is other memory."""
        asked = np.asarray(slots)
        if asked.size and not 0 <= asked.min() <= asked.max() < self.slots:
            raise IndexError(f"slots {asked.min()} to {asked.max()} of {self.slots}")
        return mx.array(asked.astype(np.uint32))

    def hold(self, product: mx.array) -> None:
        """This reads the slots when it runs."""
        if len(self._pending) >= _PENDING:
            self.settle()
        self._pending.append(product)

    def settle(self) -> None:
        """Let everything run that reads the slots as they are. What fails is nobody's to wait for again."""
        if self._pending:
            pending, self._pending = self._pending, []
            mx.eval(pending)

    def resize(self, slots: int, moves: Sequence[int]) -> None:
        """Have so many slots. moves: where what stays lies now, by new slot. Nobody may be reading into it.

        One part at a time: meanwhile that one is there twice.
        """
        self.settle()
        self.slots = min(self.slots, slots)
        for part in self.layout.parts:
            key: Key = (part.projection, part.part)
            old, lay = self.arrays.pop(key), self._rows.pop(key, None)
            self._allocate(part, slots)
            if lay is not None:
                rows = self._rows[key]
                for new, place in enumerate(moves):
                    rows[new] = lay[place]
            elif moves:
                array = self.arrays[key]
                array[: len(moves)] = old[mx.array(list(moves))]
                mx.eval(array)
            del old, lay
            # Freed arrays stay with MLX otherwise.
            mx.clear_cache()
        self.slots = slots


def _typed(row: Bytes, part: Part) -> mx.array:
    if part.dtype == "BF16":
        return mx.array(row.view(np.uint16).reshape(part.shape)).view(mx.bfloat16)
    plain = {"U8": np.uint8, "U32": np.uint32, "F16": np.float16, "F32": np.float32}
    return mx.array(row.view(plain[part.dtype]).reshape(part.shape))


class Staging:
    """Buffers of the host for reads that are assigned later, one expert each, kept for the next."""

    def __init__(self) -> None:
        self._idle: dict[tuple[object, ...], list[Rows]] = {}

    def take(self, layout: ExpertLayout) -> Rows:
        idle = self._idle.get(layout.kind)
        if idle:
            return idle.pop()
        made: dict[Key, Bytes] = {}
        for part in layout.parts:
            space = np.empty(part.size_bytes + PAGE_BYTES, np.uint8)
            start = (part.phase - space.ctypes.data) % PAGE_BYTES
            made[part.projection, part.part] = space[start : start + part.size_bytes]
        return made

    def give(self, layout: ExpertLayout, rows: Rows) -> None:
        self._idle.setdefault(layout.kind, []).append(rows)
