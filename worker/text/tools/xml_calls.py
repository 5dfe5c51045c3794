"""Calls written as tags with the names inside: <function=NAME><parameter=KEY>VALUE</parameter></function>.

The dialects differ in the tags' letters, in what is around them and in who quotes names; a `Dialect` says
so. The first closing tag ends a value: nothing in these formats escapes one.
"""

from __future__ import annotations

import re

import msgspec

from mlxpool.worker.text.find import Finder
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.feed import Broken, Feed, Reading
from mlxpool.worker.text.tools.json_value import KEY_CHARS
from mlxpool.worker.text.tools.machine import HEADER_CHARS, Reader, ToolMachine
from mlxpool.worker.text.tools.schema import texts_of, types_of
from mlxpool.worker.text.tools.text_value import read_text_value

_NAME_ATTRIBUTE = re.compile(r'\bname="([^"]*)"')
_TAG_END = Finder((">",))
_CDATA, _CDATA_END = "<![CDATA[", Finder(("]]>",))


class Dialect(msgspec.Struct, frozen=True):
    """outer: tags around all calls of a block, None for none. function, parameter: what stands before the
    name, and the closing tag. attributes: the name is one of the tag's attributes. newlines: the template
    writes one after a parameter's tag and one before its closing tag. cdata: values may be CDATA sections.
    guess: a value whose type is not declared is JSON where it can be."""

    outer: tuple[str, str] | None
    function: tuple[str, str]
    parameter: tuple[str, str]
    attributes: bool = False
    newlines: bool = False
    cdata: bool = False
    guess: bool = False


class XmlReader:
    """Reads the calls of one dialect; keeps nothing between calls."""

    def __init__(self, dialect: Dialect, marks: Marks) -> None:
        self._dialect = dialect
        self._closer = marks.form(dialect.outer[1]) if dialect.outer is not None else ""
        self._function, self._function_end = (marks.form(tag) for tag in dialect.function)
        self._parameter, self._parameter_end = (marks.form(tag) for tag in dialect.parameter)
        self._value_end = Finder((self._parameter_end,))

    def reader(self) -> Reader:
        return self._read

    def _read(self, machine: ToolMachine, opener: str) -> Reading[None]:
        feed = machine.feed
        if opener != self._function:
            yield from feed.expect(self._function)
        while True:
            closed = yield from self._read_call(machine)
            if closed or not self._closer:
                return
            if not (yield from feed.take(self._function, behind_blanks=True)):
                break
            machine.another(len(self._function))
        yield from feed.take(self._closer, behind_blanks=True)

    def _read_call(self, machine: ToolMachine) -> Reading[bool]:
        """Behind a function's opening tag; says whether the block's closing tag was read too."""
        feed = machine.feed
        name = yield from self._read_name(feed, HEADER_CHARS)
        parameters = machine.parameters(name)
        writer = machine.begin_call(name)
        writer.open("{")
        closed = False
        while True:
            yield from feed.solid()
            marked = feed.hold()
            if (yield from feed.take(self._parameter)):
                key = yield from self._read_name(feed, KEY_CHARS)
                feed.release(marked)
                writer.key(key)
                yield from self._read_value(machine, types_of(parameters, key), texts_of(parameters, key))
                continue
            if (yield from feed.take(self._function_end)):
                break
            # The function's own closing tag is what models forget first.
            if self._closer and (yield from feed.take(self._closer)):
                closed = True
                break
            raise Broken
        feed.release(marked)
        writer.close()
        machine.end_call()
        return closed

    def _read_value(
        self, machine: ToolMachine, types: tuple[str, ...], texts: frozenset[str]
    ) -> Reading[None]:
        feed, writer, guess = machine.feed, machine.arguments, self._dialect.guess
        if self._dialect.cdata and (yield from feed.take(_CDATA)):
            yield from read_text_value(feed, writer, types, _CDATA_END, guess=guess, texts=texts)
            yield from feed.expect(self._parameter_end)
        else:
            newlines = self._dialect.newlines
            yield from read_text_value(feed, writer, types, self._value_end, newlines, guess, texts)

    def _read_name(self, feed: Feed, limit: int) -> Reading[str]:
        """A name up to the tag's end, out of its quotes."""
        text, _ = yield from feed.until(_TAG_END, limit)
        if self._dialect.attributes:
            named = _NAME_ATTRIBUTE.search(text)
            return named[1] if named is not None else ""
        name = text.strip()
        if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
            name = name[1:-1]
        return name
