"""Grammars in preparation: who waits, who compiles, and what happens when a process has to be killed.

Owned by the event loop. At most `slots` grammars compile at once, more wait in order, and past the limit a
request is refused at once. A grammar that takes too long costs its process: it is refused, and those that
compiled beside it are handed to the next process. When a process dies by itself its grammars are tried once
more, one at a time, so that the one that killed it takes no other with it. A grammar whose last request has
left gives its place back at once, and its process is killed unless it is done within a moment. One that was
interrupted twice for others' sake has a process to itself: clients that keep sending slow grammars can't keep
an honest one from ever being done.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from mlxpool.shared.errors import error
from mlxpool.worker.grammar import messages
from mlxpool.worker.grammar.helper import COMMAND, Helper
from mlxpool.worker.grammar.runtime import plain_reason

# What a client is told to wait: most grammars take milliseconds.
_RETRY_AFTER_S = 5

# After so many times that others had its process killed, a grammar compiles alone.
_INTERRUPTIONS = 2


class Refused(Exception):
    """A grammar that can't be had; the message is the reason, for a person. unread: the compiler says so,
    as against takes too long or breaks the process."""

    def __init__(self, reason: str, *, unread: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.unread = unread


class Limits(msgspec.Struct, frozen=True):
    """compile_s: behaviour's limit for one grammar. start_s: for the process to import and read the
    vocabulary, on a busy machine too. idle_s: a helper's memory is given back after that long without work.
    leave_s: how long a grammar that nobody waits for may go on. waiting: grammars that wait for a place."""

    compile_s: float = 10.0
    start_s: float = 30.0
    idle_s: float = 60.0
    leave_s: float = 0.5
    waiting: int = 64


LIMITS = Limits()


class Entry:
    """One grammar on its way. `result` gets what the process answered (`messages.Done`), or Refused."""

    def __init__(self, number: int, text: str, result: asyncio.Future[str | None]) -> None:
        self.number = number
        self.text = text
        self.result = result
        # Looked at here too: whoever waited may have left.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.is_alone = False
        self.crashes = 0
        self.interruptions = 0
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class CompileQueue:
    """vocabulary: makes what a process reads first, in a thread. Made and used on one event loop."""

    def __init__(
        self,
        vocabulary: Callable[[], messages.Vocabulary],
        slots: int,
        limits: Limits,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._vocabulary = vocabulary
        self._slots = slots
        self._limits = limits
        self._command = command
        self._numbers = itertools.count(1)
        self._waiting: deque[Entry] = deque()
        self._running: dict[int, Entry] = {}
        # Compiling still, though nobody waits for them.
        self._left: dict[int, Entry] = {}
        self._helper: Helper | None = None
        self._helper_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def preparing(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def helper_pid(self) -> int | None:
        """The compiling process, None while there is none."""
        return None if self._helper is None else self._helper.pid

    def enter(self, text: str) -> Entry:
        """A place for a grammar. Raises ApiError 429 when too many wait, 503 when the worker stops."""
        if self._is_closed:
            raise error("shutting_down", "this model is being stopped", retry_after_s=_RETRY_AFTER_S)
        if len(self._running) >= self._slots and len(self._waiting) >= self._limits.waiting:
            raise error(
                "queue_full",
                f"{len(self._running)} grammars are being compiled and {len(self._waiting)} wait; send this "
                "request again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        entry = Entry(next(self._numbers), text, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._pump()
        return entry

    def leave(self, entry: Entry) -> None:
        """Nobody waits for this grammar any more: its place is free from now on."""
        if entry.result.done():
            return
        entry.result.cancel()
        if entry in self._waiting:
            self._waiting.remove(entry)
        elif self._running.pop(entry.number, None) is not None and entry.timer is not None:
            # It has been sent, so it compiles.
            entry.stop_timer()
            self._left[entry.number] = entry
            entry.timer = self._later(self._limits.leave_s, self._too_long, entry)
        self._pump()

    async def close(self) -> None:
        """Refuse what waits and end the process."""
        self._is_closed = True
        for entry in [*self._running.values(), *self._waiting]:
            entry.stop_timer()
            if not entry.result.done():
                entry.result.set_exception(
                    error("shutting_down", "this model is being stopped", retry_after_s=_RETRY_AFTER_S)
                )
        self._running.clear()
        self._waiting.clear()
        helper = self._helper
        self._drop_helper()
        if helper is not None:
            await helper.ended()

    # Inside

    def _later(self, delay_s: float, call: Callable[..., None], *args: object) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, call, *args)

    def _pump(self) -> None:
        """Give free places to those that wait, and keep the process as long as there is work."""
        while self._waiting and self._may_run(self._waiting[0]):
            entry = self._waiting.popleft()
            self._running[entry.number] = entry
            if self._helper is not None and self._helper.is_ready:
                self._send(entry)
        if self._running and self._helper is None:
            self._helper = Helper(self._answered, self._gone)
            self._arm(self._limits.start_s, self._start_too_long)
            self._helper.start(self._vocabulary, self._command)
        elif not self._running and not self._left and self._helper is not None and self._helper.is_ready:
            self._arm(self._limits.idle_s, self._drop_helper)

    def _may_run(self, entry: Entry) -> bool:
        if entry.is_alone:
            # Also what compiles on for nobody may cost the process.
            return not self._running and not self._left
        if any(other.is_alone for other in self._running.values()):
            return False
        return len(self._running) < self._slots

    def _send(self, entry: Entry) -> None:
        assert self._helper is not None
        self._disarm()
        entry.timer = self._later(self._limits.compile_s, self._too_long, entry)
        self._helper.send(messages.Job(entry.number, entry.text))

    def _arm(self, delay_s: float, call: Callable[[], None]) -> None:
        self._disarm()
        self._helper_timer = self._later(delay_s, call)

    def _disarm(self) -> None:
        if self._helper_timer is not None:
            self._helper_timer.cancel()
            self._helper_timer = None

    def _drop_helper(self) -> None:
        """Kill the process; what compiled in it for nobody is over with it."""
        self._disarm()
        if self._helper is not None:
            self._helper.kill()
            self._helper = None
        for entry in self._left.values():
            entry.stop_timer()
        self._left.clear()

    def _again(self, *, count_crash: bool) -> None:
        """Those that ran in a process that is no more, back to the front in their order."""
        entries = list(self._running.values())
        self._running.clear()
        for entry in reversed(entries):
            entry.stop_timer()
            if count_crash:
                entry.crashes += 1
                entry.is_alone = True
                if entry.crashes > 1:
                    self._refuse(entry, Refused("it breaks the grammar compiler"))
                    continue
            else:
                entry.interruptions += 1
                entry.is_alone = entry.is_alone or entry.interruptions >= _INTERRUPTIONS
            self._waiting.appendleft(entry)

    def _refuse(self, entry: Entry, refused: Refused) -> None:
        if not entry.result.done():
            entry.result.set_exception(refused)

    def _answered(self, helper: Helper, message: messages.FromCompiler) -> None:
        if helper is not self._helper:
            return
        if isinstance(message, messages.Ready):
            for entry in self._running.values():
                self._send(entry)
            if not self._running:
                self._pump()
            return
        left = self._left.pop(message.number, None)
        if left is not None:
            left.stop_timer()
        done = self._running.pop(message.number, None)
        if done is not None:
            done.stop_timer()
            if isinstance(message, messages.Failed):
                self._refuse(done, Refused(plain_reason(message.reason), unread=message.unread))
            elif not done.result.done():
                done.result.set_result(message.grammar)
        self._pump()

    def _too_long(self, entry: Entry) -> None:
        self._running.pop(entry.number, None)
        self._refuse(entry, Refused(f"it takes more than {self._limits.compile_s:g} s to compile"))
        self._drop_helper()
        self._again(count_crash=False)
        self._pump()

    def _start_too_long(self) -> None:
        if self._helper is not None:
            self._gone(self._helper)

    def _gone(self, helper: Helper) -> None:
        if helper is not self._helper:
            return
        self._drop_helper()
        self._again(count_crash=True)
        self._pump()
