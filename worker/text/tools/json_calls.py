"""Calls written as JSON objects: {"name": …, "arguments": {…}}, one, several, or a list.

The arguments stream once the name is known. Where they come first, or as a string, or inside of another
object, the object is read whole. Behind the arguments' last brace the call is complete, whatever the model
forgets to close: a brace too many or too few ends nothing but the markup.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mlxpool.worker.text.tools.feed import BLANKS, Broken, Ended, Reading
from mlxpool.worker.text.tools.json_value import read_name, read_object, read_value
from mlxpool.worker.text.tools.machine import ToolMachine

_NAMES = ("name", "function", "tool")
_ARGUMENTS = ("arguments", "parameters", "args")
# What a call's object may begin with, where nothing else announces one.
_FIRST_KEYS = (*_NAMES, "type", "id")
# Between calls and behind the last one: separators, and brackets that models miscount.
_BETWEEN = BLANKS + ",;]}"


def read_json_calls(
    machine: ToolMachine, closer: str, announced: bool = True, ids: str | None = None
) -> Reading[None]:
    """One object or several, up to `closer` ("" for none). announced: a marker said that calls follow. ids:
    the pattern of the model's own ids, where its calls carry them."""
    feed = machine.feed
    if (yield from feed.solid()) == "[":
        feed.at += 1
    while True:
        if (yield from feed.solid()) != "{":
            raise Broken
        yield from _read_call(machine, announced, ids)
        while (char := (yield from feed.peek())) in _BETWEEN:
            feed.at += 1
        if char != "{":
            break
        machine.another()
    if closer:
        yield from feed.take(closer)


def _read_call(machine: ToolMachine, announced: bool, ids: str | None) -> Reading[None]:
    feed = machine.feed
    feed.at += 1
    fields: dict[str, Any] = {}
    while True:
        try:
            char = yield from feed.solid()
        except Ended:
            # With name and arguments the brace is all that the model left out.
            if not (feed.finished and any(key in _function_in(fields) for key in _ARGUMENTS)):
                raise
            call_whole(machine, fields, ids)
            return
        if char == "}":
            break
        if char == ",":
            feed.at += 1
            continue
        if char != '"':
            raise Broken
        key = yield from read_name(feed)
        if not (announced or fields or key in _FIRST_KEYS):
            raise Broken
        yield from feed.expect(":")
        value = yield from feed.solid()
        name = _name_in(fields)
        if key in _ARGUMENTS and value == "{" and name is not None:
            writer = machine.begin_call(name, _id_in(fields, ids))
            yield from read_object(feed, writer, machine.parameters(name))
            machine.end_call()
            yield from _skip_rest(machine)
            return
        writer = machine.writer()
        yield from read_value(feed, writer)
        fields[key] = json.loads(writer.take())
        if key in _NAMES and isinstance(fields[key], str):
            machine.parameters(fields[key])
            machine.named()
    feed.at += 1
    call_whole(machine, fields, ids)


def _name_in(fields: dict[str, Any]) -> str | None:
    return next((fields[key] for key in _NAMES if isinstance(fields.get(key), str)), None)


def _function_in(fields: dict[str, Any]) -> dict[str, Any]:
    """Where name and arguments are: in the object itself, or in one of its fields."""
    return next((fields[key] for key in ("function", "tool") if isinstance(fields.get(key), dict)), fields)


def _id_in(fields: dict[str, Any], ids: str | None) -> str | None:
    value = fields.get("id")
    return value if ids is not None and isinstance(value, str) and re.fullmatch(ids, value) else None


def call_whole(machine: ToolMachine, fields: dict[str, Any], ids: str | None = None) -> None:
    """A call from a whole object. Raises Broken when it names no declared function or has no arguments."""
    inner = _function_in(fields)
    name = _name_in(inner)
    arguments = next((inner[key] for key in _ARGUMENTS if key in inner), None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise Broken from None
    if arguments is None:
        arguments = {}
    if name is None or not isinstance(arguments, dict):
        raise Broken
    machine.whole_call(name, arguments, _id_in(fields, ids))


def _skip_rest(machine: ToolMachine) -> Reading[None]:
    """What else the object holds behind its arguments; nothing of it is used."""
    feed = machine.feed
    while (yield from feed.solid()) == ",":
        feed.at += 1
        if (yield from feed.solid()) != '"':
            return
        yield from read_name(feed)
        yield from feed.expect(":")
        yield from read_value(feed, machine.writer())
