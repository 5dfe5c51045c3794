"""Anthropic's tools and tool_choice, as those of every protocol.

Claude's own tools come without a schema. Those that Anthropic's servers would run (a search of the web, code)
are left out, with a warning: clients send them whatever the model is. Those that the client would run are
refused: the model was never shown what they take, so they have to be declared like any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.shared.api import read
from mlxpool.shared.api.parts import check_cache_control
from mlxpool.shared.api.tools import NAME_RULE, TOOL_NAME, TOOLS_LIMIT, Tool, ToolChoice, read_parameters
from mlxpool.shared.api.warned import Warnings
from mlxpool.shared.text import cut

# Types are these names, or with a date behind: a client's own may begin like one.
_HOSTED = re.compile(
    "(web_search|web_fetch|code_execution|tool_search_tool(_regex|_bm25)?|mcp_toolset|memory|advisor)"
    "(_[0-9]{8})?"
)

_OWN_FIELDS = ("name", "description", "input_schema", "strict", "type")
# How a hosted model is shown or may use the tool. Here each is declared, and called by the model alone.
_WITHOUT_EFFECT = (
    "cache_control",
    "eager_input_streaming",
    "defer_loading",
    "allowed_callers",
    "input_examples",
)

_CHOICES = ("auto", "any", "tool", "none")
_LIKE = '{"name": "…", "input_schema": {"type": "object"}}'


def read_tools(name: str, value: object, warnings: Warnings) -> tuple[Tool, ...]:
    """The declared tools; none for null. warnings: told of those left out. Raises ApiError 400."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise read.invalid(name, f"{name} must be a list of tools, not {read.quoted(value)}")
    if len(value) > TOOLS_LIMIT:
        raise read.invalid(name, f"{name} holds {len(value)} tools; at most {TOOLS_LIMIT} work")
    tools: list[Tool] = []
    seen: dict[str, str] = {}
    for place, entry in enumerate(value):
        where = f"{name}[{place}]"
        given = read.mapping(where, entry, _LIKE)
        kind = given.get("type")
        if isinstance(kind, str) and _HOSTED.fullmatch(kind):
            warnings.add(where, f"{kind} is a tool that this server doesn't run; it was left out")
            continue
        tool = _tool(where, given)
        first = seen.setdefault(tool.name, where)
        if first != where:
            raise read.invalid(
                f"{where}.name",
                f"{where}.name {read.quoted(tool.name)} is that of {first} too; each tool needs its own name",
            )
        tools.append(tool)
    return tuple(tools)


def _tool(where: str, given: Mapping[str, Any]) -> Tool:
    kind = given.get("type")
    if kind is not None and kind != "custom":
        raise read.unsupported(
            f"{where}.type",
            f'{where}.type {read.quoted(kind)} is not supported; declare the tool with type "custom", '
            "a description and an input_schema",
        )
    read.only(where, given, (*_OWN_FIELDS, *_WITHOUT_EFFECT))
    check_cache_control(where, given)
    name = given.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise read.invalid(f"{where}.name", f"{where}.name must be {NAME_RULE}, not {read.quoted(name)}")
    description = read.string(f"{where}.description", given.get("description"))
    parameters = read_parameters(f"{where}.input_schema", given.get("input_schema"))
    function = {"name": name, "description": description, "parameters": parameters}
    if description is None:
        del function["description"]
    return Tool(
        name,
        parameters,
        {"type": "function", "function": function},
        read.boolean(f"{where}.strict", given.get("strict"), default=False),
        f"{where}.input_schema",
    )


def read_choice(name: str, value: object, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """tool_choice, and whether more than one call may be made. Raises ApiError 400."""
    if value is None:
        return ToolChoice(), True
    given = read.mapping(name, value, '{"type": "auto"}')
    kind = read.name_of(f"{name}.type", given.get("type"), _CHOICES)
    own = ("type", "disable_parallel_tool_use", *(("name",) if kind == "tool" else ()))
    read.only(name, given, own)
    where = f"{name}.disable_parallel_tool_use"
    parallel = not read.boolean(where, given.get("disable_parallel_tool_use"), default=False)
    if kind == "none":
        return ToolChoice("none"), parallel
    if kind == "auto":
        return ToolChoice(), parallel
    if not tools:
        raise read.invalid(name, f"{name} {read.quoted(value)} needs tools; declare them in tools")
    if kind == "any":
        return ToolChoice("required"), parallel
    wanted = read.filled(f"{name}.name", given.get("name"))
    names = [tool.name for tool in tools]
    if wanted not in names:
        raise read.invalid(
            f"{name}.name",
            f"{name} names {read.quoted(wanted)}, which tools doesn't declare; "
            f"{cut(', '.join(names))} would work",
        )
    return ToolChoice("one", wanted), parallel
