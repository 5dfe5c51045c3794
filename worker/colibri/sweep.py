"""The order of a pass that needs more than a step does: many rows, or more experts than a layer has room for.

A pass is a list of groups of experts, each in slots of its own, computed one after the other. A group's reads
begin as early as its slots allow: at once where nothing needed lies; once the layer's hits have been computed
where it replaces some of them; in the working slots, which have two lanes so that one is read into while the
other is computed, once the lane's last group has been computed. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mlxpool.worker.colibri.residency import Pass, Placement

Ids = npt.NDArray[np.integer[Any]]
_T = TypeVar("_T")


class Group(NamedTuple):
    """Experts that are computed together. lane: of `through`, which part of the working slots. after: the
    groups that must have been computed before its reads may begin, by number."""

    kind: Literal["held", "arriving", "early", "late", "through"]
    placements: list[Placement]
    lane: int = 0
    after: tuple[int, ...] = ()

    @property
    def is_read(self) -> bool:
        return self.kind in ("early", "late", "through")


def cuts(
    working: int, slots: int, *, many: bool, overlap: bool, staged: int | None
) -> tuple[int, int | None]:
    """lanes and width, as `groups` takes them. working: slots of them, 0 where none are needed. slots: of the
    layer's own. many: rows. overlap: compute while reading. staged: most experts that can be under way where
    they are not read into slots themselves, else None.
    """
    if not many and staged is None:
        # Each expert is computed as soon as it is there.
        return (max(1, working), 1) if overlap else (1, None)
    lanes = 2 if overlap and working > 1 else 1
    if not many:
        return lanes, None
    # A few groups in the layer's own slots too: the first is computed while others are read.
    width = max(working // lanes, slots // 4)
    return lanes, width if staged is None else min(width, staged)


def groups(planned: Pass, working: int, lanes: int, width: int | None) -> list[Group]:
    """In the order in which they are computed.

    working: slots of them, 0 where none are needed. lanes: 1 reads no group while another is computed.
    width: most experts of a group in the layer's own slots, None for any number.
    """
    made: list[Group] = []
    for kind, placements in (("held", planned.hits), ("arriving", planned.arriving)):
        if placements:
            made.append(Group(kind, placements))  # type: ignore[arg-type]
    hits = (0,) if planned.hits else ()
    made += [Group("early", part) for part in cut(planned.early, width)]
    lane_width = max(1, working // lanes)
    through = [
        Group("through", [Placement(one, lane * lane_width + slot) for slot, one in enumerate(part)], lane)
        for lane, part in _dealt(list(cut(sorted(planned.through), lane_width)), lanes)
    ]
    late = [Group("late", part, after=hits) for part in cut(planned.late, width)]
    first = len(made)
    made += [*through[:lanes], *late, *through[lanes:]]
    last: dict[int, int] = {}
    for number, group in enumerate(made[first:], first):
        if group.kind == "through":
            if group.lane in last:
                made[number] = group._replace(after=(last[group.lane],))
            last[group.lane] = number
    return made


def _dealt(parts: Sequence[_T], lanes: int) -> Iterator[tuple[int, _T]]:
    for number, part in enumerate(parts):
        yield number % lanes, part


def cut(items: Sequence[_T], width: int | None) -> Iterator[list[_T]]:
    """In pieces of at most `width`."""
    step = max(1, len(items)) if width is None else max(1, width)
    for start in range(0, len(items), step):
        yield list(items[start : start + step])


def beginnable(made: Sequence[Group], begun: int, computed: int, ahead: int | None) -> int:
    """Up to which group reads may have begun. begun: up to which they have. computed: groups that have been.
    ahead: how many groups beyond the one that is next, None for any number."""
    while begun < len(made):
        if ahead is not None and begun > computed + ahead:
            break
        if any(number >= computed for number in made[begun].after):
            break
        begun += 1
    return begun


def by_group(ids: Ids, made: Collection[Group], experts: int) -> tuple[Ids, Ids, list[int]]:
    """Routed rows in the order in which they are computed, ascending by slot within a group; each one's slot;
    and where each group begins, one more than there are groups."""
    where = np.zeros(experts, np.int64)
    slots = np.zeros(experts, np.int64)
    for number, group in enumerate(made):
        for expert, slot in group.placements:
            where[expert], slots[expert] = number, slot
    flat = ids.reshape(-1)
    most = int(slots.max()) + 1
    key = where[flat] * most + slots[flat]
    rows = np.argsort(key, kind="stable")
    starts = np.searchsorted(key[rows], np.arange(len(made) + 1) * most)
    return rows, slots[flat[rows]].astype(np.uint32), [int(start) for start in starts]
