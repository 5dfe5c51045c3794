"""Gemma's calls: call:NAME{key:VALUE,…}, strings between tokens that are nothing but quotes.

Like JSON with bare keys; the quotes are tokens of their own, so a string needs no escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mlxpool.worker.text.find import Finder
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.arguments import JsonWriter
from mlxpool.worker.text.tools.feed import Broken, Feed, Reading
from mlxpool.worker.text.tools.json_value import (
    KEY_CHARS,
    next_element,
    read_name,
    read_string,
    typed,
)
from mlxpool.worker.text.tools.machine import HEADER_CHARS, Reader, ToolMachine
from mlxpool.worker.text.tools.schema import types_of
from mlxpool.worker.text.tools.text_value import stream_text

_CALL = "call:"
# As in JSON: arguments nested deeper are no function's.
_DEPTH = 64
# Characters of a number or a bare word.
_WORD_CHARS = 512
# No bracket, and no marker: those are lone surrogates.
_WORD_RUN = re.compile(r"[^,\[\]{}\ud800-\udfff]+")


class GemmaReader:
    """quote: the marker around strings. closer: the marker behind the calls."""

    def __init__(self, quote: str, closer: str, marks: Marks) -> None:
        self._quote = marks.form(quote)
        self._closer = marks.form(closer)
        # Past the block's end no string goes on.
        self._string_end = Finder((self._quote, self._closer))
        self._key_end = Finder((self._quote,))

    def reader(self) -> Reader:
        return self._read

    def _read(self, machine: ToolMachine, _opener: str) -> Reading[None]:
        feed = machine.feed
        yield from feed.expect(_CALL)
        while True:
            name, _ = yield from feed.until(Finder(("{",)), HEADER_CHARS)
            feed.at -= 1
            parameters = machine.parameters(name.strip())
            writer = machine.begin_call(name.strip())
            yield from self._read_object(feed, writer, parameters, _DEPTH)
            machine.end_call()
            if not (yield from feed.take(_CALL, behind_blanks=True)):
                break
            machine.another(len(_CALL))
        yield from feed.take(self._closer, behind_blanks=True)

    def _read_object(
        self, feed: Feed, writer: JsonWriter, parameters: Mapping[str, Any], depth: int
    ) -> Reading[None]:
        if not depth:
            raise Broken
        feed.at += 1
        writer.open("{")
        while (char := (yield from next_element(feed))) != "}":
            marked = feed.hold()
            if (yield from feed.take(self._quote)):
                key, _ = yield from feed.until(self._key_end, KEY_CHARS)
                yield from feed.expect(":")
            elif char == '"':
                key = yield from read_name(feed)
                yield from feed.expect(":")
            else:
                key, _ = yield from feed.until(Finder((":",)), KEY_CHARS)
            feed.release(marked)
            writer.key(key.strip())
            yield from self._read_value(feed, writer, types_of(parameters, key.strip()), depth - 1)
        feed.at += 1
        writer.close()

    def _read_value(
        self, feed: Feed, writer: JsonWriter, types: tuple[str, ...], depth: int
    ) -> Reading[None]:
        char = yield from feed.solid()
        quoted = yield from feed.take(self._quote)

        def copy(into: JsonWriter) -> Reading[None]:
            if quoted or char == '"':
                into.begin_string()
                if quoted:
                    yield from self._read_string(feed, into)
                else:
                    yield from read_string(feed, into.piece)
                into.end_string()
            elif char == "{":
                yield from self._read_object(feed, into, {}, depth)
            elif char == "[":
                yield from self._read_array(feed, into, depth)
            else:
                word = yield from _read_word(feed)
                if _is_json(word):
                    into.raw(word)
                else:
                    into.value(word)

        kind = "string" if quoted or char == '"' else {"{": "object", "[": "array"}.get(char)
        yield from typed(feed, writer, types, kind, copy)

    def _read_string(self, feed: Feed, into: JsonWriter) -> Reading[None]:
        what = yield from stream_text(feed, self._string_end, into.piece)
        if what != self._quote:
            feed.at -= len(what)
            raise Broken

    def _read_array(self, feed: Feed, writer: JsonWriter, depth: int) -> Reading[None]:
        if not depth:
            raise Broken
        feed.at += 1
        writer.open("[")
        while (yield from next_element(feed)) != "]":
            yield from self._read_value(feed, writer, (), depth - 1)
        feed.at += 1
        writer.close()


def _read_word(feed: Feed) -> Reading[str]:
    """A number, a word of JSON, or bare text, which is a string."""
    size = 0
    while True:
        run = _WORD_RUN.match(feed.text, feed.at + size)
        size += len(run.group()) if run is not None else 0
        if size > _WORD_CHARS or (not size and feed.at < len(feed.text)):
            raise Broken
        if feed.at + size < len(feed.text) or not (yield from feed.more(size + 1)):
            break
    word = feed.text[feed.at : feed.at + size].strip()
    feed.at += size
    return word


def _is_json(word: str) -> bool:
    try:
        return not isinstance(json.loads(word, parse_constant=str), str)
    except ValueError:
        return False
