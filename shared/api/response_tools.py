"""Tools of a Responses request as functions that a model can call, and their names on the way back.

A model calls functions and knows one list of names. A custom tool, whose input is plain text, becomes a
function of one string; the tools of a namespace get names that are joined with its own. What a name stands
for travels with the request, and the writer says it again as the client wrote it. A tool that its vendor
runs can't be run here: it is left out, and the client is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mlxpool.shared.api import read
from mlxpool.shared.api.tools import (
    NAME_LIMIT_CHARS,
    NAME_RULE,
    TOOL_NAME,
    TOOLS_LIMIT,
    Tool,
    ToolChoice,
    declared,
)
from mlxpool.shared.api.warned import Warnings
from mlxpool.shared.text import cut

# What a custom tool's text is called among the arguments of its function.
INPUT = "input"

_JOINT = "__"
_DIGEST_BYTES = 4

# Of every tool: how it may be called, and what comes out of it, which no template shows a model.
_EVERY_FIELDS = ("type", "name", "description", "allowed_callers", "async", "defer_loading")
_FUNCTION_FIELDS = (*_EVERY_FIELDS, "parameters", "strict", "output_schema")
_CUSTOM_FIELDS = (*_EVERY_FIELDS, "format")
_SYNTAXES = ("lark", "regex")
_MODES = ("none", "auto", "required")
_CHOICES = (
    'none, auto, required, {"type": "function", "name": "…"}, {"type": "custom", "name": "…"} '
    'or {"type": "allowed_tools", "mode": "auto", "tools": […]}'
)

ToolMode = Literal["none", "auto", "required"]


class ToolName(msgspec.Struct, frozen=True):
    """A tool as its client knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False


def joined(namespace: str | None, name: str) -> str:
    """The name that a model knows the tool by."""
    if not namespace:
        return name
    joint = "" if namespace.endswith(_JOINT) or name.startswith(_JOINT) else _JOINT
    whole = f"{namespace}{joint}{name}"
    if len(whole) <= NAME_LIMIT_CHARS:
        return whole
    digest = hashlib.blake2b(whole.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{whole[: NAME_LIMIT_CHARS - len(digest) - 1]}_{digest}"


class Declarations:
    """The tools of one request, gathered from wherever it declares them. Owned by the request's reader."""

    def __init__(self, warnings: Warnings) -> None:
        self.tools: dict[str, Tool] = {}
        self.names: dict[str, ToolName] = {}
        self._places: dict[str, str] = {}
        self._warnings = warnings

    def read(self, where: str, value: object) -> None:
        """Declare a list of tools; nothing for null. Raises ApiError 400."""
        if value is None:
            return
        if not isinstance(value, list):
            raise read.invalid(where, f"{where} must be a list of tools, not {read.quoted(value)}")
        _check_length(where, len(value))
        for place, tool in enumerate(value):
            self._read_one(f"{where}[{place}]", tool)
        _check_length(where, len(self.tools))

    def _read_one(self, where: str, value: object, namespace: str | None = None, about: str = "") -> None:
        given = read.mapping(where, value, '{"type": "function", "name": "…", "parameters": {…}}')
        kind = given.get("type")
        if kind == "function":
            self._function(where, given, namespace, about)
        elif kind == "custom":
            self._custom(where, given, namespace, about)
        elif kind == "namespace" and namespace is None:
            self._namespace(where, given)
        elif isinstance(kind, str) and kind and namespace is None:
            self._warnings.add(where, f"{cut(kind)} is a tool that this server doesn't run; it was left out")
        else:
            raise read.invalid(
                f"{where}.type", f"{where}.type must be function or custom, not {read.quoted(kind)}"
            )

    def _namespace(self, where: str, given: Mapping[str, Any]) -> None:
        read.only(where, given, ("type", "name", "description", "tools"))
        name = _name(where, given)
        described = read.string(f"{where}.description", given.get("description"))
        # No template has a place for it; once is enough.
        about = f"Of the tools {name}: {described}" if described else ""
        inner = given.get("tools")
        if not isinstance(inner, list):
            raise read.invalid(
                f"{where}.tools", f"{where}.tools must be a list of tools, not {read.quoted(inner)}"
            )
        _check_length(f"{where}.tools", len(inner))
        for place, tool in enumerate(inner):
            self._read_one(f"{where}.tools[{place}]", tool, name, about if place == 0 else "")

    def _function(self, where: str, given: Mapping[str, Any], namespace: str | None, about: str) -> None:
        if "function" in given:
            raise read.unsupported(
                f"{where}.function",
                f"{where}.function is chat's form; here name, description and parameters stand beside type",
            )
        read.only(where, given, _FUNCTION_FIELDS)
        name = _name(where, given)
        bare = {
            key: value
            for key, value in given.items()
            if key in ("description", "parameters", "strict") and value is not None
        }
        tool = declared(where, {"name": joined(namespace, name), **bare})
        if about:
            text = "\n\n".join(filter(None, (about, bare.get("description"))))
            tool = msgspec.structs.replace(tool, written={**tool.written, "description": text})
        self._add(where, tool, ToolName(name, namespace))

    def _custom(self, where: str, given: Mapping[str, Any], namespace: str | None, about: str) -> None:
        read.only(where, given, _CUSTOM_FIELDS)
        name = _name(where, given)
        described = read.string(f"{where}.description", given.get("description"))
        form = self._form(f"{where}.format", given.get("format"))
        text = "\n\n".join(filter(None, (about, described, form)))
        parameters = {
            "type": "object",
            "properties": {INPUT: {"type": "string", "description": "The tool's whole input, as plain text"}},
            "required": [INPUT],
            "additionalProperties": False,
        }
        function = {"name": joined(namespace, name), "description": text, "parameters": parameters}
        self._add(where, declared(where, function), ToolName(name, namespace, custom=True))

    def _form(self, where: str, value: object) -> str | None:
        """What the model is told of the form of a custom tool's input."""
        if value is None:
            return None
        given = read.mapping(where, value, '{"type": "text"}')
        if read.name_of(f"{where}.type", given.get("type"), ("text", "grammar")) == "text":
            read.only(where, given, ("type",))
            return None
        read.only(where, given, ("type", "syntax", "definition"))
        syntax = read.name_of(f"{where}.syntax", given.get("syntax"), _SYNTAXES)
        definition = read.filled(f"{where}.definition", given.get("definition"))
        self._warnings.add(where, "the model is told the grammar of the input, and it is not enforced")
        return f"The input must match this {syntax} grammar:\n{definition}"

    def _add(self, where: str, tool: Tool, name: ToolName) -> None:
        first = self._places.setdefault(tool.name, where)
        if first != where:
            raise read.invalid(
                f"{where}.name",
                f"{where}.name {read.quoted(tool.name)} is that of {first} too; each tool needs its own name",
            )
        function = tool.written
        self.tools[tool.name] = msgspec.structs.replace(
            tool, written={"type": "function", "function": function}
        )
        self.names[tool.name] = name


def _check_length(where: str, length: int) -> None:
    if length > TOOLS_LIMIT:
        raise read.invalid(where, f"{where} holds {length} tools; at most {TOOLS_LIMIT} work")


def _name(where: str, given: Mapping[str, Any]) -> str:
    name = given.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise read.invalid(
            f"{where}.name",
            f"{where}.name must be {NAME_RULE}, not {read.quoted(name)}",
        )
    return name


def choose(
    name: str, value: object, declarations: Declarations, warnings: Warnings
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model is shown, and whether it must call one; auto for null. Raises ApiError 400."""
    tools = tuple(declarations.tools.values())
    if value is None:
        return tools, ToolChoice()
    if isinstance(value, str):
        mode = msgspec.convert(_mode(name, value, _MODES), ToolMode)
        return tools, _demanding(name, value, mode, tools)
    given = read.mapping(name, value, '{"type": "function", "name": "…"}')
    kind = given.get("type")
    known = _Known(declarations.names)
    if kind in ("function", "custom"):
        read.only(name, given, ("type", "name", "namespace"))
        return tools, ToolChoice("one", known.named(name, given))
    if kind != "allowed_tools":
        raise read.unsupported(
            f"{name}.type", f"{name}.type {read.quoted(kind)} is not supported; {_CHOICES} would work"
        )
    read.only(name, given, ("type", "mode", "tools"))
    mode = msgspec.convert(_mode(f"{name}.mode", given.get("mode"), ("auto", "required")), ToolMode)
    allowed = _allowed(f"{name}.tools", given.get("tools"), known, warnings)
    shown = tuple(tool for tool in tools if tool.name in allowed)
    return shown, _demanding(name, value, mode, shown)


def _mode(name: str, value: object, modes: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in modes:
        return value
    likely = _CHOICES if modes == _MODES else " or ".join(modes)
    raise read.invalid(name, f"{name} must be {likely}, not {read.quoted(value)}")


def _demanding(name: str, value: object, mode: ToolMode, tools: tuple[Tool, ...]) -> ToolChoice:
    if mode == "required" and not tools:
        raise read.invalid(
            name, f"{name} {read.quoted(value)} needs tools of type function or custom; declare them in tools"
        )
    return ToolChoice(mode)


def _allowed(where: str, value: object, known: _Known, warnings: Warnings) -> set[str]:
    if not isinstance(value, list) or not value:
        raise read.invalid(where, f"{where} must be a non-empty list of tools, not {read.quoted(value)}")
    _check_length(where, len(value))
    allowed: set[str] = set()
    for place, entry in enumerate(value):
        inside = f"{where}[{place}]"
        given = read.mapping(inside, entry, '{"type": "function", "name": "…"}')
        kind = given.get("type")
        if kind in ("function", "custom"):
            read.only(inside, given, ("type", "name", "namespace"))
            allowed.add(known.named(inside, given))
        elif kind == "namespace":
            read.only(inside, given, ("type", "name"))
            allowed |= known.members(inside, given.get("name"))
        elif isinstance(kind, str) and kind:
            warnings.add(inside, f"{cut(kind)} is a tool that this server doesn't run; it was left out")
        else:
            raise read.invalid(f"{inside}.type", f"{inside}.type must be a string, not {read.quoted(kind)}")
    return allowed


class _Known:
    """The declared tools as a client may name them, looked up once for all that it names. Immutable."""

    def __init__(self, names: Mapping[str, ToolName]) -> None:
        self._names = names
        self._alike: dict[tuple[str, bool], list[str]] = {}
        self._members: dict[str | None, set[str]] = {}
        for own, tool in names.items():
            self._alike.setdefault((tool.name, tool.custom), []).append(own)
            self._members.setdefault(tool.namespace, set()).add(own)

    def members(self, where: str, name: object) -> set[str]:
        """The tools of a namespace, by the model's names for them. Raises ApiError 400."""
        if not isinstance(name, str) or name not in self._members:
            raise read.invalid(
                f"{where}.name", f"{where} names {read.quoted(name)}, which tools doesn't declare"
            )
        return self._members[name]

    def named(self, where: str, given: Mapping[str, Any]) -> str:
        """The model's name for the tool that is named, with its namespace or, where that is plain, without.
        Raises ApiError 400."""
        wanted = read.filled(f"{where}.name", given.get("name"))
        namespace = read.string(f"{where}.namespace", given.get("namespace"))
        custom = given["type"] == "custom"
        whole = joined(namespace, wanted)
        if whole in self._names and self._names[whole].custom is custom:
            return whole
        alike = self._alike.get((wanted, custom), []) if namespace is None else []
        if len(alike) == 1:
            return alike[0]
        known = [own for own, tool in self._names.items() if tool.custom is custom]
        would = f"; {cut(', '.join(known))} would work" if known else ""
        raise read.invalid(
            f"{where}.name",
            f"{where} names {read.quoted(wanted)}, which tools doesn't declare as {given['type']}{would}",
        )
