"""Text of an answer in, text and tool calls out.

Prose streams until one of the family's openers; from there a reader takes over. Until the reader has begun a
call, everything from the opener on is kept, and when it turns out not to be a call (it can't be read, its
function was not declared, it is longer than the bound) the opener becomes text and reading goes on behind it.
Once a call has begun its arguments stream. If its syntax breaks then, what was sent is closed into valid
JSON, the call ends, and the rest is text. If the model ends its answer inside, what it wrote is closed in the
same way; if the answer is cut there, the call stays without an end.

Blank text beside a call is markup of the template, not of the answer: text that is nothing but blanks from
the answer's start, or since the last call, is left out when a call or the end follows.

`ToolMachine` belongs to one row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from mlxpool.worker.text.events import Text, TextEvent, ToolCallArguments, ToolCallEnd, ToolCallStart
from mlxpool.worker.text.find import Finder
from mlxpool.worker.text.format import DeclaredTool
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.arguments import JsonWriter, without_surrogates
from mlxpool.worker.text.tools.feed import BLANKS_CHARS, Broken, Ended, Feed, Reading
from mlxpool.worker.text.tools.schema import coerce, types_of

# Characters that are kept while a value is read that has to be seen whole, of a call whose name is known. A
# file in one argument that does not stream fits.
HELD_CHARS = 64 * 1024

# Characters that are kept while nothing but an opener says that a call comes: when prose follows instead, a
# reader waits for so much of it. Arguments that are written before the name fit, unless they are long.
UNNAMED_CHARS = 4096

# Characters between an opener and the call's name, the name included.
HEADER_CHARS = 256

# Reads one call, or a block of them, behind an opener.
Reader = Callable[["ToolMachine", str], Reading[None]]


class ToolMachine:
    """openers: what begins a call, as the vocabulary has it. read: the family's reader. bare: a call may also
    begin the answer without an opener, with a brace or a bracket."""

    def __init__(
        self,
        openers: Sequence[str],
        read: Reader,
        declared: Sequence[DeclaredTool],
        marks: Marks,
        new_id: Callable[[], str],
        bare: bool = False,
    ) -> None:
        self.feed = Feed(UNNAMED_CHARS)
        self.marks = marks
        self.tools = {tool.name: tool for tool in declared}
        self._openers = Finder(openers)
        self._reader = read
        self._bare = bare
        self._new_id = new_id
        self._ids: set[str] = set()
        self._out: list[TextEvent] = []
        self._index = -1
        self._writer: JsonWriter | None = None
        self._resume = 0  # characters past the mark that are text when this is no call
        self._failed = False  # the last attempt at a call
        self._fresh = True  # nothing but blanks since the start or the last call
        self._blanks = ""
        self._in_prose = False
        self._reading: Generator[None, None, None] = self._read()
        # A held value, what its reader has looked at beyond it, and blanks.
        self.bound_chars = HELD_CHARS + 2 * self._openers.longest + BLANKS_CHARS + 64

    @property
    def held_chars(self) -> int:
        """Characters taken in whose event is still to come, or that come to none."""
        return self.feed.held_chars + len(self._blanks)

    def push(self, text: str) -> list[TextEvent]:
        """Take the next text; give what is settled, in order."""
        feed = self.feed
        if self._in_prose and not self._fresh and feed.at == len(feed.text) and self._openers.nowhere(text):
            text = self._readable(text)
            return [Text(text)] if text else []
        feed.add(text)
        next(self._reading, None)
        return self._take()

    def flush(self, cut: bool = False) -> list[TextEvent]:
        """The answer ended: what was kept and is no call is text. cut: the model would have gone on."""
        self.feed.ended, self.feed.finished = True, not cut
        next(self._reading, None)
        return self._take()

    def _take(self) -> list[TextEvent]:
        self._write_arguments()
        out, self._out = self._out, []
        return out

    def _read(self) -> Generator[None, None, None]:
        try:
            if self._bare:
                yield from self._attempt(self._read_bare())
            while True:
                opener = yield from self._read_prose()
                self._resume = len(opener)
                yield from self._attempt(self._reader(self, opener))
        except Ended:
            self._finish()

    def _read_bare(self) -> Reading[None]:
        self.feed.hold()
        self._resume = 0
        if (yield from self.feed.solid()) not in "{[":
            raise Broken
        yield from self._reader(self, "")

    def _attempt(self, call: Reading[None]) -> Reading[None]:
        """Run a reader; when it gives up, go on in a way that loses no text."""
        try:
            yield from call
        except Broken:
            self._recover()
        self.feed.limit = UNNAMED_CHARS
        self.feed.mark = None
        self._resume = 0

    def _recover(self) -> None:
        feed = self.feed
        if self._writer is not None:
            self._writer.repair()
            self.end_call()
        self._failed = True
        if feed.mark is not None:
            feed.at = feed.mark + self._resume
            self._say(self.marks.spelled(feed.text[feed.mark : feed.at]))

    def _finish(self) -> None:
        feed = self.feed
        if self._writer is not None:
            if feed.finished:
                self._writer.repair()
                self.end_call()
        elif feed.mark is not None:
            self._say(self.marks.spelled(feed.text[feed.mark :]))
        if self._index < 0 and self._blanks:
            self._emit(self._blanks)

    def _read_prose(self) -> Reading[str]:
        """Give text out until an opener, which is read and marked."""
        feed = self.feed
        self._in_prose = True
        while True:
            found = self._openers.find(feed.text, feed.at)
            if found is not None:
                self._in_prose = False
                self._say(self._readable(feed.text[feed.at : found.start]))
                feed.mark = found.start
                feed.at = found.start + len(found.what)
                return found.what
            end = len(feed.text) - (0 if feed.ended else self._openers.tail(feed.text, feed.at))
            self._say(self._readable(feed.text[feed.at : end]))
            feed.at = end
            if feed.ended:
                raise Ended
            yield

    def _readable(self, text: str) -> str:
        """Prose; behind what looked like a call and was none, the rest of its markers is spelled out too."""
        return self.marks.spelled(text) if self._failed else self.marks.plain(text)

    def _say(self, text: str) -> None:
        if self._fresh:
            text = self._blanks + text
            if len(text) <= BLANKS_CHARS and not text.strip():
                self._blanks = text
                return
            self._blanks = ""
            self._fresh = False
        self._emit(text)

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._out and isinstance(last := self._out[-1], Text):
            self._out[-1] = Text(last.text + text)
        else:
            self._out.append(Text(text))

    # What readers call

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The JSON schema of a declared function's arguments. Raises Broken for a name nobody declared."""
        tool = self.tools.get(name)
        if tool is None:
            raise Broken
        return tool.parameters

    def begin_call(self, name: str, own_id: str | None = None) -> JsonWriter:
        """A call of a declared function; its arguments are written into what comes back. own_id: the model's
        own, used where no other call of this answer has it. Raises Broken."""
        self.parameters(name)
        self._blanks = ""
        self._fresh = False
        self._index += 1
        call_id = own_id if own_id and own_id not in self._ids else self._new_id()
        self._ids.add(call_id)
        self._out.append(ToolCallStart(self._index, call_id, name))
        self._writer = self.writer()
        self._failed = False
        self.named()
        self.feed.mark = None
        self._resume = 0
        return self._writer

    def named(self) -> None:
        """The name that was read is a declared function's: what follows is worth waiting for."""
        self.feed.limit = HELD_CHARS

    @property
    def arguments(self) -> JsonWriter:
        """What the arguments of the call that was begun are written into."""
        assert self._writer is not None
        return self._writer

    def writer(self) -> JsonWriter:
        """For JSON that is looked at and not sent."""
        return JsonWriter(self.marks.spelled)

    def end_call(self) -> None:
        """The arguments are complete."""
        self._write_arguments()
        self._writer = None
        self._out.append(ToolCallEnd(self._index))
        self._fresh = True

    def whole_call(self, name: str, arguments: Mapping[str, Any], own_id: str | None = None) -> None:
        """A call that was read as a whole. Raises Broken."""
        parameters = self.parameters(name)
        typed = {key: coerce(value, types_of(parameters, key)) for key, value in arguments.items()}
        try:
            text = json.dumps(typed, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as err:
            raise Broken from err
        self.begin_call(name, own_id).raw(without_surrogates(text))
        self.end_call()

    def another(self, behind: int = 0) -> None:
        """Another call of the same block begins here, `behind` characters back; what turns out to be none is
        text from there on."""
        self.feed.limit = UNNAMED_CHARS
        self.feed.mark = self.feed.at - behind
        self._resume = behind

    def _write_arguments(self) -> None:
        if self._writer is not None and (text := self._writer.take()):
            self._out.append(ToolCallArguments(self._index, text))
