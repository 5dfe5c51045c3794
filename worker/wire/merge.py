"""Pieces of one text that came together as one piece: what is sent once is encoded once. Responses alone does
without it, whose items gather their text themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from mlxpool.worker.text.events import Event, Reasoning, Text, ToolCallArguments
from mlxpool.worker.wire.writer import Said

Piece = Text | Reasoning | ToolCallArguments


def merged(said: Iterable[Said]) -> list[Said]:
    """The same, with pieces of one text that follow each other as one piece, choice by choice."""
    merged: list[Said] = []
    last: dict[int, int] = {}  # choice → place of its last event
    more: defaultdict[int, list[str]] = defaultdict(list)  # place → texts that go on there
    for index, event in said:
        place = last.get(index)
        if place is not None and isinstance(event, Piece) and _goes_on(merged[place][1], event):
            more[place].append(event.text)
            continue
        last[index] = len(merged)
        merged.append((index, event))
    for place, texts in more.items():
        index, event = merged[place]
        assert isinstance(event, Piece)
        merged[place] = (index, msgspec.structs.replace(event, text="".join((event.text, *texts))))
    return merged


def _goes_on(one: Event, two: Piece) -> bool:
    if isinstance(two, ToolCallArguments):
        return isinstance(one, ToolCallArguments) and one.index == two.index
    return type(one) is type(two)
