"""What a row would pay to begin a compiled grammar, tried in the process that may die of it.

A small grammar can compile to little and still take gigabytes as soon as somebody follows it. Other grammars
compile in the same process meanwhile and their memory can't be told apart, so what looks like too much is
tried once more, beside what the first try still holds: the lesser of them is the grammar's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from mlxpool.worker.grammar import messages

_TRIES = 2

# One at a time: the tries measure memory.
_LOCK = threading.Lock()


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def too_much(
    begin: Callable[[], Any],
    clock: Callable[[], float] = time.thread_time,
    memory: Callable[[], int] = resident_bytes,
) -> str | None:
    """Why a grammar costs too much to begin, None where it doesn't.

    begin: makes a matcher and asks it for its first tokens; what it returns is held on to. clock: seconds of
    this thread's processor time. memory: bytes of this process.
    """
    held: list[Any] = []
    least_s, least_bytes = float("inf"), float("inf")
    with _LOCK:
        for _ in range(_TRIES):
            before_s, before_bytes = clock(), memory()
            held.append(begin())
            least_s = min(least_s, clock() - before_s)
            least_bytes = min(least_bytes, memory() - before_bytes)
            if least_s <= messages.BEGIN_LIMIT_S and least_bytes <= messages.BEGIN_LIMIT_BYTES:
                return None
    if least_bytes > messages.BEGIN_LIMIT_BYTES:
        return f"following it takes {least_bytes} bytes, and {messages.BEGIN_LIMIT_BYTES} are allowed"
    return f"its first token takes {least_s:.2f} s, and {messages.BEGIN_LIMIT_S} are allowed"
