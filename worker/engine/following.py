"""Which prompt on its way goes behind which: what they have in common is prefilled once.

A prompt follows the one that begins most like it, until where the two part. When that one is gone, or is past
the place, its followers choose anew; the one that may lead the others chooses first. Nobody follows one that
waits for itself, in whatever many steps, so somebody always goes on. Pure: it reads prompts and changes none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mlxpool.worker.cache.records import RECORD_TOKENS
from mlxpool.worker.engine.prompt import Prompt

# Fewer tokens in common than this are prefilled twice rather than waited for.
WORTH_FOLLOWING_TOKENS = RECORD_TOKENS


def ahead(prompt: Prompt, among: Iterable[Prompt], lost: Collection[Prompt]) -> tuple[Prompt, int] | None:
    """The one that begins most like a prompt and does not begin past what they share, and how much that is.

    lost: those that have to choose as well, later: neither they nor who waits for them can be followed yet.
    """
    best: tuple[Prompt, int] | None = None
    for other in among:
        if not other.rows or other.namespace != prompt.namespace:
            continue
        leader = other.leader
        if leader is prompt or leader in lost:
            continue
        shared = min(other.begins_like(prompt.ids), prompt.end)
        least = max(WORTH_FOLLOWING_TOKENS, other.begins_at, 0 if best is None else best[1] + 1)
        if shared >= least:
            best = other, shared
    return best


def leaders_first(followers: Sequence[Prompt]) -> list[Prompt]:
    """The followers of one prompt, whoever may lead the others first.

    What any of them shares with that prompt it shares with the one that has most in common with it. One whose
    rows have all left leads as a last resort.
    """
    return sorted(followers, key=lambda one: (bool(one.rows), one.parts_at), reverse=True)
