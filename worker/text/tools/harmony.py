"""gpt-oss's format: an answer is a series of messages, each with a channel and, for a call, a recipient.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

Reasoning, answer and calls come out of one reader, because the headers decide all three: `analysis` is
reasoning, a message to a declared function is a call, everything else is answer. A header that can't be
understood and a message to anybody else are text. Text before any header, which a grammar may have forced,
is answer too. Its last marker (`<|return|>`, `<|call|>`) is an eos and mostly never arrives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

from mlxpool.worker.text.events import Reasoning
from mlxpool.worker.text.find import Finder
from mlxpool.worker.text.format import DeclaredTool
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.feed import Broken, Ended, Reading
from mlxpool.worker.text.tools.json_value import read_object
from mlxpool.worker.text.tools.machine import HEADER_CHARS, ToolMachine

TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

_RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
# A header may begin with the recipient, the role being in the prompt already.
_BARE_RECIPIENT = "to="


class HarmonyMachine(ToolMachine):
    """starts_inside: the prompt has opened the reasoning."""

    def __init__(
        self,
        declared: Sequence[DeclaredTool],
        marks: Marks,
        new_id: Callable[[], str],
        starts_inside: bool = False,
    ) -> None:
        self._starts_inside = starts_inside
        # Whether a message of reasoning is open.
        self.thinks = starts_inside
        start, channel, message, _, end, call, finish = (marks.form(token) for token in TOKENS)
        self._headers = (start, channel)
        self._message = Finder((message,))
        self._body_end = Finder((start, channel, end, call, finish))
        super().__init__(
            (start, channel), lambda _machine, _opener: self._read_message(), declared, marks, new_id
        )

    def _read(self) -> Generator[None, None, None]:
        try:
            if self._starts_inside:
                yield from self._read_body(self._reason)
            else:
                yield from self._attempt(self._read_beginning())
            while True:
                opener = yield from self._read_prose()
                self._resume = len(opener)
                yield from self._attempt(self._read_message())
        except Ended:
            self._finish()

    def _read_beginning(self) -> Reading[None]:
        feed = self.feed
        feed.hold()
        yield from feed.solid()
        if not (yield from feed.take(_BARE_RECIPIENT)):
            raise Broken
        yield from self._read_message()

    def _read_message(self) -> Reading[None]:
        """Behind the header's first characters, which are marked."""
        feed = self.feed
        yield from feed.until(self._message, HEADER_CHARS)
        assert feed.mark is not None
        header = self.marks.spelled(feed.text[feed.mark : feed.at])
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._resume = feed.at - feed.mark
            yield from self._read_call(recipient[1])
        else:
            feed.mark = None
            self._failed = False
            thought = channel is not None and channel[1] == "analysis"
            yield from self._read_body(self._reason if thought else self._say)

    def _read_call(self, recipient: str) -> Reading[None]:
        feed = self.feed
        if not recipient.startswith("functions."):
            raise Broken
        name = recipient.removeprefix("functions.")
        parameters = self.parameters(name)
        if (yield from feed.solid()) != "{":
            raise Broken
        writer = self.begin_call(name)
        yield from read_object(feed, writer, parameters)
        self.end_call()
        for token in self._body_end.strings:
            if token not in self._headers and (yield from feed.take(token, behind_blanks=True)):
                return

    def _read_body(self, give: Callable[[str], None]) -> Reading[None]:
        """A message's text up to its end; a header that follows without one is left unread."""
        feed = self.feed
        self.thinks = give == self._reason
        while True:
            found = self._body_end.find(feed.text, feed.at)
            tail = 0 if feed.ended else self._body_end.tail(feed.text, feed.at)
            end = len(feed.text) - tail if found is None else found.start
            give(self.marks.plain(feed.text[feed.at : end]))
            feed.at = end
            if found is not None:
                self.thinks = False
                if found.what not in self._headers:
                    feed.at += len(found.what)
                return
            if feed.ended:
                raise Ended
            yield

    def _reason(self, text: str) -> None:
        if text:
            self._out.append(Reasoning(text))
