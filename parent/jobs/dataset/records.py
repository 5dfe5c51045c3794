"""What a dataset is made from: passages of a text, or the lines of a JSONL file.

A text is cut between paragraphs, so that a passage is about one thing; paragraphs are put together while
there is room, and one that is longer than a passage is cut between sentences, words, or anywhere at last.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from mlxpool.shared.files import open_regular
from mlxpool.shared.text import cut
from mlxpool.shared.units import format_size

from .templates import TEXT

JSONL_SUFFIXES = (".jsonl", ".ndjson")
# Held in memory while it is asked about.
MAX_FILE_BYTES = 64_000_000
# A page: some 500 tokens, which every model's context holds with its question.
PASSAGE_CHARS = 2_000
# Lines at fault that an error lists.
_NAMED_LINES = 3

_PARAGRAPHS = re.compile(r"\n[ \t\r]*\n\s*")
_ENDS = (re.compile(r"[.!?…。！？][\"'”’)]*\s+"), re.compile(r"\s+"))

Record = dict[str, str]


class RecordsError(Exception):
    """The file can't be used: one line for a person."""


def read(path: Path, fields: Collection[str]) -> list[Record]:
    """Every record of the file, with each of `fields`. Raises RecordsError."""
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise RecordsError(f"{path.name} can't be read: {problem.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise RecordsError(f"{path.name} is larger than {format_size(MAX_FILE_BYTES)}; cut it into several")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise RecordsError(f"{path.name} is no UTF-8 text, from byte {problem.start} on") from None
    if path.suffix.lower() in JSONL_SUFFIXES:
        records = list(_lines(path.name, text, fields))
    else:
        unknown = sorted(set(fields) - {TEXT})
        if unknown:
            wanted = ", ".join(f"{{{field}}}" for field in unknown)
            raise RecordsError(
                f"{path.name} is a text, which has {{{TEXT}}} alone, and the prompt wants {wanted}"
            )
        records = [{TEXT: passage} for passage in passages(text)]
    if not records:
        raise RecordsError(f"{path.name} is empty")
    return records


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
    while len(paragraph) > most_chars:
        at = most_chars
        for ends in _ENDS:
            borders = [match.end() for match in ends.finditer(paragraph, 0, most_chars + 1)]
            if borders:
                at = min(borders[-1], most_chars)
                break
        yield paragraph[:at].strip()
        paragraph = paragraph[at:].strip()
    if paragraph:
        yield paragraph


def _lines(name: str, text: str, fields: Collection[str]) -> Iterator[Record]:
    bad: list[str] = []
    found_bad = 0
    for number, raw in enumerate(text.split("\n"), 1):
        if not raw.strip():
            continue
        record, fault = _record(raw, fields)
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
