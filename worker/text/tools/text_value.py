"""Arguments written as bare text between tags, typed by the declared schema.

A string streams. Anything else is kept until its closing tag and read as the type that was declared; where
that is too far away, it is a string after all.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.worker.text.find import Finder
from mlxpool.worker.text.tools.arguments import JsonWriter
from mlxpool.worker.text.tools.feed import Broken, Ended, Feed, Reading
from mlxpool.worker.text.tools.json_value import Types
from mlxpool.worker.text.tools.schema import ANY_BUT_TEXT, from_text


def stream_text(
    feed: Feed, closers: Finder, give: Callable[[str], None], newlines: bool = False
) -> Reading[str]:
    """Text up to the first of `closers`, in pieces; says which one it was, and reads it. newlines: one after
    the start and one before the closer are the template's."""
    if newlines and (yield from feed.peek()) == "\n":
        feed.at += 1
    while True:
        found = closers.find(feed.text, feed.at)
        end = len(feed.text) - closers.tail(feed.text, feed.at) if found is None else found.start
        kept = end - 1 if newlines and end > feed.at and feed.text[end - 1] == "\n" else end
        give(feed.text[feed.at : kept])
        feed.at = kept
        if found is not None:
            feed.at = end + len(found.what)
            return found.what
        if feed.ended:
            raise Ended
        yield


def read_text_value(
    feed: Feed,
    writer: JsonWriter,
    types: Types,
    closers: Finder,
    newlines: bool = False,
    guess: bool = False,
    texts: frozenset[str] = frozenset(),
) -> Reading[str]:
    """A value up to one of `closers`, which is read too and returned. guess: without a declared type the text
    is whatever JSON it is; else it is a string. texts: those that the schema lists, none for any."""
    if not types and guess:
        types = (*ANY_BUT_TEXT, "string")
    if texts or types not in {(), ("string",)}:
        marked = feed.hold()
        try:
            text, closer = yield from feed.until(closers, feed.limit)
        except Broken:
            feed.release(marked)
        except Ended:
            # A value whose tag the model left out; without a word of it there is none.
            if feed.finished and feed.rest(closers).strip():
                writer.value(from_text(feed.rest(closers).strip(), types, texts))
            raise
        else:
            if newlines:
                text = text.removeprefix("\n").removesuffix("\n")
            writer.value(from_text(text, types, texts))
            feed.release(marked)
            return closer
    writer.begin_string()
    closer = yield from stream_text(feed, closers, writer.piece, newlines)
    writer.end_string()
    return closer
