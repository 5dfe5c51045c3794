"""Functions that a request declares, and whether they must be called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from mlxpool.shared.api import read
from mlxpool.shared.text import cut

# Ten times what the largest agents declare; the names of all are looked for in every answer.
TOOLS_LIMIT = 1024

# What OpenAI takes, longer, and with the marks that name spaces are made with.
NAME_LIMIT_CHARS = 128
TOOL_NAME = re.compile(rf"[a-zA-Z0-9_.:-]{{1,{NAME_LIMIT_CHARS}}}")
NAME_RULE = f"1 to {NAME_LIMIT_CHARS} letters, digits or _ . : -"

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_MODES = ("none", "auto", "required")
_ONE_FUNCTION = '{"type": "function", "function": {"name": "…"}}'


class Tool(msgspec.Struct, frozen=True):
    """A declared function. parameters: JSON schema of its arguments. written: the tool as the client wrote
    it, with the parameters filled in where it left them out, which is what templates render. field: what the
    wire calls the parameters; None for chat's name by the tool's place."""

    name: str
    parameters: dict[str, Any]
    written: dict[str, Any]
    strict: bool = False
    field: str | None = None

    def field_at(self, place: int) -> str:
        """What the wire calls the parameters of this one, which is at that place among the declared."""
        return self.field or f"tools[{place}].function.parameters"


class ToolChoice(msgspec.Struct, frozen=True):
    """mode `one`: the function `name` must be called. `required`: some function must."""

    mode: Literal["none", "auto", "required", "one"] = "auto"
    name: str | None = None


def read_tools(name: str, value: object) -> tuple[Tool, ...]:
    """Chat's list of tools; () for null. Raises ApiError 400."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise read.invalid(name, f"{name} must be a list of tools, not {read.quoted(value)}")
    if len(value) > TOOLS_LIMIT:
        raise read.invalid(name, f"{name} holds {len(value)} tools; at most {TOOLS_LIMIT} work")
    tools = tuple(_tool(f"{name}[{place}]", tool) for place, tool in enumerate(value))
    seen: dict[str, int] = {}
    for place, tool in enumerate(tools):
        first = seen.setdefault(tool.name, place)
        if first != place:
            raise read.invalid(
                f"{name}[{place}].function.name",
                f"{name}[{place}].function.name {read.quoted(tool.name)} is that of {name}[{first}] too; "
                "each function needs its own name",
            )
    return tools


def _tool(where: str, value: object) -> Tool:
    given = read.mapping(where, value, '{"type": "function", "function": {"name": "…"}}')
    kind = given.get("type")
    if kind != "function":
        raise read.unsupported(
            f"{where}.type", f'{where}.type must be "function", not {read.quoted(kind)}: no other tool works'
        )
    read.only(where, given, ("type", "function"))
    inside = f"{where}.function"
    tool = declared(inside, read.mapping(inside, given.get("function"), '{"name": "…"}'))
    function = tool.written
    return msgspec.structs.replace(tool, written={"type": "function", "function": function})


def declared(where: str, function: Mapping[str, Any]) -> Tool:
    """The function described by the object at `where`; its `written` is that object alone, for the
    protocol's reader to wrap. Raises ApiError 400."""
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise read.invalid(f"{where}.name", f"{where}.name must be {NAME_RULE}, not {read.quoted(name)}")
    read.only(where, function, _FUNCTION_FIELDS)
    read.string(f"{where}.description", function.get("description"))
    parameters = read_parameters(f"{where}.parameters", function.get("parameters"))
    return Tool(
        name,
        parameters,
        {**function, "parameters": parameters},
        read.boolean(f"{where}.strict", function.get("strict"), default=False),
        f"{where}.parameters",
    )


def read_parameters(where: str, value: object) -> dict[str, Any]:
    """A schema of an object: what arguments are; without a word, of one that holds nothing. Raises ApiError
    400."""
    if value is None or value == {}:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = read.mapping(where, value, '{"type": "object", "properties": {}}')
    if schema.get("type", "object") != "object":
        raise read.invalid(
            f"{where}.type",
            f'{where}.type must be "object", not {read.quoted(schema["type"])}: arguments are an object',
        )
    return schema


def read_choice(name: str, value: object, tools: Sequence[Tool]) -> ToolChoice:
    """Chat's tool_choice for the declared `tools`; auto for null. Raises ApiError 400."""
    if value is None:
        return ToolChoice()
    choice = _choice(name, value)
    if choice.mode in ("none", "auto"):
        return choice
    if not tools:
        raise read.invalid(name, f"{name} {read.quoted(value)} needs tools; declare them in tools")
    names = [tool.name for tool in tools]
    if choice.name is not None and choice.name not in names:
        raise read.invalid(
            f"{name}.function.name",
            f"{name} names {read.quoted(choice.name)}, which tools doesn't declare; "
            f"{cut(', '.join(names))} would work",
        )
    return choice


def _choice(name: str, value: object) -> ToolChoice:
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(msgspec.convert(value, Literal["none", "auto", "required"]))
    if not isinstance(value, dict):
        raise read.invalid(
            name, f"{name} must be one of {', '.join(_MODES)}, or {_ONE_FUNCTION}, not {read.quoted(value)}"
        )
    kind = value.get("type")
    if kind == "allowed_tools":
        raise read.unsupported(
            f"{name}.type",
            f'{name}.type "allowed_tools" is not supported; declare only those tools, '
            f"with {name} auto or required",
        )
    if kind != "function":
        raise read.unsupported(
            f"{name}.type", f'{name}.type must be "function", not {read.quoted(kind)}; or send auto'
        )
    read.only(name, value, ("type", "function"))
    inside = f"{name}.function"
    function = read.mapping(inside, value.get("function"), '{"name": "…"}')
    read.only(inside, function, ("name",))
    return ToolChoice("one", read.filled(f"{inside}.name", function.get("name")))
