"""A child's lifeline: when the parent's end of the tether closes, the child is gone at once.

A thread reads the tether from before the first heavy import on, because the parent may die at any moment
and imports take a second; a signal handler would miss what the thread can't. It imports nothing beyond
the standard library's core, and it is the one place where a child kills its own group: whatever the
child has started dies with it. Workers and job processes have one; the one line that may come over it, a
worker's launch, is passed on.
"""

from __future__ import annotations

import os
import queue
import signal
import threading

# Longest launch line believed; `control.MAX_LINE_BYTES`, which isn't imported yet.
_LINE_LIMIT_BYTES = 64 * 1024


def watch(descriptor: int) -> queue.SimpleQueue[bytes]:
    """Start the thread; returns the queue that its first line (without the newline) arrives in."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(descriptor, lines), name="tether", daemon=True).start()
    return lines


def _read(descriptor: int, lines: queue.SimpleQueue[bytes]) -> None:
    held = b""
    told = False
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:
            data = b""
        if not data:
            _die()
        if told:
            continue
        held += data
        line, newline, _ = held.partition(b"\n")
        if newline or len(held) > _LINE_LIMIT_BYTES:
            lines.put(line)
            told = True


def _die() -> None:
    """End this process and what it has started, without a word: nobody is left to hear it."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
