"""Which records are on disk: the longest whole prefix; questions cost little however much there is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from mlxpool.shared.kv.names import Kind
from mlxpool.worker.cache.records import Record
from mlxpool.worker.cache.ssd_index import Index
from tests.unit.kv_world import ROOT_NAME, chain, tokens

LIST = list[tuple[Record, Kind, int]]
IDS = tokens(1)


def record(number: int, parent: bytes, start: int) -> Record:
    return Record(number.to_bytes(16, "big"), parent, start, start + 256)


def row(count: int, first: int = 0, parent: bytes = ROOT_NAME, start: int = 0) -> list[Record]:
    """Records one behind the other."""
    made: list[Record] = []
    for number in range(first, first + count):
        made.append(record(number, parent, start))
        parent, start = made[-1].name, made[-1].end
    return made


def measured(held: set[tuple[Record, Kind]]) -> int:
    """The longest whole prefix, by the plainest way."""
    slices = {piece.name: piece for piece, kind in held if kind == "slice"}
    if not slices:
        return max((piece.end for piece, _ in held), default=0)

    def whole(piece: Record) -> bool:
        return piece.start == 0 or (piece.parent in slices and whole(slices[piece.parent]))

    return max((piece.end for piece in slices.values() if whole(piece)), default=0)


def test_the_longest_whole_prefix_is_right_after_every_change() -> None:
    chance = random.Random(5)
    tree = row(1)
    while len(tree) < 60:
        parent = chance.choice(tree)
        tree.append(record(len(tree), parent.name, parent.end))
    index, held = Index(), set()
    seen = set()
    kinds: tuple[Kind, Kind] = ("slice", "state")
    for turn in range(4000):
        piece, kind = chance.choice(tree), chance.choice(kinds)
        # Now nearly all of it is there, now next to nothing.
        if chance.random() < (0.85 if turn // 400 % 2 else 0.25):
            index.add(piece, kind, 4096, IDS, 0.0)
            held.add((piece, kind))
        else:
            assert index.drop(piece.name, kind) == ((piece, kind) in held)
            held.discard((piece, kind))
        if turn % 500 == 499:
            index.replace([(piece, kind, 4096) for piece, kind in sorted(held, key=str)])
        assert index.longest() == measured(held)
        assert (index.entries, index.bytes) == (len(held), 4096 * len(held))
        seen.add(index.longest())
    assert len(seen) > 5


def test_a_lost_record_before_thousands_is_known_after_a_few_questions_and_at_once_when_it_matters() -> None:
    lost, rest = row(1)[0], row(20_000, first=1, parent=row(1)[0].name, start=256)
    found: LIST = [(piece, "slice", 4096) for piece in [*rest, lost]]
    index = Index()
    index.replace(found)
    assert index.longest() == 20_001 * 256
    index.drop(lost.name, "slice")
    assert [index.longest() for _ in range(20)][-1] == 0
    index.add(lost, "slice", 4096, IDS, 0.0)
    index.settle()
    assert index.longest() == 20_001 * 256
    index.drop(lost.name, "slice")
    index.settle()
    assert index.longest() == 0


def quickest_ms(work: Callable[[], object]) -> float:
    """Of five, in time of the processor."""
    taken = []
    for _ in range(5):
        begun = time.thread_time()
        work()
        taken.append(time.thread_time() - begun)
    return min(taken) * 1000


def test_among_fifty_thousand_records_no_question_takes_long() -> None:
    parts = 500
    found: LIST = [(piece, "slice", 4096) for part in range(100) for piece in row(parts, first=part * parts)]
    first = found[0][0]
    index = Index()
    index.replace(found)

    def written_and_asked() -> None:
        index.add(first, "slice", 4096, IDS, 0.0)
        assert index.longest() == parts * 256

    def lost_and_asked() -> None:
        index.drop(first.name, "slice")
        assert index.longest() == parts * 256
        index.add(first, "slice", 4096, IDS, 0.0)

    assert quickest_ms(written_and_asked) < 3
    assert quickest_ms(lost_and_asked) < 6


def test_behind_one_record_a_thousand_cost_little() -> None:
    ids = tokens(256)
    longer, _ = chain(ids)[0]
    covered, _ = chain(ids[:100])[0]
    index = Index()
    index.add(covered, "slice", 4096, ids[:100], 0.0)
    siblings = [chain(tokens(100 + place % 100, 1000 * place))[0][0] for place in range(1, 1000)]
    for sibling in siblings:
        index.add(sibling, "slice", 4096, IDS, 0.0)
    assert index.children(ROOT_NAME) == [*reversed(siblings), covered]
    assert index.covered_by(longer, ids) == [covered]
    assert index.is_among_newest(siblings[-8], 8)
    assert not index.is_among_newest(siblings[-9], 8)
    assert quickest_ms(lambda: index.children(ROOT_NAME)) < 0.2
    assert quickest_ms(lambda: [index.is_among_newest(sibling, 8) for sibling in siblings]) < 5
    assert quickest_ms(lambda: index.covered_by(longer, ids)) < 5


def test_own_tokens_are_remembered_for_records_that_are_there() -> None:
    index = Index()
    one, other = row(2)
    index.add(one, "slice", 4096, tokens(3), 0.0)
    index.remember(other.name, tokens(4))
    assert index.ids(other.name) is None
    held = index.ids(one.name)
    assert held is not None
    assert np.array_equal(held, tokens(3))
    index.drop(one.name, "slice")
    assert index.ids(one.name) is None
