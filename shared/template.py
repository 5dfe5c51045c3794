"""A model folder's chat template, rendered as Hugging Face renders it, bounded in time and output.

A template is a program that came with the weights. It runs in jinja2's immutable sandbox with the
globals and filters such templates are written for: trim_blocks, lstrip_blocks, loop controls, `tojson`
that escapes nothing for HTML, `raise_exception`, `strftime_now`, and `{% generation %}` blocks, which
only mark text. The edge that shaped it: the sandbox keeps a template from reaching out but not from
looping, so every line it runs is watched against a deadline, and what it writes against a size. What it
holds between two lines is bounded for repetition and powers only.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from mlxpool.shared.errors import error

# A template renders thousands of messages in a few milliseconds; one that runs longer doesn't end.
RENDER_TIME_LIMIT_S = 5.0

# Far beyond the text of any context: the largest bodies accepted are 64 MiB.
RENDER_SIZE_LIMIT_CHARS = 128 * 1024 * 1024

# Macros that call each other: no schema is nested this deep. It must stay far below Python's own limit:
# CPython 3.11 can crash when that one is passed inside a trace function.
RECURSION_LIMIT = 64

# Sequence repetition and powers are the two operators that make large values out of small ones.
_REPEAT_LIMIT = 1_000_000
_POWER_LIMIT = 10_000

# The name jinja2 gives to code compiled from a string: the frames that are watched.
_TEMPLATE_FILENAME = "<template>"

_Trace = Callable[[FrameType, str, Any], Any]


class _RunawayTemplateError(Exception):
    """The template passed a bound; the message says which."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: marks the assistant's text for training; text as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads this attribute off the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with the two operators bounded that make gigabytes in one step."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and max(abs(left), abs(right)) > _POWER_LIMIT:
            raise _RunawayTemplateError(f"it raises {left} to the power {right}")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and len(value) * times > _REPEAT_LIMIT:
                    raise _RunawayTemplateError(f"it repeats a value {times} times")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> str:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    # The one default global that runs as long as it is told to, out of sight of the deadline.
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template. `variables` are the names it reads from outside, so what can change its text.
    Rendering is thread-safe; compiling raises ValueError naming the line."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = _environment()
        try:
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            self._template = environment.from_string(source)
        except (jinja2.exceptions.TemplateError, RecursionError) as err:
            line = getattr(err, "lineno", None)
            where = f" (line {line})" if line else ""
            raise ValueError(f"the model's chat template can't be compiled: {err}{where}") from err

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text. Raises ApiError 400 with the template's own words when it refuses or fails."""
        try:
            return self._render(messages, variables)
        except _RunawayTemplateError as err:
            reason = f"the model's chat template was stopped: {err}"
        except Exception as err:  # a template can fail in any way a program can
            reason = f"the model's chat template refused these messages: {err or type(err).__name__}"
        raise error("invalid_request", reason, param="messages")

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        previous = sys.gettrace()
        sys.settrace(_deadline_trace(time.monotonic() + RENDER_TIME_LIMIT_S))
        try:
            for piece in self._template.generate(messages=messages, **variables):
                size += len(piece)
                if size > RENDER_SIZE_LIMIT_CHARS:
                    raise _RunawayTemplateError(f"it wrote more than {RENDER_SIZE_LIMIT_CHARS} characters")
                pieces.append(piece)
        finally:
            sys.settrace(previous)
        return "".join(pieces)


def _deadline_trace(deadline_s: float) -> _Trace:
    """A trace function for this thread that ends template code at `deadline_s` (time.monotonic), or when its
    calls are nested too deep."""
    depth = 0

    def on_line(_frame: FrameType, event: str, _arg: Any) -> _Trace:
        nonlocal depth
        if event == "return":
            depth -= 1
        if time.monotonic() > deadline_s:
            raise _RunawayTemplateError(f"it ran longer than {RENDER_TIME_LIMIT_S:g} s")
        return on_line

    def on_call(frame: FrameType, _event: str, _arg: Any) -> _Trace | None:
        nonlocal depth
        if frame.f_code.co_filename != _TEMPLATE_FILENAME:
            return None
        depth += 1
        if depth > RECURSION_LIMIT:
            raise _RunawayTemplateError(f"it calls itself more than {RECURSION_LIMIT} levels deep")
        return on_line

    return on_call
