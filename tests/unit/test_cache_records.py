"""Names of records, and the longest prefix that a set of them restores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxpool.worker.cache import records
from mlxpool.worker.cache.records import Found, Ids, Layout, Leaf, Record

# Records this short let small examples hold several.
SHORT_TOKENS = 4

NAMESPACES = ("", "an adapter")


def ids_of(tokens: Iterable[int]) -> Ids:
    return np.array(list(tokens), dtype=np.uint32)


def layout(*sliced: bool) -> Layout:
    return Layout(tuple(Leaf("a cache", one) for one in sliced))


def record_at(first_parent: bytes, ids: Ids, end: int) -> Record:
    """The record that ends at `end` of these tokens."""
    *_, last = records.chain(first_parent, ids[:end])
    return last


class Held(NamedTuple):
    """A record and what is there of it. prefix: all tokens up to its end."""

    record: Record
    namespace: str
    prefix: tuple[int, ...]
    slice: bool
    state: bool
    told: bool  # whether its ids can be asked


class Shelf:
    """Records in dictionaries."""

    def __init__(self, held: Iterable[Held] = ()) -> None:
        self.held = {one.record.name: one for one in held}

    def put(self, tokens: Iterable[int], end: int, namespace: str = "", *, state: bool = False) -> Record:
        """The record that ends at `end` of these tokens, with its slice."""
        prefix = tuple(tokens)[:end]
        record = record_at(records.root(namespace), ids_of(prefix), end)
        self.held[record.name] = Held(record, namespace, prefix, slice=True, state=state, told=True)
        return record

    def has_slice(self, name: bytes) -> bool:
        return name in self.held and self.held[name].slice

    def has_state(self, name: bytes) -> bool:
        return name in self.held and self.held[name].state

    def children(self, parent: bytes) -> list[Record]:
        return [one.record for one in self.held.values() if one.record.parent == parent]

    def ids(self, record: Record) -> Ids | None:
        one = self.held[record.name]
        return ids_of(one.prefix[record.start :]) if one.told else None

    def find(self, tokens: Iterable[int], limit: int, of: Layout, namespace: str = "") -> Found | None:
        return records.find(ids_of(tokens), limit, records.root(namespace), of, self)


def restorable(shelf: Shelf, tokens: tuple[int, ...], length: int, of: Layout, namespace: str) -> bool:
    """Whether `length` of these tokens can be restored, by trying every record as the last one."""
    mine = [one for one in shelf.held.values() if one.namespace == namespace]
    for last in mine:
        start, end = last.record.start, last.record.end
        # Where a record's ids can't be told, its name still tells of one that is all of the prompt's.
        known = last.told or (last.prefix == tokens[:end])
        if not start < length <= end or not known or last.prefix[:length] != tokens[:length]:
            continue
        if of.stateful and not (length == end and last.state):
            continue
        if of.sliced:
            before = [
                any(one.slice and one.prefix == tokens[:whole] for one in mine)
                for whole in range(SHORT_TOKENS, start + 1, SHORT_TOKENS)
            ]
            # A longer record's slice does as well.
            holding = [
                one
                for one in mine
                if one.slice
                and one.record.parent == last.record.parent
                and one.prefix[:length] == tokens[:length]
                and (one.told or one is last)
            ]
            if not all(before) or not holding or (not of.stateful and not last.slice):
                continue
        return True
    return False


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=15).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shelf, tuple[int, ...]]:
    """Records of conversations that part somewhere, any of their parts missing, and a prompt."""
    trunk = draw(TOKENS)

    def branch() -> tuple[int, ...]:
        kept = draw(st.integers(0, len(trunk)))
        return (trunk[:kept] + draw(TOKENS))[:15]

    whole = draw(st.booleans())
    held: list[Held] = []
    for tokens in [branch() for _ in range(draw(st.integers(0, 5)))]:
        namespace = draw(st.sampled_from(NAMESPACES)) if draw(st.booleans()) else ""
        for record in records.chain(records.root(namespace), ids_of(tokens)):
            has_slice, has_state, told = (whole or draw(st.booleans()) for _ in range(3))
            if has_slice or has_state:
                held.append(Held(record, namespace, tokens[: record.end], has_slice, has_state, told))
    return Shelf(held), branch()


LAYOUTS = st.sampled_from([layout(True), layout(False), layout(False, True)])


@settings(max_examples=700, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), of=LAYOUTS)
def test_it_is_always_the_longest_prefix_that_lacks_nothing(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, of: Layout
) -> None:
    monkeypatch.setattr(records, "RECORD_TOKENS", SHORT_TOKENS)
    shelf, tokens = data.draw(cases())
    namespace = data.draw(st.sampled_from(("", "", "", *NAMESPACES)))
    limit = len(tokens) - data.draw(st.integers(0, 3))
    lengths = [length for length in range(1, limit + 1) if restorable(shelf, tokens, length, of, namespace)]
    found = shelf.find(tokens, limit, of, namespace)
    assert (found.length if found is not None else None) == max(lengths, default=None)
    if found is None:
        return
    # And what is named is what is needed, in order.
    assert bool(found.records) == bool(of.sliced)
    assert (found.state is not None) == bool(of.stateful)
    reached = 0
    for record in found.records:
        one = shelf.held[record.name]
        assert one.slice
        assert record.start == reached
        assert one.prefix[: found.length] == tokens[: min(record.end, found.length)]
        reached = record.end
    if found.records:
        assert found.records[-1].start < found.length <= reached
    if found.state is not None:
        one = shelf.held[found.state.name]
        assert one.state
        assert one.prefix == tokens[: found.length]


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=700), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_name_stands_for_namespace_and_every_token_up_to_the_end(
    tokens: list[int], data: st.DataObject
) -> None:
    root = records.root("")
    names = [record.name for record in records.chain(root, ids_of(tokens))]
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[place] = (changed[place] + data.draw(st.integers(1, 2**32 - 1))) % 2**32
    others = [record.name for record in records.chain(root, ids_of(changed))]
    same = place // records.RECORD_TOKENS
    assert names[:same] == others[:same]
    assert not set(names[same:]) & set(others)
    elsewhere = {record.name for record in records.chain(records.root("x"), ids_of(tokens))}
    assert not elsewhere & set(names)
    assert not {records.name(names[0], ids_of(tokens[:256]))} & set(names)
    shorter = [record.name for record in records.chain(root, ids_of(tokens[:-1]))]
    assert not names or names[-1] not in shorter


def test_a_prefix_is_cut_into_whole_records_and_a_short_one() -> None:
    cut = list(records.chain(records.root(""), ids_of(range(600))))
    assert [(record.start, record.end, record.full) for record in cut] == [
        (0, 256, True),
        (256, 512, True),
        (512, 600, False),
    ]
    assert [record.parent for record in cut] == [records.root(""), cut[0].name, cut[1].name]
    assert record_at(records.root(""), ids_of(range(600)), 512) == cut[1]


@pytest.mark.parametrize("length", [1, 255, 256, 257, 512, 600])
def test_keys_and_values_are_used_up_to_the_token_where_prompts_part(length: int) -> None:
    shelf, kept = Shelf(), list(range(600))
    for end in (256, 512, 600):
        shelf.put(kept, end)
    other = kept[:length] + [7] * (700 - length)
    found = shelf.find(other, len(other) - 1, layout(True))
    assert found is not None
    assert found.length == length
    # The whole of it, asked again: all but the last token.
    found = shelf.find(kept, 599, layout(True))
    assert found is not None
    assert found.length == 599


def test_a_recurrent_state_is_used_where_it_was_taken_alone() -> None:
    shelf, kept = Shelf(), list(range(600))
    shelf.put(kept, 256)
    shelf.put(kept, 300, state=True)
    shelf.put(kept, 512)
    shelf.put(kept, 600)
    found = shelf.find(kept, 599, layout(True, False))
    assert found is not None
    assert found.length == 300
    assert found.state == found.records[-1]
    assert shelf.find(kept, 299, layout(True, False)) is None


def test_a_missing_record_ends_the_prefix() -> None:
    shelf, kept = Shelf(), list(range(1100))
    for end in (256, 768, 1024):
        shelf.put(kept, end)
    found = shelf.find(kept, 1099, layout(True))
    assert found is not None
    assert found.length == 256
