"""What a call that must be made looks like, in each family's syntax. Pure.

A forced call is written in the family's own syntax where a grammar can hold it to the schema exactly, else as
JSON in `<tool_call>` tags: a model writes what it is let write, and the answer is then read as that family
(`Forced.family` says which). Families that write arguments as XML leave texts bare, so only plain arguments
(each of one said type, texts without a length or pattern) are exact there, and only declared ones are taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mlxpool.shared.api.read import invalid
from mlxpool.shared.api.tools import Tool
from mlxpool.shared.errors import error
from mlxpool.worker.grammar import keywords
from mlxpool.worker.grammar.assertions import InvalidSchema
from mlxpool.worker.grammar.formats import (
    Format,
    constant,
    either,
    json_schema,
    literal,
    regex,
    repeated,
    sequence,
)
from mlxpool.worker.grammar.schema import read

FALLBACK_FAMILY = "json_tools"

# A small model that must call repeats itself until its limit cuts a call in two.
CALLS_HIGH = 8

# A property may be called so too; then the call is forced in JSON, which is always right.
_LENGTH = re.compile(rb'"(?:min|max)Length"')


class _Syntax(msgspec.Struct, frozen=True):
    """A call is `before` NAME `middle` arguments `after`; all calls stand between `begin` and `end` with
    `separator` between them. names: which function names it can write. numbered: a number of the client's
    own stands before `middle`. single: it has no way to write several. inside: what the style writes as
    letters, which no vocabulary may have as special tokens."""

    before: str
    middle: str
    after: str
    separator: str = ""
    begin: str = ""
    end: str = ""
    style: str = "json"
    single: bool = False
    numbered: bool = False
    inside: tuple[str, ...] = ()
    names: str = r"[^\"\\<>\s]+"


_GLM = _Syntax(
    before="<tool_call>",
    middle="",
    after="</tool_call>",
    separator="\n",
    style="glm_xml",
    inside=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

_SYNTAX = {
    FALLBACK_FAMILY: _Syntax(
        before='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        after="}\n</tool_call>",
        separator="\n",
    ),
    "llama3": _Syntax(before='{"name": "', middle='", "parameters": ', after="}", single=True),
    "mistral": _Syntax(before="[TOOL_CALLS]", middle="[ARGS]", after="", names=r"[\w-]+"),
    "kimi_k2": _Syntax(
        before="<|tool_call_begin|>functions.",
        middle="<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        numbered=True,
        names=r"[\w.-]+",
    ),
    # Its turn ends with <|call|>, which is one of the model's stop tokens.
    "harmony": _Syntax(
        before="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        after="",
        single=True,
        names=r"[\w.-]+",
    ),
    "qwen3_coder": _Syntax(
        before="<tool_call>\n<function=",
        middle=">\n",
        after="\n</function>\n</tool_call>",
        separator="\n",
        style="qwen_xml",
    ),
    "minimax_m2": _Syntax(
        before='<invoke name="',
        middle='">\n',
        after="</invoke>\n",
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        style="minimax_xml",
    ),
    "glm47": _GLM,
    "laguna": _GLM,
}


class Forced(msgspec.Struct, frozen=True):
    """format: one call or several. family: whose syntax they are in. warnings: what of the tools' schemas is
    not enforced."""

    format: Format
    family: str
    warnings: tuple[str, ...] = ()


def forced_family(family: str | None) -> str:
    """The family whose syntax a forced call uses for a model of `family`, plain arguments provided."""
    return family if family in _SYNTAX else FALLBACK_FAMILY


def calls(
    tools: Sequence[tuple[int, Tool]],
    family: str | None,
    *,
    parallel: bool,
    markers: Mapping[str, int],
    loose: bool = False,
) -> Forced:
    """One to CALLS_HIGH calls (one without `parallel`) of the tools, given with their places in the request.

    loose: arguments are any object, for schemas that turned out too much for the compiler. Raises ApiError
    400 for a schema that is none, and for a strict tool whose schema can't be enforced.
    """
    warnings: list[str] = []
    schemas = [_schema(place, tool, loose, warnings) for place, tool in tools]
    name = forced_family(family)
    syntax = _SYNTAX[name]
    written = all(re.fullmatch(syntax.names, tool.name) for _, tool in tools)
    plain = syntax.style == "json" or (
        not loose
        and markers.keys().isdisjoint(syntax.inside)
        and all(_is_plain(tool.parameters) for _, tool in tools)
    )
    if not (written and plain):
        name, syntax = FALLBACK_FAMILY, _SYNTAX[FALLBACK_FAMILY]
    if syntax.style != "json":
        schemas = [{**schema, "additionalProperties": False} for schema in schemas]
    each = [
        sequence(
            *literal(syntax.before, markers),
            *_name(tool.name, syntax),
            *literal(syntax.middle, markers),
            json_schema(schema, syntax.style),
            *literal(syntax.after, markers),
        )
        for (_, tool), schema in zip(tools, schemas, strict=True)
    ]
    most = 1 if syntax.single or not parallel else CALLS_HIGH
    body = repeated(either(*each), literal(syntax.separator, markers), most)
    whole = sequence(*literal(syntax.begin, markers), body, *literal(syntax.end, markers))
    return Forced(whole, name, tuple(warnings))


def _name(name: str, syntax: _Syntax) -> list[Format]:
    return [constant(name + ":"), regex("[0-9]{1,3}")] if syntax.numbered else [constant(name)]


def _schema(place: int, tool: Tool, loose: bool, warnings: list[str]) -> dict[str, Any]:
    """A tool's parameters in the compiler's terms; always of an object."""
    field = tool.field_at(place)
    if loose:
        return {"type": "object", "additionalProperties": True}
    try:
        reading = read(tool.parameters)
    except InvalidSchema as err:
        raise invalid(field, f"{field} is no JSON schema: {err}") from err
    if reading.unenforced:
        found = ", ".join(map(str, reading.unenforced[:3]))
        if tool.strict:
            raise error(
                "unsupported_schema",
                f"{field} uses {found}, which can't be enforced; leave it out, or send strict: false",
                param=field,
            )
        warnings.append(f"grammar not enforced: {found} of {field}")
    schema: dict[str, Any] = reading.schema
    if not schema:
        return {"type": "object", "additionalProperties": True}
    return schema


def _is_plain(parameters: dict[str, Any]) -> bool:
    """Whether XML-like syntax says these arguments exactly."""
    said = {word for word in parameters if not keywords.is_annotation(word)}
    properties = parameters.get("properties")
    return (
        said <= {"type", "properties", "required", "additionalProperties"}
        and parameters.get("type") == "object"
        and parameters.get("additionalProperties", False) is False
        and isinstance(properties, dict)
        and bool(properties)
        and set(parameters.get("required", ())) <= properties.keys()
        and all(re.fullmatch(r"[\w.-]+", name) for name in properties)
        and all(_is_plain_argument(schema) for schema in properties.values())
        # Also in the JSON inside: see `formats.json_schema`.
        and not _LENGTH.search(msgspec.json.encode(properties))
    )


def _is_plain_argument(schema: Any) -> bool:
    if not isinstance(schema, dict) or not isinstance(schema.get("type"), str):
        return False
    said = {word for word in schema if not keywords.is_annotation(word)}
    if schema["type"] != "string":
        # A bare text is taken for the JSON that it looks like: right for all but texts.
        return not said & {"$ref", "anyOf", "oneOf", "allOf", "const", "enum"}
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return said <= {"type", "enum", "const"} and all(
        isinstance(value, str) and re.fullmatch(r"[^\s<>](?:[^<>\n]*[^\s<>])?", value) for value in values
    )
