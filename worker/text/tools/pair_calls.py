"""Calls written as a name and pairs of tags: NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>.

GLM's format, and that of models which write the same with other letters. They sometimes write a JSON object
between the same outer tags, and are understood.
"""

from __future__ import annotations

from mlxpool.worker.text.find import Finder
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.feed import Broken, Reading
from mlxpool.worker.text.tools.json_calls import read_json_calls
from mlxpool.worker.text.tools.json_value import KEY_CHARS
from mlxpool.worker.text.tools.machine import HEADER_CHARS, Reader, ToolMachine
from mlxpool.worker.text.tools.schema import texts_of, types_of
from mlxpool.worker.text.tools.text_value import read_text_value


class PairReader:
    """prefix: what the words `tool_call`, `arg_key` and `arg_value` begin with in this model's tags."""

    def __init__(self, prefix: str, marks: Marks) -> None:
        self._closer = marks.form(f"</{prefix}tool_call>")
        self._key = marks.form(f"<{prefix}arg_key>")
        self._key_end = Finder((marks.form(f"</{prefix}arg_key>"),))
        self._value = marks.form(f"<{prefix}arg_value>")
        self._value_end = Finder((marks.form(f"</{prefix}arg_value>"),))
        self._name_end = Finder((self._key, self._closer))

    def reader(self) -> Reader:
        return self._read

    def _read(self, machine: ToolMachine, _opener: str) -> Reading[None]:
        feed = machine.feed
        if (yield from feed.solid()) in "{[":
            yield from read_json_calls(machine, self._closer)
            return
        name, what = yield from feed.until(self._name_end, HEADER_CHARS)
        parameters = machine.parameters(name.strip())
        writer = machine.begin_call(name.strip())
        writer.open("{")
        while what == self._key:
            marked = feed.hold()
            key, _ = yield from feed.until(self._key_end, KEY_CHARS)
            key = key.strip()
            yield from feed.expect(self._value)
            feed.release(marked)
            writer.key(key)
            types, texts = types_of(parameters, key), texts_of(parameters, key)
            yield from read_text_value(feed, writer, types, self._value_end, guess=True, texts=texts)
            yield from feed.solid()
            if (yield from feed.take(self._key)):
                continue
            if not (yield from feed.take(self._closer)):
                raise Broken
            break
        writer.close()
        machine.end_call()
