"""What of a prefix is stored, under which names, and which prefix a set of records restores. Pure.

A prefix is cut into records of RECORD_TOKENS positions from its start; what is left at its end is a shorter
one. A record's name is a hash of its parent's name and of its own tokens, so a name stands for the whole
prefix up to the record's end, a shared system prompt is stored once, and a conversation that grows adds
records at its end. The first parent's name is the namespace's: model and adapters.

A record holds two things, each of which may be missing. Its *slice*: keys and values at its positions, of
every layer whose cache can be cut by position there. Its *state*: at its end, the whole cache of every layer
that can't be cut there (a window that has wrapped, an SSM). A prefix is usable at a record's end where all
slices up to it are there, and the state too if some layer needs it; where no layer needs a state it is usable
at any position of a record that agrees with the tokens, by cutting the slice short.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

RECORD_TOKENS = 256

# 128 bits: no two prefixes share a name by chance.
NAME_BYTES = 16

Ids = npt.NDArray[np.uint32]
Kind = Literal["slice", "state"]


class Leaf(msgspec.Struct, frozen=True):
    """One layer's cache, or one of several in a layer. kind: its class's name. span: it can be cut by
    position while it holds at most so many, 0 for never, None for always."""

    kind: str
    span: int | None

    def sliced(self, end: int) -> bool:
        """Whether its cache at a length of `end` can be cut by position."""
        return self.span is None or end <= self.span


class Layout(msgspec.Struct, frozen=True):
    """The caches of a model, in order, those inside of lists too."""

    leaves: tuple[Leaf, ...]

    def sliced(self, end: int) -> list[int]:
        """The leaves that a record's slice ending at `end` holds."""
        return [place for place, leaf in enumerate(self.leaves) if leaf.sliced(end)]

    def stateful(self, end: int) -> list[int]:
        """The leaves whose whole state a prefix of length `end` needs."""
        return [place for place, leaf in enumerate(self.leaves) if not leaf.sliced(end)]

    @property
    def distinct(self) -> Layout:
        """One leaf of each span: as much as tells what a length needs, of a model with many layers."""
        return Layout(tuple({leaf.span: leaf for leaf in self.leaves}.values()))

    @property
    def any_sliced(self) -> bool:
        """Whether some leaf can be cut wherever it is: then every record of a prefix must have its slice."""
        return any(leaf.span is None for leaf in self.leaves)


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


def record_at(first_parent: bytes, ids: Ids, end: int) -> Record:
    """The record that ends at `end`, 1 or more, of these tokens."""
    *_, last = chain(first_parent, ids[:end])
    return last


def find(ids: Ids, limit: int, first_parent: bytes, layout: Layout, known: Known) -> Found | None:
    """The longest prefix of `ids`, of at most `limit` tokens, that the known records restore."""
    layout = layout.distinct
    walked: list[Record] = []
    for record in chain(first_parent, ids):
        if not record.full or (layout.any_sliced and not known.has_slice(record.name)):
            break
        walked.append(record)
    for depth in range(len(walked), -1, -1):
        parent = walked[depth - 1].name if depth else first_parent
        found = _within(ids, limit, walked[:depth], parent, layout, known)
        if found is not None:
            return found
        if depth and (found := _at_end(walked[:depth], limit, layout, known)) is not None:
            return found
    return None


def _at_end(path: list[Record], limit: int, layout: Layout, known: Known) -> Found | None:
    """The prefix that ends with the last of these full records."""
    last = path[-1]
    return None if last.end > limit else _usable(path, last.end, last, layout, known)


def _within(
    ids: Ids, limit: int, path: list[Record], parent: bytes, layout: Layout, known: Known
) -> Found | None:
    """The longest prefix that ends in a record behind `path`."""
    start = len(path) * RECORD_TOKENS
    rest = ids[start : start + RECORD_TOKENS]
    if not len(rest) or limit <= start:
        return None
    # A thousand conversations may part behind one system prompt: what can't be better costs next to nothing.
    best: Found | None = None
    reached, differs = start, rest.item(0)
    names: dict[int, bytes] = {}
    last = min(start + len(rest), limit)
    for record in known.children(parent):
        end = record.end
        if (reach := end if end < last else last) <= reached:
            continue
        if (same := names.get(end)) is None:
            # Records of one length with these tokens have one name.
            same = names[end] = name(parent, rest[: end - start]) if end - start <= len(rest) else b""
        if record.name == same:
            length = reach
        elif (held := known.ids(record)) is None or held.item(reached - start) != differs:
            continue
        elif layout.stateful(reach):
            # Of other tokens no state serves.
            continue
        else:
            length = min(start + _agreed(held, rest), limit)
        if length <= reached:
            continue
        if (found := _usable([*path, record], length, record, layout, known)) is not None:
            if length == last:
                return found
            best, reached, differs = found, length, rest.item(length - start)
    return best


def _usable(path: list[Record], length: int, last: Record, layout: Layout, known: Known) -> Found | None:
    """The prefix of `length` tokens that ends in `last`, if all that it needs is there."""
    needs_state = bool(layout.stateful(length))
    if needs_state and (length != last.end or not known.has_state(last.name)):
        return None
    slices = tuple(path) if layout.sliced(length) else ()
    # Where every prefix needs slices `find` has come here over records that have theirs.
    unsure = slices[-1:] if layout.any_sliced else slices
    if any(not known.has_slice(record.name) for record in unsure):
        return None
    # A slice holds what can be cut at its own end: cut short it must not lack a leaf.
    if slices and layout.sliced(last.end) != layout.sliced(length):
        return None
    return Found(length, slices, last if needs_state else None)


def _agreed(own: Ids, rest: Ids) -> int:
    """How many tokens the two have in common at their start."""
    shorter = min(len(own), len(rest))
    differing = np.nonzero(own[:shorter] != rest[:shorter])[0]
    return int(differing[0]) if len(differing) else shorter
