"""The table of tool-call families: the markers, the reader, and what shows that a model is of the family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mlxpool.worker.text.format import DeclaredTool
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.feed import Reading
from mlxpool.worker.text.tools.json_calls import read_json_calls
from mlxpool.worker.text.tools.machine import Reader, ToolMachine

# One of mlx-lm's parsers: a block's text and the tools in, one call or a list of calls out; raises anything.
Parse = Callable[[str, list[dict[str, Any]]], Any]


class ToolFamily(msgspec.Struct, frozen=True):
    """name: mlx-lm's where it has one. openers: what begins a call. tokens: what may be a special token in
    the markers. reader: makes the reader for a vocabulary. streams: whether arguments are sent as they come.
    needs_parser: whether mlx-lm's parser of that name has to be handed in. bare: calls may begin the answer
    without an opener."""

    name: str
    openers: tuple[str, ...]
    reader: Callable[[Marks, Parse | None], Reader]
    tokens: tuple[str, ...] = ()
    streams: bool = True
    needs_parser: bool = False
    bare: bool = False


def _json_tools(marks: Marks, _parse: Parse | None) -> Reader:
    closer = marks.form("</tool_call>")

    def read(machine: ToolMachine, _opener: str) -> Reading[None]:
        return read_json_calls(machine, closer)

    return read


TOOL_FAMILIES = {
    family.name: family
    for family in (ToolFamily("json_tools", ("<tool_call>",), _json_tools, ("<tool_call>", "</tool_call>")),)
}


def make_machine(
    family: ToolFamily,
    declared: Sequence[DeclaredTool],
    marks: Marks,
    parse: Parse | None,
    new_id: Callable[[], str],
) -> ToolMachine:
    """The machine for one answer. Raises ValueError when the family needs a parser and none was given."""
    if family.needs_parser and parse is None:
        raise ValueError(f"the tool family {family.name} needs mlx-lm's parser of that name")
    openers = [form for opener in family.openers for form in marks.forms(opener)]
    return ToolMachine(openers, family.reader(marks, parse), declared, marks, new_id, family.bare)
