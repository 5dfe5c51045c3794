"""Answers run through the text machines: recorded ones, in any chunking, and what comes out of them."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared.prompt.reasoning_families import REASONING_FAMILIES
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.events import (
    Reasoning,
    Text,
    TextEvent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from mlxpool.worker.text.format import AnswerFormat, DeclaredTool
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.tools.families import TOOL_FAMILIES, family_tokens

STREAMS = Path(__file__).resolve().parents[1] / "data" / "streams"


class Case(msgspec.Struct):
    """One recorded answer. events: what a client sees, as ["text" or "reasoning", text] and ["call", name,
    arguments]. literal: it reads the same where the markers are ordinary letters."""

    name: str
    text: str
    events: list[list[Any]]
    starts_inside: bool = False
    literal: bool = True


class Recording(msgspec.Struct):
    """The recorded answers of one family."""

    family: str
    format: str
    tools: str | None
    reasoning: str | None
    declared: list[DeclaredTool]
    cases: list[Case]

    def answer_format(self, case: Case, stops: tuple[str, ...] = ()) -> AnswerFormat:
        return AnswerFormat(
            stops=stops,
            reasoning=self.reasoning,
            starts_inside=case.starts_inside,
            tools=self.tools,
            declared=tuple(self.declared),
        )


@functools.cache
def recordings() -> dict[str, Recording]:
    files = sorted(STREAMS.glob("*.json"))
    return {file.stem: msgspec.json.decode(file.read_bytes(), type=Recording) for file in files}


def every_case() -> list[tuple[Recording, Case]]:
    return [(recording, case) for recording in recordings().values() for case in recording.cases]


def parser(name: str) -> Any:
    """mlx-lm's parser of a tool family."""
    return import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call


def parser_of(family: str | None) -> Any:
    known = TOOL_FAMILIES.get(family or "")
    return parser(known.name) if known is not None and known.needs_parser else None


@functools.cache
def special_marks() -> Marks:
    """A vocabulary in which every marker of every family is a token, the tool and channel ones special."""
    tokens = sorted(family_tokens() | {t for family in REASONING_FAMILIES.values() for t in family.tokens})
    ids = {token: number for number, token in enumerate(tokens)}
    ordinary = {token for token in tokens if token.endswith("think>")}
    return Marks(tokens, ids.get, lambda number: tokens[number] not in ordinary, ordinary)


class Pieces:
    """A source that gives the pieces it was given: token n is the nth of them."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return ""

    @property
    def in_character(self) -> bool:
        return False


def machine(pieces: Sequence[str], answer_format: AnswerFormat, marks: Marks | None = None) -> AnswerText:
    """Ids are call-0, call-1 and so on."""
    numbers = itertools.count()
    return AnswerText(
        Pieces(pieces),
        answer_format,
        marks,
        parser_of(answer_format.tools),
        lambda: f"call-{next(numbers)}",
    )


def run(
    pieces: Sequence[str], answer_format: AnswerFormat, marks: Marks | None = None, cut: bool = False
) -> list[TextEvent]:
    """All events of an answer that came in these pieces, merged. cut: by a limit, not ended by the model."""
    answer = machine(pieces, answer_format, marks)
    events = [event for token in range(len(pieces)) for event in answer.push(token)]
    return merged([*events, *answer.flush(cut)])


def merged(events: Iterable[TextEvent]) -> list[TextEvent]:
    """Neighbours of one kind as one event."""
    out: list[TextEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments):
            out[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            out.append(event)
    return out


def seen(events: Iterable[TextEvent]) -> list[list[Any]]:
    """Merged events as a recording writes them; a call without an end says so."""
    out: list[list[Any]] = []
    name = ""
    arguments = ""
    for event in events:
        if isinstance(event, Text):
            out.append(["text", event.text])
        elif isinstance(event, Reasoning):
            out.append(["reasoning", event.text])
        elif isinstance(event, ToolCallStart):
            name, arguments = event.name, ""
            out.append(["call cut short", name])
        elif isinstance(event, ToolCallArguments):
            arguments += event.text
        elif isinstance(event, ToolCallEnd):
            out[-1] = ["call", name, json.loads(arguments)]
    return out


def split(text: str, cuts: Iterable[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]
