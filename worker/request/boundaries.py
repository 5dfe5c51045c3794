"""Lengths of a prompt that later prompts are likely to have in common with it.

A cache that can't be cut by position is worth keeping at few places, and these are the best two. The *stable
boundary*: a prompt ends in a primer for the answer that the next turn need not contain; what is before it the
next turn begins with, whatever the answer was. And the end of the system prompt, tools included, which other
conversations begin with. Both are found by rendering small conversations and comparing them, and remembered:
the primer's length for each mode of the template, the system prompt's ids for those that were asked last.

A wrong boundary costs reuse, never an answer: whatever fails here means no boundary. The preparer's threads
share one object; its lock is held for look-ups alone. The edge that shaped it: templates write other things
into a turn once it is past (they leave reasoning out, for one), so the primer is told by what the next turn's
text has in common with this one's, not by what the template adds at the end.
"""

from __future__ import annotations

import datetime
import hashlib
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Generic, TypeVar

import msgspec

# Longer than any family's: what is found there is no primer.
PRIMER_LIMIT_TOKENS = 64

# Where a text goes on differently its last tokens may be others.
_SEAM_TOKENS = 4

# Modes of a template are few; clients may send variables of their own.
_MODES_KEPT = 64
# The agents that one person has in use; each entry is a system prompt's ids, at most some hundred KB.
_SYSTEMS_KEPT = 16

# How messages become text: with what the server tells the model in words, and the template's variables.
Render = Callable[[list[dict[str, Any]], str, dict[str, Any]], str]
Encode = Callable[[str], Sequence[int]]

_T = TypeVar("_T")

_USER: dict[str, Any] = {"role": "user", "content": "a"}
_OTHER_USER: dict[str, Any] = {"role": "user", "content": "b"}
_REPLY: dict[str, Any] = {"role": "assistant", "content": "c"}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "d", "arguments": {}}}],
}
_RESULT: dict[str, Any] = {"role": "tool", "content": "e", "tool_call_id": "call00000", "name": "d"}


class _Recent(Generic[_T]):
    """What was worked out last, by key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[bytes, _T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes, work_out: Callable[[], _T]) -> _T:
        """Two threads that ask the same at once both work it out. Raises what `work_out` raises."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        value = work_out()
        with self._lock:
            self._held[key] = value
            if len(self._held) > self._most:
                self._held.popitem(last=False)
        return value


class Boundaries:
    """Of one model's prompts. render: as prompts are rendered, the primer included unless told otherwise."""

    def __init__(self, render: Render, encode: Encode) -> None:
        self._render, self._encode = render, encode
        self._primers: _Recent[int] = _Recent(_MODES_KEPT)
        self._systems: _Recent[tuple[int, ...]] = _Recent(_SYSTEMS_KEPT)
        self._complained = False

    def of(
        self, ids: tuple[int, ...], messages: Sequence[dict[str, Any]], told: str, variables: dict[str, Any]
    ) -> tuple[int, ...]:
        """Ascending, each 1 or more and less than there are ids. ids: what these messages came to. told: what
        the server added in words. variables: what the template was given. Never raises."""
        found = {
            self._guarded(lambda: self._stable(len(ids), messages, variables), 0),
            self._guarded(lambda: self._system(ids, messages, told, variables), 0),
        }
        return tuple(sorted(length for length in found if 0 < length < len(ids)))

    def _guarded(self, work_out: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return work_out()
        except Exception:
            if not self._complained:
                self._complained = True
                sys.stderr.write(
                    "a prompt's boundaries can't be told; prefixes of it may be computed again\n"
                )
                traceback.print_exc()
                sys.stderr.flush()
            return otherwise

    def _stable(self, length: int, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> int:
        after_tool = messages[-1]["role"] == "tool"
        mode = {**variables, "tools": bool(variables.get("tools"))}
        # A template that refuses the small conversation isn't asked again either.
        primer = self._primers.get(
            _key(after_tool, mode), lambda: self._guarded(lambda: self._primer(after_tool, variables), 0)
        )
        return length - primer if primer else 0

    def _primer(self, after_tool: bool, variables: dict[str, Any]) -> int:
        """Tokens at a prompt's end that the next turn may not have; 0 where that can't be told."""
        # Behind a tool's result the same turn goes on, and what is of it is still there.
        now = [_USER, _CALL, _RESULT] if after_tool else [_USER]
        later = [*now, _REPLY] if after_tool else [*now, _REPLY, _OTHER_USER]
        bare = {**variables, "add_generation_prompt": False}
        prompt = self._encode(self._render(now, "", variables))
        shared = min(
            _common(prompt, self._encode(self._render(messages, "", bare))) for messages in (now, later)
        )
        # At least one, so that the same prompt asked again finds a place below its end.
        primer = max(len(prompt) - shared, 1)
        return primer if primer <= PRIMER_LIMIT_TOKENS else 0

    def _system(
        self, ids: tuple[int, ...], messages: Sequence[dict[str, Any]], told: str, variables: dict[str, Any]
    ) -> int:
        system = list(takewhile(lambda message: message["role"] == "system", messages))
        if not system and not told and not variables.get("tools"):
            return 0
        # Templates print the date.
        key = _key(system, told, variables, datetime.date.today())
        start = self._systems.get(
            key, lambda: self._guarded(lambda: self._beginning(system, told, variables), ())
        )
        if ids[: len(start)] == start:
            return len(start)
        # Some templates write the system prompt into the last turn: it begins no other prompt then.
        firm = max(len(start) - _SEAM_TOKENS, 0)
        return firm + _common(start[firm:], ids[firm:]) if ids[:firm] == start[:firm] else 0

    def _beginning(
        self, system: list[dict[str, Any]], told: str, variables: dict[str, Any]
    ) -> tuple[int, ...]:
        """Ids of the text that conversations with this system prompt have in common, encoded by itself."""
        one, other = (self._render([*system, user], told, variables) for user in (_USER, _OTHER_USER))
        return tuple(self._encode(one[: _common(one, other)]))


def _key(*parts: Any) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).digest()


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How much two sequences of one type begin with alike. By halves: comparing slices is what is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
