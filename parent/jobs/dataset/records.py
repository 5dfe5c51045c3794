"""What a dataset is made from: passages of a text, or the lines of a JSONL file.

A text is cut between paragraphs, so that a passage is about one thing; paragraphs are put together while
there is room, and one that is longer than a passage is cut between sentences, words, or anywhere at last.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from mlxpool.shared.files import open_regular
from mlxpool.shared.text import cut
from mlxpool.shared.units import format_size

from .templates import TEXT

JSONL_SUFFIXES = (".jsonl", ".ndjson")
# Held in memory while it is asked about.
MAX_FILE_BYTES = 64_000_000
MAX_LINE_BYTES = 4_000_000
_PIECE_BYTES = 1 << 20
# A page: some 500 tokens, which every model's context holds with its question.
PASSAGE_CHARS = 2_000
# Lines at fault that an error lists.
_NAMED_LINES = 3

_PARAGRAPHS = re.compile(r"\n[ \t\r]*\n\s*")
_ENDS = (re.compile(r"[.!?…。！？][\"'”’)]*\s+"), re.compile(r"\s+"))
_NO_SPACE = re.compile(r"\S")
_BOM = "\ufeff"

Record = dict[str, str]


class RecordsError(Exception):
    """The file can't be used: one line for a person."""


def read(path: Path, fields: Collection[str]) -> list[Record]:
    """Every record of the file, with each of `fields`. Raises RecordsError."""
    with _opened(path) as file:
        if _is_lines(path):
            found = list(_lines(path.name, file, fields))
        else:
            _check_places(path.name, fields)
            found = [{TEXT: passage} for passage in passages("".join(_decoded(path.name, file)))]
    if not found:
        raise RecordsError(f"{path.name} is empty")
    return found


def check(path: Path, fields: Collection[str]) -> None:
    """Whether `read` gives records, without holding them: a server looks at files while it serves, so no one
    step may take long. Raises RecordsError."""
    with _opened(path) as file:
        if _is_lines(path):
            found = sum(1 for _ in _lines(path.name, file, fields))
        else:
            _check_places(path.name, fields)
            found = sum(1 for piece in _decoded(path.name, file) if piece and not piece.isspace())
    if not found:
        raise RecordsError(f"{path.name} is empty")


def _is_lines(path: Path) -> bool:
    return path.suffix.lower() in JSONL_SUFFIXES


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                most = format_size(MAX_FILE_BYTES)
                raise RecordsError(f"{path.name} is larger than {most}; cut it into several")
            yield file
    except OSError as problem:
        raise RecordsError(f"{path.name} can't be read: {problem.strerror}") from None


def _check_places(name: str, fields: Collection[str]) -> None:
    unknown = sorted(set(fields) - {TEXT})
    if unknown:
        wanted = ", ".join(f"{{{field}}}" for field in unknown)
        raise RecordsError(f"{name} is a text, which has {{{TEXT}}} alone, and the prompt wants {wanted}")


def _decoded(name: str, file: BinaryIO) -> Iterator[str]:
    """A text in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begin, is_first = 0, True
    while True:
        raw = file.read(_PIECE_BYTES)
        held = len(decoder.getstate()[0])
        try:
            piece = decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as problem:
            raise _no_text(name, begin - held + problem.start) from None
        yield piece.removeprefix(_BOM) if is_first else piece
        if not raw:
            return
        begin, is_first = begin + len(raw), is_first and not piece


def _no_text(name: str, place: int) -> RecordsError:
    return RecordsError(f"{name} is no UTF-8 text, from byte {place} on")


def passages(text: str, most_chars: int = PASSAGE_CHARS) -> list[str]:
    """The text cut on paragraph borders into pieces of at most `most_chars`."""
    found: list[str] = []
    held = ""
    for paragraph in _PARAGRAPHS.split(text.replace("\r\n", "\n")):
        for piece in _pieces(paragraph.strip(), most_chars):
            joined = f"{held}\n\n{piece}" if held else piece
            if len(joined) <= most_chars:
                held = joined
            else:
                found.append(held)
                held = piece
    return [passage for passage in [*found, held] if passage]


def _pieces(paragraph: str, most_chars: int) -> Iterator[str]:
    begin = 0
    while len(paragraph) - begin > most_chars:
        limit = at = begin + most_chars
        for ends in _ENDS:
            borders = [match.end() for match in ends.finditer(paragraph, begin, limit + 1)]
            if borders:
                at = min(borders[-1], limit)
                break
        yield paragraph[begin:at].strip()
        # What is left is never copied: of one endless paragraph that would be all of it, piece after piece.
        following = _NO_SPACE.search(paragraph, at)
        begin = len(paragraph) if following is None else following.start()
    if begin < len(paragraph):
        yield paragraph[begin:]


def _lines(name: str, file: BinaryIO, fields: Collection[str]) -> Iterator[Record]:
    bad: list[str] = []
    found_bad = number = begin = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise RecordsError(f"{name}: line {number} is longer than {format_size(MAX_LINE_BYTES)}")
        try:
            text = raw.decode()
        except UnicodeDecodeError as problem:
            raise _no_text(name, begin + problem.start) from None
        begin += len(raw)
        if number == 1:
            text = text.removeprefix(_BOM)
        if not text.strip():
            continue
        record, fault = _record(text, fields)
        if fault:
            found_bad += 1
            if found_bad <= _NAMED_LINES:
                bad.append(f"line {number} {fault}")
        else:
            yield record
    if bad:
        more = f"; and {found_bad - len(bad)} more" if found_bad > len(bad) else ""
        raise RecordsError(f"{name}: {'; '.join(bad)}{more}")


def _record(raw: str, fields: Collection[str]) -> tuple[Record, str]:
    """A line's fields as text, or what is wrong with it."""
    try:
        values = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return {}, "is no JSON"
    if not isinstance(values, dict):
        return {}, "is no JSON object"
    record: Record = {}
    for field in fields:
        value = values.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            known = ", ".join(list(values)[:5])
            return {}, f"has no text {field!r} (it has {cut(known) or 'nothing'})"
        record[field] = value
    return record, ""
