"""Which rows share a forward pass, so that padding never takes more than the KV pool has. Pure.

Rows that decode together hold caches as long as the longest one's: eight rows, one of them of 30,000
tokens, hold 240,000. So rows decode in groups: two groups become one only while everything, padding
counted, stays inside the pool, and when rows have grown out of it the longest row of the most wasteful
group gets one of its own. A group is a sequence of its rows' lengths in tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence

from mlxpool.worker.engine.admission import KvCost

Lengths = Sequence[int]


def held_bytes(groups: Sequence[Lengths], cost: KvCost) -> int:
    """Bytes of all groups' caches, every row as long as its group's longest."""
    return sum(len(group) * cost.row_bytes(max(group)) for group in groups)


def to_split(groups: Sequence[Lengths], cost: KvCost, pool_bytes: int) -> tuple[int, int] | None:
    """(group, row) to take out, None while the pool holds all, or when every row is alone already."""
    if held_bytes(groups, cost) <= pool_bytes:
        return None
    waste = [held_bytes([group], cost) - sum(cost.row_bytes(length) for length in group) for group in groups]
    place = max(range(len(groups)), key=waste.__getitem__, default=0)
    if not groups or not waste[place]:
        return None
    return place, max(range(len(groups[place])), key=groups[place].__getitem__)


def to_merge(
    groups: Sequence[Lengths],
    cost: KvCost,
    pool_bytes: int,
    apart: Collection[int] = (),
    kinds: Sequence[Hashable] | None = None,
) -> tuple[int, int] | None:
    """Two groups that fit into the pool as one: those that waste least. None where no two do. apart: groups
    that are left as they are. kinds: of each group; only those of one kind can be one. None: all are
    alike."""
    spare = pool_bytes - held_bytes(groups, cost)
    best: tuple[int, tuple[int, int]] | None = None
    places = [place for place in range(len(groups)) if place not in apart]
    for one, two in itertools.combinations(places, 2):
        if kinds is not None and kinds[one] != kinds[two]:
            continue
        together = held_bytes([[*groups[one], *groups[two]]], cost)
        added = together - held_bytes([groups[one], groups[two]], cost)
        if added <= spare and (best is None or added < best[0]):
            best = added, (one, two)
    return None if best is None else best[1]
