"""Read JSON as it comes and write it again as it comes.

Strings stream; numbers and words are written once they are complete; containers stream element by element.
What models get wrong without leaving doubt is read as meant: raw newlines in strings, escapes that JSON does
not know, a comma too many or too few, Python's words for true, false and null. Everything else raises Broken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mlxpool.worker.text.tools.arguments import JsonWriter
from mlxpool.worker.text.tools.feed import Broken, Ended, Feed, Reading
from mlxpool.worker.text.tools.schema import coerce, types_of

# Arguments nested deeper are no function's; a reader's own stack grows with them.
_DEPTH = 64
# Characters of a number or a word; the longest number that Python reads has 4,300 digits.
_SCALAR_CHARS = 512
# Characters of a key.
KEY_CHARS = 1024

_RUN = re.compile(r'[^"\\]+')
_SCALAR_RUN = re.compile(r'[^\s,:\[\]{}"]+')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS = {"{": "object", "[": "array"}

Types = tuple[str, ...]


def read_string(feed: Feed, give: Callable[[str], None]) -> Reading[None]:
    """At a quote: the string's text in pieces."""
    feed.at += 1
    while True:
        run = _RUN.match(feed.text, feed.at)
        if run is not None:
            feed.at = run.end()
            give(run.group())
        char = yield from feed.peek()
        if char == '"':
            feed.at += 1
            return
        if char == "\\":
            give((yield from _read_escape(feed)))


def _read_escape(feed: Feed) -> Reading[str]:
    yield from feed.need(2)
    char = feed.text[feed.at + 1]
    if char != "u":
        feed.at += 2
        # An escape that JSON does not have (a pattern's \d, say): both characters are meant.
        return _ESCAPES.get(char, f"\\{char}")
    code = yield from _read_code_unit(feed, 0)
    if 0xD800 <= code < 0xDC00:
        yield from feed.need(7)
        if feed.text[feed.at + 6] == "\\":
            yield from feed.need(8)
            if feed.text[feed.at + 7] == "u":
                low = yield from _read_code_unit(feed, 6)
                if 0xDC00 <= low < 0xE000:
                    feed.at += 12
                    return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
    feed.at += 6
    return "\N{REPLACEMENT CHARACTER}" if 0xD800 <= code < 0xE000 else chr(code)


def _read_code_unit(feed: Feed, offset: int) -> Reading[int]:
    """The four digits of the \\u that begins `offset` characters on; unread."""
    yield from feed.need(offset + 6)
    digits = feed.text[feed.at + offset + 2 : feed.at + offset + 6]
    if not re.fullmatch("[0-9a-fA-F]{4}", digits):
        raise Broken
    return int(digits, 16)


def read_name(feed: Feed, limit: int = KEY_CHARS) -> Reading[str]:
    """At a quote: a whole string of at most `limit` characters."""
    parts: list[str] = []
    left = limit

    def give(part: str) -> None:
        nonlocal left
        left -= len(part)
        if left < 0:
            raise Broken
        parts.append(part)

    yield from read_string(feed, give)
    return "".join(parts)


def read_scalar(feed: Feed) -> Reading[str]:
    """A number or a word, as JSON; complete once something else follows, or once the model has ended."""
    size = 0
    while True:
        run = _SCALAR_RUN.match(feed.text, feed.at + size)
        size += len(run.group()) if run is not None else 0
        if size > _SCALAR_CHARS:
            raise Broken
        if feed.at + size < len(feed.text) or not (yield from feed.more(size + 1)):
            break
    word = feed.text[feed.at : feed.at + size]
    word = _WORDS.get(word, word)
    try:
        json.loads(word, parse_constant=_refuse)
    except ValueError:
        if feed.at + size == len(feed.text):
            raise Ended from None
        raise Broken from None
    feed.at += size
    return word


def _refuse(word: str) -> None:
    raise ValueError(word)


def read_value(feed: Feed, writer: JsonWriter, types: Types = (), depth: int = _DEPTH) -> Reading[None]:
    """The next value, brought to the first of `types` that fits it."""
    char = yield from feed.solid()
    kind = "string" if char == '"' else _KINDS.get(char)
    yield from typed(feed, writer, types, kind, lambda into: _copy(feed, into, char, depth))


def typed(
    feed: Feed,
    writer: JsonWriter,
    types: Types,
    kind: str | None,
    copy: Callable[[JsonWriter], Reading[None]],
) -> Reading[None]:
    """Copy a value of `kind` (None for a number or a word) as one of `types`. One that has to be seen whole
    for that is kept by the feed's mark while it is read."""
    if not types or kind in types:
        yield from copy(writer)
        return
    marked = feed.hold()
    whole = writer.twin()
    try:
        yield from copy(whole)
    except Ended:
        whole.repair()
        if feed.finished and (text := whole.take()):
            _write_as(writer, text, types)
        raise
    _write_as(writer, whole.take(), types)
    feed.release(marked)


def _write_as(writer: JsonWriter, text: str, types: Types) -> None:
    value = json.loads(text)
    fitting = coerce(value, types)
    if fitting is value:
        writer.raw(text)
    else:
        writer.value(fitting)


def _copy(feed: Feed, writer: JsonWriter, char: str, depth: int) -> Reading[None]:
    if char == '"':
        writer.begin_string()
        yield from read_string(feed, writer.piece)
        writer.end_string()
    elif char == "{":
        yield from read_object(feed, writer, {}, depth)
    elif char == "[":
        yield from _read_array(feed, writer, depth)
    else:
        writer.raw((yield from read_scalar(feed)))


def read_object(
    feed: Feed, writer: JsonWriter, parameters: Mapping[str, Any], depth: int = _DEPTH
) -> Reading[None]:
    """At a brace: the object, its values of the types that the JSON schema `parameters` declares."""
    if not depth:
        raise Broken
    feed.at += 1
    writer.open("{")
    while (char := (yield from next_element(feed))) != "}":
        if char != '"':
            raise Broken
        marked = feed.hold()
        key = yield from read_name(feed)
        yield from feed.expect(":")
        feed.release(marked)
        writer.key(key)
        yield from read_value(feed, writer, types_of(parameters, key), depth - 1)
    feed.at += 1
    writer.close()


def _read_array(feed: Feed, writer: JsonWriter, depth: int) -> Reading[None]:
    if not depth:
        raise Broken
    feed.at += 1
    writer.open("[")
    while (yield from next_element(feed)) != "]":
        yield from read_value(feed, writer, (), depth - 1)
    feed.at += 1
    writer.close()


def next_element(feed: Feed) -> Reading[str]:
    """The first character of the next element, or the closing bracket; a comma before it is read."""
    char = yield from feed.solid()
    if char == ",":
        feed.at += 1
        char = yield from feed.solid()
    if char == ",":
        raise Broken
    return char
