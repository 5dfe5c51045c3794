"""Calls that are read as a whole block by one of mlx-lm's parsers.

Such a parser may raise anything and say anything: what it gives counts only when it is calls of declared
functions, all of them. And it may take time that grows with the square of the block, on the engine's thread:
hence the bound, and hence readers of our own for every format that allows one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxpool.worker.text.find import Finder
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.feed import Broken, Ended, Reading
from mlxpool.worker.text.tools.json_calls import call_whole
from mlxpool.worker.text.tools.machine import HEADER_CHARS, Reader, ToolMachine

# A block at this bound takes the slowest parser in use (Python calls) 0.15 s at worst.
BLOCK_CHARS = 32 * 1024

# One of mlx-lm's parsers: a block's text and the tools in, one call or a list of calls out; raises anything.
Parse = Callable[[str, list[dict[str, Any]]], Any]


def block_reader(marks: Marks, parse: Parse, closer: str) -> Reader:
    """Collects a list of Python calls up to `closer`, once its first one is of a declared function."""
    end = Finder((marks.form(closer),))
    name_end = Finder(("(", *end.strings))

    def read(machine: ToolMachine, _opener: str) -> Reading[None]:
        name, what = yield from machine.feed.until(name_end, HEADER_CHARS)
        if what != "(":
            raise Broken
        machine.parameters(name.rpartition("[")[2].strip())
        machine.named()
        try:
            rest, _ = yield from machine.feed.until(end, BLOCK_CHARS)
        except Ended:
            if not machine.feed.finished:
                raise
            rest = machine.feed.rest(end)
            machine.feed.at = len(machine.feed.text)
        text = f"{name}({rest}"
        tools = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
            for tool in machine.tools.values()
        ]
        try:
            parsed = parse(marks.spelled(text), tools)
        except Exception as err:
            raise Broken from err
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not calls or not all(_is_declared(machine, call) for call in calls):
            raise Broken
        for call in calls:
            call_whole(machine, call)

    return read


def _is_declared(machine: ToolMachine, call: object) -> bool:
    return (
        isinstance(call, dict)
        and isinstance(call.get("name"), str)
        and call["name"] in machine.tools
        and isinstance(call.get("arguments", {}), dict)
    )
