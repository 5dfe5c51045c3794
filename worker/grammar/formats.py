"""The pieces that grammars are put together from, as the compiler's structural tags write them. Pure.

A marker that is a special token of this vocabulary is asked for as that token: its letters typed out of
ordinary tokens would be text to the machines that read the answer. What is a plain string to them is one here
too. Special tokens other than those that a grammar names are never allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Format = dict[str, Any]

# Blanks in a row between the parts of JSON: a line break and the indentation of nine levels. Without a bound
# a small model writes blanks until its limit.
BLANKS_HIGH = 20

# What templates put between reasoning and answer, and a little more.
_GAP = r"[ \n]{0,4}"


class Reasoning(msgspec.Struct, frozen=True):
    """The block that may come before the answer. starts_inside: the prompt has opened it. answer: what the
    answer itself begins with, where a family has a header for it."""

    opening: str
    closing: str
    starts_inside: bool = False
    answer: str = ""


def constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def sequence(*parts: Format) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def either(*parts: Format) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def json_schema(schema: Any, style: str = "json") -> Format:
    """schema: as `schema.read` writes it, open objects said to be open."""
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": BLANKS_HIGH}


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
    return [{"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": first["value"]}, *rest]


def after_reasoning(reasoning: Reasoning | None, answer: Format, markers: Mapping[str, int]) -> Format:
    """A whole answer: the reasoning block where there may be one, then `answer`."""
    if reasoning is None:
        return answer
    block = _until(literal(reasoning.closing, markers))
    if reasoning.starts_inside:
        return sequence(*block, regex(_GAP), answer)
    opened = sequence(*literal(reasoning.opening, markers), *block, regex(_GAP))
    return sequence({"type": "optional", "content": opened}, answer)


def repeated(part: Format, separator: list[Format], *, once: bool) -> Format:
    """`part` once, or once and more with the separator between."""
    if once:
        return part
    return sequence(part, {"type": "star", "content": sequence(*separator, part)})
