"""What grammar a request needs, and what is done where it can't be enforced. Pure.

An answer's form is `structure`, or a call that must be made, or either of them where tools may be called.
`decide` gives a grammar to compile, or says that the form can only be asked for in words: then the
instruction goes into a system message and the answer carries a warning. What the client has to know before
anything runs is an ApiError 400: a text that is no schema, regular expression or grammar at all
(invalid_request: an instruction can't mend it) or too large to be read, and a form that was asked for with
`strict: true`, or is too long to be asked for in words, and can't be enforced (unsupported_schema, naming
what).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mlxpool.shared.api.read import invalid, quoted
from mlxpool.shared.api.structure import Structure
from mlxpool.shared.api.tools import Tool, ToolChoice
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import cut
from mlxpool.worker.grammar import formats, pattern, tools
from mlxpool.worker.grammar.assertions import InvalidSchema
from mlxpool.worker.grammar.formats import Format, Reasoning
from mlxpool.worker.grammar.schema import read

# A reason is quoted in a header: the compiler's own can be pages.
_REASON_CHARS = 300

# Tools that a warning names.
_NAMED = 3

# Of a form's text. The longest that are sent have some hundred kilobytes; compiled they take ten times that.
TEXT_LIMIT_BYTES = 1024 * 1024

# The instruction goes into the prompt, of which the client knows nothing: about 10,000 tokens.
INSTRUCTION_LIMIT_CHARS = 32 * 1024

_INSTRUCTIONS = {
    "json_schema": "Answer with one JSON value that conforms to this JSON schema, and nothing else:\n",
    "json_object": "Answer with one JSON object, and nothing else.",
    "regex": "Answer with text that this regular expression matches as a whole, and nothing else:\n",
    "grammar": "Answer with text of this grammar, which begins at its rule root, and nothing else:\n",
    "choice": "Answer with one of these texts, and nothing else:\n",
}


class GrammarSpec(msgspec.Struct, frozen=True):
    """A grammar to compile: a structural tag as JSON text. Equal texts are equal grammars."""

    text: str


class Demand(msgspec.Struct, frozen=True):
    """What decides the form of an answer. family: the tool family of the model. reasoning: the block that may
    come first, None where thinking is off or there is none. markers: ids of this vocabulary's special tokens
    that are markers (`GrammarService.markers`)."""

    structure: Structure | None = None
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    family: str | None = None
    reasoning: Reasoning | None = None
    markers: Mapping[str, int] = {}

    @property
    def is_forced(self) -> bool:
        """Whether a call must be made."""
        return self.choice.mode in ("required", "one")

    @property
    def field(self) -> str:
        """Where the form was asked for, for messages."""
        return "tools" if self.is_forced or self.structure is None else self.structure.field


class Enforced(msgspec.Struct, frozen=True):
    """A grammar. family: how calls in the answer are to be read, None where the grammar has none."""

    spec: GrammarSpec
    family: str | None = None
    warnings: tuple[str, ...] = ()


class Instructed(msgspec.Struct, frozen=True):
    """No grammar: the instruction for a system message, and what the answer warns of."""

    instruction: str
    warning: str


Decision = Enforced | Instructed


def decide(demand: Demand, *, loose: bool = False) -> Decision | None:
    """How this answer's form is held to, None where it has none.

    loose: forced calls take any object, see `give_up`. Raises ApiError 400.
    """
    structure = demand.structure
    _check_size(demand)
    if demand.is_forced:
        wanted = _wanted(demand)
        forced = tools.calls(
            wanted,
            demand.family,
            # Who names a function wants that call.
            parallel=demand.parallel and demand.choice.mode == "required",
            markers=demand.markers,
            loose=loose,
        )
        return _enforced(demand, forced.format, forced)
    if structure is None:
        return None
    answer, why = _answer(structure)
    if answer is None:
        return _not_enforced(structure, why)
    if demand.reasoning is not None and demand.reasoning.answer:
        header = formats.literal(demand.reasoning.answer, demand.markers)
        answer = formats.sequence(*header, answer)
    if not demand.tools or demand.choice.mode == "none" or demand.family is None:
        return _enforced(demand, answer, None)
    may = tools.calls(
        list(enumerate(demand.tools)), demand.family, parallel=demand.parallel, markers=demand.markers
    )
    return _enforced(demand, formats.either(answer, may.format), may)


def _wanted(demand: Demand) -> list[tuple[int, Tool]]:
    """The tools that a forced call may call, with their places in the request."""
    return [
        (place, tool)
        for place, tool in enumerate(demand.tools)
        if demand.choice.mode == "required" or tool.name == demand.choice.name
    ]


def _check_size(demand: Demand) -> None:
    """Raises ApiError 400 where the text that a grammar would be made of is too long to look into."""
    if demand.is_forced:
        sizes = sum(_size(tool.parameters) for _, tool in _wanted(demand))
    elif demand.structure is None:
        return
    else:
        sizes = _size(demand.structure.value)
        if sizes <= TEXT_LIMIT_BYTES and demand.tools and demand.choice.mode != "none":
            tools_size = sum(_size(tool.parameters) for tool in demand.tools)
            if tools_size > TEXT_LIMIT_BYTES:
                raise _too_large("tools", tools_size)
    if sizes > TEXT_LIMIT_BYTES:
        raise _too_large(demand.field, sizes)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    try:
        return len(msgspec.json.encode(value))
    except RecursionError:
        # Told of where its grammar is written out.
        return 0


def _too_large(field: str, size_bytes: int) -> ApiError:
    return invalid(
        field,
        f"{field} has {size_bytes} bytes of form to hold an answer to; at most {TEXT_LIMIT_BYTES} work",
    )


def unheld(demand: Demand, *, instructed: bool = False) -> tuple[str, ...]:
    """Warnings of what the request is strict about and no grammar takes up, whatever becomes of the others.

    instructed: the answer's form is only asked for in words, and calls with it.
    """
    structure = demand.structure
    if demand.is_forced:
        if structure is None or not structure.strict:
            return ()
        return (f"grammar not enforced: {structure.field} beside a call that must be made",)
    if structure is not None and not instructed:
        return ()
    strict = [place for place, tool in enumerate(demand.tools) if tool.strict]
    if not strict or demand.choice.mode == "none":
        return ()
    named = ", ".join(f"tools[{place}]" for place in strict[:_NAMED])
    more = f" and {len(strict) - _NAMED} more" if len(strict) > _NAMED else ""
    return (f"grammar not enforced: strict of {named}{more}, whose calls no tool_choice forces",)


def give_up(demand: Demand, reason: str) -> Decision:
    """What is done with a grammar that `decide` gave and the compiler refused, for the compiler's reason.

    Forced calls come back as a grammar that takes any arguments, which always compiles. Raises ApiError 400
    `unsupported_schema` where strict was asked for.
    """
    reason = _one_line(reason)
    if not demand.is_forced:
        assert demand.structure is not None
        return _not_enforced(demand.structure, reason)
    for place, tool in enumerate(demand.tools):
        if tool.strict and (demand.choice.mode == "required" or tool.name == demand.choice.name):
            field = tool.field_at(place)
            raise error(
                "unsupported_schema",
                f"{field} can't be enforced: {reason}; make it simpler, or send strict: false",
                param=field,
            )
    decision = decide(demand, loose=True)
    assert isinstance(decision, Enforced)
    return Enforced(decision.spec, decision.family, (f"grammar not enforced: {reason}",))


def invalid_text(demand: Demand, reason: str) -> ApiError | None:
    """The 400 for a text that the compiler could not even read, None where its text was ours.

    What is no grammar at all is the client's to mend; the words of its own would not help the model.
    """
    structure = demand.structure
    if demand.is_forced or structure is None or structure.kind != "grammar":
        return None
    return invalid(structure.field, f"{structure.field} is no grammar: {_one_line(reason)}")


def _one_line(text: str) -> str:
    return cut(" ".join(text.split()), _REASON_CHARS)


def _enforced(demand: Demand, answer: Format, called: tools.Forced | None) -> Enforced:
    whole = formats.after_reasoning(demand.reasoning, answer, demand.markers)
    tag = {"type": "structural_tag", "format": whole}
    try:
        text = msgspec.json.encode(tag).decode()
    except RecursionError as err:
        raise invalid(demand.field, f"{demand.field} is nested too deeply to be a schema") from err
    spec = GrammarSpec(text)
    return Enforced(spec) if called is None else Enforced(spec, called.family, called.warnings)


def _not_enforced(structure: Structure, why: str) -> Instructed:
    field = structure.field
    if structure.strict:
        raise error(
            "unsupported_schema",
            f"{field} can't be enforced: {why}; leave it out, or send strict: false to have it asked for in "
            "words",
            param=field,
        )
    value: Any = structure.value
    text = "" if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()
    instruction = _INSTRUCTIONS[structure.kind] + text
    if len(instruction) > INSTRUCTION_LIMIT_CHARS:
        raise error(
            "unsupported_schema",
            f"{field} can't be enforced: {why}; nor asked for in words: that takes {len(instruction)} "
            f"characters of prompt, and {INSTRUCTION_LIMIT_CHARS} are allowed; make it simpler",
            param=field,
        )
    return Instructed(instruction, f"grammar not enforced: {why}")


def _answer(structure: Structure) -> tuple[Format | None, str]:
    """The structure's format, or None and why it can't be enforced."""
    field, value = structure.field, structure.value
    if structure.kind == "json_object":
        return formats.json_schema({"type": "object", "additionalProperties": True}), ""
    if structure.kind == "choice":
        return formats.either(*map(formats.constant, value)), ""
    if structure.kind == "grammar":
        return {"type": "grammar", "grammar": value}, ""
    if structure.kind == "regex":
        fault = pattern.unsupported(value)
        if fault is None:
            return formats.regex(value), ""
        if fault.invalid:
            raise invalid(field, f"{field} is no regular expression: {fault.what} in {quoted(value)}")
        return None, f"the regular expression uses {fault.what}"
    try:
        reading = read(value)
    except InvalidSchema as err:
        raise invalid(field, f"{field} is no JSON schema: {err}") from err
    if reading.unenforced:
        return None, f"the schema uses {', '.join(map(str, reading.unenforced[:3]))}"
    return formats.json_schema(reading.schema), ""
