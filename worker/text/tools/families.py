"""The table of tool-call families: the markers, the reader, and what shows that a model is of the family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from mlxpool.shared.prompt.reasoning_families import HARMONY
from mlxpool.worker.text.format import DeclaredTool
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.block_calls import Parse, block_reader
from mlxpool.worker.text.tools.gemma_calls import GemmaReader
from mlxpool.worker.text.tools.harmony import TOKENS
from mlxpool.worker.text.tools.header_calls import kimi_reader, mistral_reader
from mlxpool.worker.text.tools.json_calls import read_json_calls
from mlxpool.worker.text.tools.machine import Reader, ToolMachine
from mlxpool.worker.text.tools.pair_calls import PairReader
from mlxpool.worker.text.tools.xml_calls import Dialect, XmlReader
from mlxpool.worker.text.tools.xtml_calls import XtmlReader

# What makes a family's reader for a vocabulary; the parser is None where the family needs none.
_Make = Callable[[Marks, Parse | None], Reader]


class ToolFamily(msgspec.Struct, frozen=True):
    """name: mlx-lm's where it has one. openers: what begins a call. tokens: what may be a special token in
    the markers. reader: makes the reader for a vocabulary. needs_parser: whether mlx-lm's parser of that name
    has to be handed in. bare: calls may begin the answer without an opener."""

    name: str
    openers: tuple[str, ...]
    reader: _Make
    tokens: tuple[str, ...] = ()
    needs_parser: bool = False
    bare: bool = False


def _json(closer: str) -> _Make:
    def make(marks: Marks, _parse: Parse | None) -> Reader:
        form = marks.form(closer)
        # Nothing but an opener tells that an object is meant for a function.
        return lambda machine, opener: read_json_calls(machine, form, announced=bool(opener))

    return make


def _xml(dialect: Dialect) -> _Make:
    return lambda marks, _parse: XmlReader(dialect, marks).reader()


def _pairs(prefix: str) -> _Make:
    return lambda marks, _parse: PairReader(prefix, marks).reader()


def _block(closer: str) -> _Make:
    def make(marks: Marks, parse: Parse | None) -> Reader:
        if parse is None:
            raise ValueError("this tool family needs mlx-lm's parser of its name")
        return block_reader(marks, parse, closer)

    return make


def _gemma(quote: str, closer: str) -> _Make:
    return lambda marks, _parse: GemmaReader(quote, closer, marks).reader()


_TAGS = ("<tool_call>", "</tool_call>")
_GLM_TOKENS = (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_QWEN = Dialect(_TAGS, ("<function=", "</function>"), ("<parameter=", "</parameter>"), newlines=True)
_MINICPM = Dialect(None, ("<function name=", "</function>"), ("<param name=", "</param>"), cdata=True)
_MINIMAX_TAGS = ("<minimax:tool_call>", "</minimax:tool_call>")
_MINIMAX = Dialect(_MINIMAX_TAGS, ("<invoke name=", "</invoke>"), ("<parameter name=", "</parameter>"))
_MUSE_TAGS = ("<atem:function_calls>", "</atem:function_calls>")
_MUSE = Dialect(
    _MUSE_TAGS,
    ("<atem:invoke", "</atem:invoke>"),
    ("<atem:parameter", "</atem:parameter>"),
    attributes=True,
    guess=True,
)
_KIMI_TOKENS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_LONGCAT_TOKENS = tuple(
    tag.replace("<", "<longcat_").replace("<longcat_/", "</longcat_") for tag in _GLM_TOKENS
)

TOOL_FAMILIES = {
    family.name: family
    for family in (
        ToolFamily("json_tools", _TAGS[:1], _json(_TAGS[1]), _TAGS),
        # Some models of the family leave the outer tag out.
        ToolFamily("qwen3_coder", (_TAGS[0], "<function="), _xml(_QWEN), _TAGS),
        ToolFamily("minicpm5", ("<function name=",), _xml(_MINICPM)),
        ToolFamily("minimax_m2", _MINIMAX_TAGS[:1], _xml(_MINIMAX), _MINIMAX_TAGS),
        ToolFamily("glm47", _TAGS[:1], _pairs(""), _GLM_TOKENS),
        ToolFamily("laguna", _TAGS[:1], _pairs(""), _GLM_TOKENS),
        ToolFamily("longcat", ("<longcat_tool_call>",), _pairs("longcat_"), _LONGCAT_TOKENS),
        ToolFamily(
            "gemma4",
            ("<|tool_call>",),
            _gemma('<|"|>', "<tool_call|>"),
            ("<|tool_call>", "<tool_call|>", '<|"|>'),
        ),
        ToolFamily(
            "mistral",
            ("[TOOL_CALLS]",),
            lambda marks, _: mistral_reader(marks),
            ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ),
        ToolFamily(
            "kimi_k2",
            ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            lambda marks, _: kimi_reader(marks),
            _KIMI_TOKENS,
        ),
        ToolFamily("llama3", ("<|python_tag|>",), _json(""), ("<|python_tag|>",), bare=True),
        ToolFamily(
            "function_gemma",
            ("<start_function_call>",),
            _gemma("<escape>", "<end_function_call>"),
            ("<start_function_call>", "<end_function_call>", "<escape>"),
        ),
        ToolFamily(
            "kimi_k3",
            ("<|open|>tools<|sep|>",),
            lambda marks, _: XtmlReader(marks).reader(),
            ("<|open|>", "<|close|>", "<|sep|>"),
        ),
        ToolFamily("muse_spark", _MUSE_TAGS[:1], _xml(_MUSE), _MUSE_TAGS),
        ToolFamily(
            "pythonic",
            ("<|tool_call_start|>",),
            _block("<|tool_call_end|>"),
            ("<|tool_call_start|>", "<|tool_call_end|>"),
            needs_parser=True,
        ),
    )
}

# Every name that `AnswerFormat.tools` may have.
TOOL_FAMILY_NAMES = (*TOOL_FAMILIES, HARMONY)


def family_tokens() -> frozenset[str]:
    """What may be a special token in the markers of any family."""
    return frozenset(TOKENS).union(*(family.tokens for family in TOOL_FAMILIES.values()))


def make_machine(
    family: ToolFamily,
    declared: Sequence[DeclaredTool],
    marks: Marks,
    parse: Parse | None,
    new_id: Callable[[], str],
) -> ToolMachine:
    """The machine for one answer. Raises ValueError when the family needs a parser and none was given."""
    openers = [form for opener in family.openers for form in marks.forms(opener)]
    return ToolMachine(openers, family.reader(marks, parse), declared, marks, new_id, family.bare)
