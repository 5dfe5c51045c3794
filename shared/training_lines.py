"""Training data: JSONL of conversations, of prompts with completions, or of plain texts.

Read line by line, and told apart line by line: a file may mix the three forms. What is wrong is said with
the line's number and a reason, never with what the line holds: data may be private, messages end up in logs.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from mlxpool.shared.files import open_regular
from mlxpool.shared.units import format_count, format_size

# Everything is held in memory while it is trained on, as text and as ids.
MAX_FILE_BYTES = 256_000_000
MAX_LINE_BYTES = 4_000_000
# How many bad lines an error lists; a file of another kind has nothing else.
NAMED_LINES = 5

_FORMS = '{"messages": [{"role", "content"}, …]}, {"prompt", "completion"} or {"text"}'
_LETTERS = (string.ascii_letters + " ").encode()
_WIDE = bytes(range(128, 256))
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class LinesError(Exception):
    """The file can't be used: one line for a person."""


class Example(msgspec.Struct, frozen=True):
    """One line. messages: a conversation; None where `text` is all there is. tools: declared in it. tokens:
    about how many its texts take, rather too many."""

    messages: list[dict[str, Any]] | None = None
    text: str = ""
    tools: list[Any] | None = None
    tokens: int = 0


class Survey(msgspec.Struct, frozen=True):
    """A file's lines, none of them held. conversations: how many of them are. tokens: of the longest, as
    `Example` has it."""

    lines: int
    conversations: int
    tokens: int


class _Line(msgspec.Struct):
    """Fields of a line; others (an id, a source) are nobody's business here."""

    messages: Any = None
    prompt: Any = None
    completion: Any = None
    text: Any = None
    tools: Any = None


_DECODER = msgspec.json.Decoder(_Line)


def read(path: Path, *, mask_prompt: bool = False) -> list[Example]:
    """Every line that is not blank. mask_prompt: each must have an answer to be trained on.

    Raises LinesError, which names the first NAMED_LINES bad lines.
    """
    return list(_examples(path, mask_prompt))


def survey(path: Path, *, mask_prompt: bool = False) -> Survey:
    """What `read` would give, or raise. A server asks so: the lines themselves may take a gigabyte."""
    lines = conversations = tokens = 0
    for one in _examples(path, mask_prompt):
        lines += 1
        conversations += one.messages is not None
        tokens = max(tokens, one.tokens)
    return Survey(lines, conversations, tokens)


def _examples(path: Path, mask_prompt: bool) -> Iterator[Example]:
    """Raises LinesError, where lines are bad behind the last one."""
    bad: list[str] = []
    found = found_bad = 0
    try:
        with open_regular(path) as file:
            for number, raw in _lines(file):
                try:
                    one = example(raw, mask_prompt=mask_prompt)
                except LinesError as problem:
                    found_bad += 1
                    if found_bad <= NAMED_LINES:
                        bad.append(f"line {number} {problem}")
                    continue
                found += 1
                yield one
    except OSError as problem:
        raise LinesError(f"{path.name} can't be read: {problem.strerror}") from None
    if bad:
        more = f"; and {format_count(found_bad - len(bad), 'more line')}" if found_bad > len(bad) else ""
        raise LinesError(f"{path.name}: {'; '.join(bad)}{more}. A line is {_FORMS}")
    if not found:
        raise LinesError(f"{path.name} has no lines; a line is {_FORMS}")


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank, within the limits."""
    total, number = 0, 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        total += len(raw)
        if len(raw) > MAX_LINE_BYTES:
            raise LinesError(f"line {number} is longer than {format_size(MAX_LINE_BYTES)}; split it up")
        if total > MAX_FILE_BYTES:
            raise LinesError(f"the file is larger than {format_size(MAX_FILE_BYTES)}; split it up")
        if raw.strip():
            yield number, raw


def example(raw: bytes, *, mask_prompt: bool = False) -> Example:
    """What one line says. Raises LinesError with what completes "line 7 …"."""
    try:
        line = _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise LinesError("is no JSON object") from None
    tools = line.tools if isinstance(line.tools, list) else None
    if line.prompt is not None or line.completion is not None:
        turns = [
            {"role": "user", "content": _text(line.prompt, "prompt")},
            {"role": "assistant", "content": _text(line.completion, "completion")},
        ]
        return Example(messages=turns, tools=tools, tokens=_tokens_of(turns, tools))
    if line.messages is not None:
        turns = _messages(line.messages)
        if mask_prompt and (turns[-1]["role"] != "assistant" or len(turns) < 2):
            raise LinesError("does not end with an assistant's message, which `mask_prompt` trains on")
        return Example(messages=turns, tools=tools, tokens=_tokens_of(turns, tools))
    text = _text(line.text, "text")
    if mask_prompt:
        raise LinesError("is a plain text, which has no prompt to mask; switch `mask_prompt` off")
    return Example(text=text, tokens=likely_tokens(text.encode()))


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise LinesError("has no list of messages")
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not _is_role(message.get("role")):
            raise LinesError(f"has a message without a role that is known (the {place + 1}.)")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            message["content"] = ""
        elif not isinstance(content, str):
            raise LinesError(f"has a message whose content is no text (the {place + 1}.)")
        if message["role"] == "developer":
            message["role"] = "system"
    return value


def _is_role(value: Any) -> bool:
    return isinstance(value, str) and value in _ROLES


def _text(value: Any, field: str) -> str:
    if value is None:
        raise LinesError(f"has no {field}")
    if not isinstance(value, str) or not value:
        raise LinesError(f"has a {field} that is no text, or is empty")
    return value


def _tokens_of(messages: list[dict[str, Any]], tools: list[Any] | None) -> int:
    count = 0 if tools is None else likely_tokens(msgspec.json.encode(tools))
    for message in messages:
        count += likely_tokens(message["content"].encode())
        others = {key: value for key, value in message.items() if key not in ("role", "content")}
        count += likely_tokens(msgspec.json.encode(others)) if others else 0
    return count


def likely_tokens(text: bytes) -> int:
    """About how many tokens a text in UTF-8 takes, rather too many: three letters or spaces each, two bytes
    of what is beyond ASCII, and one each for digits and the rest. Vocabularies take 4 letters of English and
    3 of other languages, and a byte is never more than a token."""
    others = text.translate(None, _LETTERS)
    narrow = others.translate(None, _WIDE)
    return (len(text) - len(others)) // 3 + (len(others) - len(narrow)) // 2 + len(narrow) + 1


def valid_count(lines: int, fraction: float) -> int:
    """How many of so many lines are held back for validation: at least one."""
    return max(1, round(lines * fraction))
