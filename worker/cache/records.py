"""What of a prefix is stored, under which names, and which prefix a set of records restores. Pure.

A prefix is cut into records of RECORD_TOKENS positions from its start; what is left at its end is a shorter
one. A record's name is a hash of its parent's name and of its own tokens, so a name stands for the whole
prefix up to the record's end, a shared system prompt is stored once, and a conversation that grows adds
records at its end. The first parent's name is the namespace's: model and adapters.

A record holds two things, each of which may be missing. Its *slice*: keys and values at its positions, of
every layer whose cache can be cut by position. Its *state*: at its end, the whole cache of every layer that
can't be cut (a window that wraps, an SSM). A prefix is usable at a record's end where all slices up to it are
there, and the state too if some layer needs it; where no layer does it is usable at any position of a record
that agrees with the tokens. A slice can always be cut short, so a longer record stands in for a shorter one's
slice; nothing stands in for a state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from mlxpool.shared.kv.names import Kind

RECORD_TOKENS = 256

# 128 bits: no two prefixes share a name by chance.
NAME_BYTES = 16

Ids = npt.NDArray[np.uint32]
KINDS: tuple[Kind, ...] = ("slice", "state")


class Leaf(msgspec.Struct, frozen=True):
    """One layer's cache, or one of several in a layer. kind: its class's name. sliced: whether it can be cut
    by position, else it is held whole."""

    kind: str
    sliced: bool


class Layout(msgspec.Struct, frozen=True):
    """The caches of a model, in order, those inside of lists too."""

    leaves: tuple[Leaf, ...]

    @property
    def sliced(self) -> list[int]:
        """The leaves that every slice holds."""
        return [place for place, leaf in enumerate(self.leaves) if leaf.sliced]

    @property
    def stateful(self) -> list[int]:
        """The leaves that every state holds."""
        return [place for place, leaf in enumerate(self.leaves) if not leaf.sliced]


class Record(msgspec.Struct, frozen=True):
    """A record's place: positions [start, end) of the prefix that its name stands for."""

    name: bytes
    parent: bytes
    start: int
    end: int

    @property
    def full(self) -> bool:
        return self.end - self.start == RECORD_TOKENS


class Piece(msgspec.Struct, frozen=True):
    """One of a record's two parts, which come and go by themselves."""

    record: Record
    kind: Kind


class Known(Protocol):
    """The records that there are, in memory or on disk. `children` and `ids` are asked near the end only."""

    def has_slice(self, name: bytes) -> bool: ...

    def has_state(self, name: bytes) -> bool: ...

    def children(self, parent: bytes) -> Iterable[Record]:
        """Records that begin where this one ends, most recently used first."""

    def ids(self, record: Record) -> Ids | None:
        """Its own tokens, None where they can't be told."""


class Found(msgspec.Struct, frozen=True):
    """A prefix that can be restored: `length` tokens of it from the slices of `records`, in order, the last
    one cut short where it goes on, and from the state of `state` where some layer needs one."""

    length: int
    records: tuple[Record, ...]
    state: Record | None = None


def root(namespace: str) -> bytes:
    """The parent of every first record of a namespace."""
    return hashlib.blake2b(namespace.encode(), digest_size=NAME_BYTES).digest()


def name(parent: bytes, ids: Ids) -> bytes:
    """The name of the record with these tokens behind that parent."""
    return hashlib.blake2b(parent + ids.astype("<u4").tobytes(), digest_size=NAME_BYTES).digest()


def chain(first_parent: bytes, ids: Ids) -> Iterator[Record]:
    """All records of a prefix in order, its short end included."""
    parent = first_parent
    for start in range(0, len(ids), RECORD_TOKENS):
        own = ids[start : start + RECORD_TOKENS]
        record = Record(name(parent, own), parent, start, start + len(own))
        yield record
        parent = record.name


def find(ids: Ids, limit: int, first_parent: bytes, layout: Layout, known: Known) -> Found | None:
    """The longest prefix of `ids`, of at most `limit` tokens, that the known records restore."""
    sliced, stateful = bool(layout.sliced), bool(layout.stateful)
    walked: list[Record] = []
    for record in chain(first_parent, ids):
        if not record.full or (sliced and not known.has_slice(record.name)):
            break
        walked.append(record)
    for depth in range(len(walked), -1, -1):
        path = walked[:depth]
        parent = path[-1].name if path else first_parent
        if (found := _within(ids, limit, path, parent, sliced, stateful, known)) is not None:
            return found
        if path and path[-1].end <= limit and not (stateful and not known.has_state(parent)):
            return Found(path[-1].end, tuple(path) if sliced else (), path[-1] if stateful else None)
    return None


def _within(
    ids: Ids, limit: int, path: list[Record], parent: bytes, sliced: bool, stateful: bool, known: Known
) -> Found | None:
    """The longest prefix that ends in a record behind `path`."""
    start = len(path) * RECORD_TOKENS
    rest = ids[start : start + RECORD_TOKENS]
    if not len(rest) or limit <= start:
        return None
    # A thousand conversations may part behind one system prompt: what can't be better costs next to nothing.
    best: Record | None = None
    reached, differs = start, rest.item(0)
    names: dict[int, bytes] = {}
    last = min(start + len(rest), limit)
    for record in known.children(parent):
        end = record.end
        if (reach := end if end < last else last) <= reached or (stateful and end > last):
            continue
        if (same := names.get(end)) is None:
            # Records of one length with these tokens have one name.
            same = names[end] = name(parent, rest[: end - start]) if end - start <= len(rest) else b""
        if stateful:
            # Of other tokens no state serves.
            if record.name != same or not known.has_state(record.name):
                continue
            if sliced and _slice_of(rest[: end - start], record, known) is None:
                continue
            length = end
        elif not known.has_slice(record.name):
            continue
        elif record.name == same:
            length = reach
        elif (held := known.ids(record)) is None or held.item(reached - start) != differs:
            continue
        else:
            length = min(start + _agreed(held, rest), limit)
        if length <= reached:
            continue
        best, reached = record, length
        if length == last:
            break
        differs = rest.item(length - start)
    if best is None:
        return None
    if not stateful:
        return Found(reached, (*path, best))
    holding = _slice_of(rest[: reached - start], best, known) if sliced else None
    return Found(reached, () if holding is None else (*path, holding), best)


def _slice_of(own: Ids, record: Record, known: Known) -> Record | None:
    """The record whose slice has these tokens of `record`: itself, or a longer one that begins with them."""
    if known.has_slice(record.name):
        return record
    for other in known.children(record.parent):
        if other.end <= record.end or not known.has_slice(other.name):
            continue
        if (held := known.ids(other)) is not None and np.array_equal(held[: len(own)], own):
            return other
    return None


def _agreed(own: Ids, rest: Ids) -> int:
    """How many tokens the two have in common at their start."""
    shorter = min(len(own), len(rest))
    differing = np.nonzero(own[:shorter] != rest[:shorter])[0]
    return int(differing[0]) if len(differing) else shorter
