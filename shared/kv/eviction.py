"""Which records leave first when room lacks. Pure.

The least recently used, except that no record outlives what it needs: a record is worth nothing without the
slices before it, so it counts as used when the last of those behind it was, and at equal times the one
further back goes first. A state is needed by nothing: it goes before its record's slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxpool.shared.kv.listing import Stored


def victims(
    records: Iterable[Stored], need_bytes: int, folder: str = "", behind: Sequence[bytes] = ()
) -> list[Stored]:
    """Records to delete, in order, to get `need_bytes` back; all that may go where they are not enough.

    folder, behind: a model's folder and names of records there which stay with all before them, because what
    room is made for needs them.
    """
    ordered = sorted(records, key=lambda stored: (stored.file.start, stored.file.kind), reverse=True)
    used: dict[tuple[str, bytes], float] = {}
    ranked: list[tuple[float, int, Stored]] = []
    for place, stored in enumerate(ordered):
        own, parent = (stored.folder, stored.file.name), (stored.folder, stored.file.parent)
        last_s = stored.used_s
        if stored.file.kind == "slice":
            last_s = max(last_s, used.get(own, last_s))
        for needed in (own, parent):
            used[needed] = max(last_s, used.get(needed, last_s))
        ranked.append((last_s, place, stored))
    kept = _paths(ordered, [(folder, name) for name in behind])
    chosen: list[Stored] = []
    for _, _, stored in sorted(ranked, key=lambda entry: entry[:2]):
        if need_bytes <= 0:
            break
        if (stored.folder, stored.file.name) in kept:
            continue
        chosen.append(stored)
        need_bytes -= stored.bytes
    return chosen


def _paths(records: Iterable[Stored], lasts: Iterable[tuple[str, bytes]]) -> set[tuple[str, bytes]]:
    """These records and all before them, as folder and name."""
    parents = {(stored.folder, stored.file.name): (stored.folder, stored.file.parent) for stored in records}
    path: set[tuple[str, bytes]] = set()
    for last in lasts:
        step: tuple[str, bytes] | None = last
        while step is not None and step not in path:
            path.add(step)
            step = parents.get(step)
    return path
