"""Which states of a conversation are worth their bytes. Pure.

A state is a whole window or a whole recurrent state, tens or hundreds of megabytes, and every turn makes
two. The next turn goes on from one of the newest two, another conversation from the system prompt's end; the
others serve who goes back, and stay only while there is room.
"""

from __future__ import annotations

from collections.abc import Sequence

# What a conversation's states take at most, those that are kept whatever they take left out.
BYTES_PER_CONVERSATION = 512 * 1024 * 1024

# The newest that are kept whatever they take: the last prompt's and the last answer's.
KEPT = 2


def surplus(sizes: Sequence[int], kept: Sequence[bool], cap_bytes: int = BYTES_PER_CONVERSATION) -> list[int]:
    """Which states have to go, as places in `sizes`: bytes of a conversation's states, the oldest first.

    kept: those that no newer one replaces, such as the system prompt's.
    """
    taken_bytes = sum(sizes)
    gone: list[int] = []
    for place in range(max(0, len(sizes) - KEPT)):
        if taken_bytes <= cap_bytes:
            break
        if not kept[place]:
            gone.append(place)
            taken_bytes -= sizes[place]
    return gone


def superseded(count: int, kept: Sequence[bool]) -> list[int]:
    """Which of `count` states, the oldest first, are not worth writing to disk any more."""
    return [place for place in range(max(0, count - KEPT)) if not kept[place]]
