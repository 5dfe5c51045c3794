"""The pieces that grammars are put together from, as the compiler's structural tags write them. Pure.

A marker that is a special token of this vocabulary is asked for as that token: its letters typed out of
ordinary tokens would be text to the machines that read the answer. What is a plain string to them is one here
too. Special tokens other than those that a grammar names are never allowed: markers are given bytes that are
no UTF-8 and hold `UNSAID` (`marker_bytes`), the others none. JSON and most else that the compiler knows are
UTF-8; its free text up to a closing string is bytes, so there `UNSAID` is excluded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mlxpool.shared.prompt.reasoning_families import (
    HARMONY,
    HARMONY_MESSAGE_END,
    HARMONY_OPENER,
    REASONING_FAMILIES,
)

Format = dict[str, Any]

# Blanks in a row between the parts of JSON: a line break and the indentation of most answers. Without a bound
# a small model writes blanks until its limit; a larger one costs compiling time and memory per place.
BLANKS_HIGH = 10

# In the bytes of every marker token, and in no text that a model writes.
UNSAID = "\x01\x02\x03"

# What templates put between reasoning and answer, and a little more.
_GAP = r"[ \n]{0,4}"


class Reasoning(msgspec.Struct, frozen=True):
    """The block that may come before the answer. starts_inside: the prompt has opened it. answer: what the
    answer itself begins with, where a family has a header for it."""

    opening: str
    closing: str
    starts_inside: bool = False
    answer: str = ""


def reasoning_of(family: str | None, starts_inside: bool) -> Reasoning | None:
    """The block as a reasoning family of the text machines writes it, None for a model without."""
    if family is None:
        return None
    if family == HARMONY:
        closing = "<|end|><|start|>assistant"
        return Reasoning(HARMONY_OPENER, closing, starts_inside, "<|channel|>final<|message|>")
    found = REASONING_FAMILIES[family]
    opening, closing = found.tags[0]
    return Reasoning(opening, closing, starts_inside, found.dropped[0] if found.dropped else "")


def closing_texts(family: str, in_grammar: bool) -> tuple[dict[str, str], str]:
    """By the closing tag of a block, the text that closes it as the templates of the family write it; and a
    text that may not come next, "" for none. in_grammar: a grammar says what follows."""
    if family == HARMONY:
        # The next message has a header of its own, which would make it one of reasoning again.
        following = "" if in_grammar else "<|channel|>"
        text = f"{HARMONY_MESSAGE_END}<|start|>assistant{following}"
        return {HARMONY_MESSAGE_END: text}, "" if in_grammar else "analysis"
    found = REASONING_FAMILIES[family]
    before, after = ("\n" * found.newlines[place] for place in (1, 2))
    return {closing: f"{before}{closing}{after}" for _, closing in found.tags}, ""


def constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def sequence(*parts: Format) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def either(*parts: Format) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def marker_bytes(text: str) -> bytes:
    """What a marker that is a special token adds to a text, as the compiler is told."""
    return b"\xff" + (UNSAID + text).encode()


def json_schema(schema: Any, style: str = "json") -> Format:
    """schema: as `schema.read` writes it, open objects said to be open; without lengths in other styles."""
    form = {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": BLANKS_HIGH}
    # The bare texts of the other styles are bytes, and the compiler excludes at the price of lengths.
    return form if style == "json" else {**form, "excludes": [UNSAID]}


def literal(text: str, markers: Mapping[str, int]) -> list[Format]:
    """`text`, with the markers in it as their tokens. markers: id of each special token that is one."""
    parts: list[Format] = []
    while text:
        found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker)) >= 0]
        if not found:
            parts.append(constant(text))
            break
        place, _, marker = min(found)
        if place:
            parts.append(constant(text[:place]))
        parts.append({"type": "token", "token": markers[marker]})
        text = text[place + len(marker) :]
    return parts


def _until(closing: list[Format]) -> list[Format]:
    """Any text that doesn't hold the closing marker, and the marker."""
    first, *rest = closing
    if first["type"] == "token":
        # Text can't hold a special token.
        return [{"type": "any_text"}, *closing]
    content = {"type": "any_text", "excludes": [UNSAID]}
    return [{"type": "tag", "begin": "", "content": content, "end": first["value"]}, *rest]


def after_reasoning(reasoning: Reasoning | None, answer: Format, markers: Mapping[str, int]) -> Format:
    """A whole answer: the reasoning block where there may be one, then `answer`."""
    if reasoning is None:
        return answer
    block = _until(literal(reasoning.closing, markers))
    if reasoning.starts_inside:
        return sequence(*block, regex(_GAP), answer)
    opened = sequence(*literal(reasoning.opening, markers), *block, regex(_GAP))
    return sequence({"type": "optional", "content": opened}, answer)


def repeated(part: Format, separator: list[Format], most: int) -> Format:
    """`part` once and up to `most` times, with the separator between."""
    if most == 1:
        return part
    more = {"type": "repeat", "min": 0, "max": most - 1, "content": sequence(*separator, part)}
    return sequence(part, more)
