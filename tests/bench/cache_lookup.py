"""What it takes to find the longest prefix that the prompt cache holds, among 1,000 of 8,000 tokens.

Records are in dictionaries, as in memory; what is measured is the way from ids to the records to restore.
Conversations with nothing in common; with a system prompt of 4,000 tokens in common, so that a thousand
records begin behind the same one; and that of a model whose state is kept at a few places only.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.worker.cache import records
from mlxpool.worker.cache.records import Ids, Layout, Leaf, Record
from tests.bench import common

LOOK_UP_LIMIT_MS = 1.0
PREFIXES, PREFIX_TOKENS, SHARED_TOKENS = 1000, 8000, 4000
# Where the recurrent model's prefixes have a state.
_STATE_EVERY_TOKENS = 2048
# What a template writes before every turn: conversations never part at a turn's first token.
_OPENING_TOKENS = 8

# As many layers as a model of 30 billion weights has.
_KV = Layout((Leaf("KVCache", True),) * 64)
_RECURRENT = Layout((Leaf("KVCache", True), Leaf("ArraysCache", False)) * 32)


class Shelf:
    """Records in dictionaries."""

    def __init__(self) -> None:
        self._ids: dict[bytes, Ids] = {}
        self._states: set[bytes] = set()
        self._children: dict[bytes, dict[bytes, Record]] = {}

    def put(self, ids: Ids) -> None:
        """All records of a prefix."""
        for record in records.chain(records.root(""), ids):
            self._ids[record.name] = ids[record.start : record.end]
            self._children.setdefault(record.parent, {})[record.name] = record
            if record.end % _STATE_EVERY_TOKENS == 0:
                self._states.add(record.name)

    def has_slice(self, name: bytes) -> bool:
        return name in self._ids

    def has_state(self, name: bytes) -> bool:
        return name in self._states

    def children(self, parent: bytes) -> list[Record]:
        return list(self._children.get(parent, {}).values())

    def ids(self, record: Record) -> Ids | None:
        return self._ids.get(record.name)


def _shelf(prefixes: list[Ids]) -> Shelf:
    shelf = Shelf()
    for ids in prefixes:
        shelf.put(ids)
    return shelf


def _prefixes(shared: int) -> list[Ids]:
    """With as many tokens in common at their start, and those that open a turn behind them."""
    random = np.random.default_rng(7)
    ids = random.integers(0, 50_000, (PREFIXES, PREFIX_TOKENS), dtype=np.uint32)
    ids[:, :shared] = ids[0, :shared]
    turn = slice(shared, shared + _OPENING_TOKENS)
    ids[:, turn] = ids[0, turn]
    return list(ids)


def _cases() -> dict[str, tuple[Shelf, Layout, list[Ids], int]]:
    """By name: the records, the layout, the prompts to ask in turn, and how much of each is there."""
    apart, together = _prefixes(0), _prefixes(SHARED_TOKENS)
    random = np.random.default_rng(8)
    turn = random.integers(0, 50_000, 100, dtype=np.uint32)
    foreign = random.integers(0, 50_000, PREFIX_TOKENS, dtype=np.uint32)
    on_apart, on_together = _shelf(apart), _shelf(together)

    def asked(prefixes: list[Ids], cut: int, rest: Ids) -> list[Ids]:
        return [np.concatenate([ids[:cut], rest]) for ids in prefixes]

    whole, parted = PREFIX_TOKENS, SHARED_TOKENS + _OPENING_TOKENS
    kept = whole // _STATE_EVERY_TOKENS * _STATE_EVERY_TOKENS
    return {
        "a turn behind a prefix": (on_apart, _KV, asked(apart, whole, turn), whole),
        "the same, a system prompt in common": (on_together, _KV, asked(together, whole, turn), whole),
        "another turn behind the system prompt": (on_together, _KV, asked(together, parted, turn), parted),
        "parted inside of a record": (on_apart, _KV, asked(apart, 7000, foreign[:1000]), 7000),
        "nothing in common": (on_apart, _KV, [foreign], 0),
        "a turn behind a prefix, recurrent": (on_apart, _RECURRENT, asked(apart, whole, turn), kept),
    }


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    report = common.report("cache_lookup", rounds=args.rounds, prefixes=PREFIXES, prefix_tokens=PREFIX_TOKENS)
    cases = _cases()
    rows = {name: report.row(name, "ms") for name in cases}
    root = records.root("")
    for place in range(args.rounds):
        for name, (shelf, layout, prompts, expected) in cases.items():
            ids = prompts[place % len(prompts)]
            began_s = time.perf_counter()
            found = records.find(ids, len(ids) - 1, root, layout, shelf)
            rows[name].samples.append((time.perf_counter() - began_s) * 1000)
            length = 0 if found is None else found.length
            if length != expected:
                rows[name].failed.append(f"{length} tokens found, not {expected}")
    dearest = max(row.settle().median or 0.0 for row in rows.values())
    report.targets = [common.Target("the dearest look-up, median", dearest, LOOK_UP_LIMIT_MS, "ms")]
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
