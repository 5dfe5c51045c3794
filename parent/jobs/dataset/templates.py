"""What is asked of a model about a record, and what line its answer becomes. Pure.

A template with fields asks for a JSON object, and the server's grammar sees to its form; the others take the
answer as it is. A prompt of a person's own is a template whose question is the line's question too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

TEXT = "text"

Name = Literal["qa", "instructions", "summaries", "rewrite"]

# {name} is a field of the record; doubled braces are braces, and what is neither stays as it is.
_PLACE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_-]*)\}")


class Template(msgspec.Struct, frozen=True):
    """prompt: what the model is asked. fields: of the object that it answers with, the line's question and
    answer; None = it answers in plain text. question: the line's question where there are no fields."""

    prompt: str
    fields: tuple[str, str] | None = None
    question: str = ""


TEMPLATES: dict[Name, Template] = {
    "qa": Template(
        "Read the passage and write one question that it answers, and the answer. The question must make "
        "sense to somebody who has not seen the passage.\n\nPassage:\n{text}",
        fields=("question", "answer"),
    ),
    "instructions": Template(
        "Read the passage and write one task that somebody could give an assistant about its subject, and a "
        "good response to it. Neither may mention the passage.\n\nPassage:\n{text}",
        fields=("instruction", "response"),
    ),
    "summaries": Template(
        "Summarise the following text in a few sentences. Answer with the summary alone.\n\n{text}",
        question="Summarise the following text in a few sentences.\n\n{text}",
    ),
    "rewrite": Template(
        "Rewrite the following text in other words, with the same meaning. Answer with the new text alone."
        "\n\n{text}",
        question="Rewrite the following text in other words, with the same meaning.\n\n{text}",
    ),
}


def of_prompt(prompt: str) -> Template:
    """The template that a person's own prompt is."""
    return Template(prompt, question=prompt)


def places(prompt: str) -> set[str]:
    """The fields that a prompt names."""
    return {match[1] for match in _PLACE.finditer(prompt) if match[1] is not None}


def filled(prompt: str, record: Mapping[str, str]) -> str:
    """The prompt with a record's fields in their places. The record has them all."""

    def value(match: re.Match[str]) -> str:
        return match[0][0] if match[1] is None else record[match[1]]

    return _PLACE.sub(value, prompt)


def answer_format(template: Template) -> dict[str, Any] | None:
    """`response_format` of the request, None where the answer is plain text."""
    if template.fields is None:
        return None
    schema = {
        "type": "object",
        "properties": {field: {"type": "string", "minLength": 1} for field in template.fields},
        "required": list(template.fields),
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "line", "schema": schema, "strict": True}}


def line(template: Template, record: Mapping[str, str], answer: str) -> dict[str, Any] | None:
    """The dataset's line for an answer, None where it is none: empty, or not the object asked for."""
    question, reply = filled(template.question, record), answer.strip()
    if template.fields is not None:
        try:
            said = msgspec.json.decode(answer, type=dict[str, str])
            question, reply = (said[field].strip() for field in template.fields)
        except (msgspec.MsgspecError, KeyError, RecursionError, UnicodeError):
            return None
    if not question or not reply:
        return None
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]}
