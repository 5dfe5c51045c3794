"""Calls with a name, a token, and a JSON object behind it: those of Mistral and of Kimi K2.

Both write ids of their own which their templates expect to see again, so those are kept.
"""

from __future__ import annotations

import re

from mlxpool.worker.text.find import Finder
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.feed import Broken, Reading
from mlxpool.worker.text.tools.json_calls import read_json_calls
from mlxpool.worker.text.tools.json_value import read_object
from mlxpool.worker.text.tools.machine import HEADER_CHARS, Reader, ToolMachine

# Mistral's templates refuse an id of another form.
_MISTRAL_ID = "[A-Za-z0-9]{9}"
_KIMI_HEADER = re.compile(r"(?:functions\.)?(?P<name>.+?)(?P<number>:\d+)?")


def _read_arguments(machine: ToolMachine, name: str, own_id: str | None) -> Reading[None]:
    """The object that comes next, as the arguments of a call."""
    parameters = machine.parameters(name)
    if (yield from machine.feed.solid()) != "{":
        raise Broken
    writer = machine.begin_call(name, own_id)
    yield from read_object(machine.feed, writer, parameters)
    machine.end_call()


def mistral_reader(marks: Marks) -> Reader:
    """[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}, the middle two at will; or, older, a JSON list."""
    arguments, call_id = marks.form("[ARGS]"), marks.form("[CALL_ID]")
    name_end = Finder((arguments, call_id, "{"))
    id_end = Finder((arguments,))

    def read(machine: ToolMachine, _opener: str) -> Reading[None]:
        feed = machine.feed
        if (yield from feed.solid()) in "{[":
            yield from read_json_calls(machine, "", ids=_MISTRAL_ID)
            return
        name, what = yield from feed.until(name_end, HEADER_CHARS)
        own_id = None
        if what == call_id:
            given, what = yield from feed.until(id_end, HEADER_CHARS)
            own_id = given if re.fullmatch(_MISTRAL_ID, given) else None
        if what == "{":
            feed.at -= 1
        yield from _read_arguments(machine, name.strip(), own_id)

    return read


def kimi_reader(marks: Marks) -> Reader:
    """A section of calls: functions.NAME:NUMBER, a token, the object, a token."""
    begin, argument = marks.form("<|tool_call_begin|>"), marks.form("<|tool_call_argument_begin|>")
    end, section_end = marks.form("<|tool_call_end|>"), marks.form("<|tool_calls_section_end|>")
    header_end = Finder((argument,))

    def read(machine: ToolMachine, opener: str) -> Reading[None]:
        feed = machine.feed
        if opener != begin:
            yield from feed.expect(begin)
        while True:
            text, _ = yield from feed.until(header_end, HEADER_CHARS)
            header = _KIMI_HEADER.fullmatch(text.strip())
            if header is None:
                raise Broken
            own = text.strip() if header["number"] and text.strip().startswith("functions.") else None
            yield from _read_arguments(machine, header["name"], own)
            yield from feed.take(end, behind_blanks=True)
            if not (yield from feed.take(begin, behind_blanks=True)):
                break
            machine.another(len(begin))
        yield from feed.take(section_end, behind_blanks=True)

    return read
