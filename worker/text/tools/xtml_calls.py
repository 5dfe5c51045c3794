"""Kimi K3's calls: sections opened and closed by tokens, with attributes between them.

    <|open|>call tool="NAME" index="1"<|sep|>
        <|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>
    <|close|>call<|sep|>

or one `json` section with the whole object in the place of the arguments.
"""

from __future__ import annotations

import re

from mlxpool.worker.text.find import Finder
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.feed import Broken, Feed, Reading
from mlxpool.worker.text.tools.json_value import KEY_CHARS, read_object
from mlxpool.worker.text.tools.machine import HEADER_CHARS, Reader, ToolMachine
from mlxpool.worker.text.tools.schema import texts_of, types_of
from mlxpool.worker.text.tools.text_value import read_text_value

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class XtmlReader:
    """Reads a tools section; keeps nothing between calls."""

    def __init__(self, marks: Marks) -> None:
        opened, closed, sep = (marks.form(token) for token in ("<|open|>", "<|close|>", "<|sep|>"))
        self._call, self._call_end = f"{opened}call", f"{closed}call{sep}"
        self._argument, self._argument_end = f"{opened}argument", Finder((f"{closed}argument{sep}",))
        self._json, self._json_end = f"{opened}json", f"{closed}json{sep}"
        self._section_end = f"{closed}tools{sep}"
        self._sep = Finder((sep,))

    def reader(self) -> Reader:
        return self._read

    def _read(self, machine: ToolMachine, _opener: str) -> Reading[None]:
        feed = machine.feed
        yield from feed.expect(self._call)
        while True:
            yield from self._read_call(machine)
            if not (yield from feed.take(self._call, behind_blanks=True)):
                break
            machine.another(len(self._call))
        yield from feed.take(self._section_end, behind_blanks=True)

    def _read_call(self, machine: ToolMachine) -> Reading[None]:
        feed = machine.feed
        name = (yield from self._attributes(feed, HEADER_CHARS)).get("tool", "")
        parameters = machine.parameters(name)
        if (yield from feed.take(self._json, behind_blanks=True)):
            yield from self._attributes(feed, HEADER_CHARS)
            if (yield from feed.solid()) != "{":
                raise Broken
            yield from read_object(feed, machine.begin_call(name), parameters)
            machine.end_call()
            yield from feed.take(self._json_end, behind_blanks=True)
            yield from feed.take(self._call_end, behind_blanks=True)
            return
        writer = machine.begin_call(name)
        writer.open("{")
        while not (yield from feed.take(self._call_end, behind_blanks=True)):
            marked = feed.hold()
            yield from feed.expect(self._argument)
            given = yield from self._attributes(feed, KEY_CHARS)
            if "key" not in given:
                raise Broken
            feed.release(marked)
            writer.key(given["key"])
            types = types_of(parameters, given["key"])
            if not types and given.get("type", "string") == "string":
                types = ("string",)
            texts = texts_of(parameters, given["key"])
            yield from read_text_value(feed, writer, types, self._argument_end, guess=True, texts=texts)
        writer.close()
        machine.end_call()

    def _attributes(self, feed: Feed, limit: int) -> Reading[dict[str, str]]:
        """What stands in an opening tag behind its word; the tag is read."""
        text, _ = yield from feed.until(self._sep, limit)
        return {
            name: value.replace("&quot;", '"').replace("&amp;", "&")
            for name, value in _ATTRIBUTE.findall(text)
        }
