"""The request of `POST /v1/completions`: prompts that go to the model as they are.

No template is asked, so a model without one completes too. Whether the vocabulary has the ids of a prompt is
for the model to say.
"""

from __future__ import annotations

from typing import Any

from mlxpool.shared.api import read, sampling, table
from mlxpool.shared.api.asked import Asked, RawPrompt
from mlxpool.shared.api.chat import ChatRequest, answers, read_adapter, read_model
from mlxpool.shared.api.completion_fields import (
    ADVICE,
    FIELDS,
    PROMPTS_LIMIT,
    USUAL_MAX_TOKENS,
)
from mlxpool.shared.api.structure import read_structure

_FIELD = "prompt"
# Longer than any vocabulary: what a number of JSON may be before it is no id whatever the model.
_ID_HIGH = 2**31 - 1


def parse(body: bytes) -> Asked:
    """A body as prompts and options. Raises ApiError 400 naming the field, its value and what would work."""
    return read_request(read.json_object(body))


def read_request(fields: dict[str, Any]) -> Asked:
    """`parse` for a body that is decoded already."""
    table.check(FIELDS, fields, ADVICE)
    prompts, names = _prompts(fields.get(_FIELD))
    request = ChatRequest(
        messages=(),
        model=read_model(fields.get("model")),
        max_tokens=sampling.MAX_TOKENS.read(fields, "max_tokens"),
        usual_max_tokens=USUAL_MAX_TOKENS,
        stop=sampling.stops("stop", fields.get("stop")),
        top_logprobs=sampling.ALTERNATIVES.read(fields, "logprobs"),
        structure=read_structure(fields),
        prompt_field=_FIELD,
        adapter=read_adapter("adapter", fields.get("adapter")),
        **answers(fields),
        **sampling.options(fields),
    )
    return Asked(request, prompts, prompt_fields=names)


def _prompts(value: object) -> tuple[tuple[RawPrompt, ...], tuple[str, ...]]:
    """The prompts, and what each is called."""
    if isinstance(value, str) and value:
        return (value,), (_FIELD,)
    if not isinstance(value, list) or not value:
        what = "is missing; it must be" if value is None else "must be"
        held = "" if value is None else f", not {read.quoted(value)}"
        raise read.invalid(
            _FIELD, f"{_FIELD} {what} a non-empty string, a list of token ids, or a list of either{held}"
        )
    if not isinstance(value[0], str | list):
        return (_ids(_FIELD, value),), (_FIELD,)
    if len(value) > PROMPTS_LIMIT:
        raise read.invalid(
            _FIELD, f"{_FIELD} holds {len(value)} prompts; at most {PROMPTS_LIMIT} work in one request"
        )
    names = tuple(f"{_FIELD}[{place}]" for place in range(len(value)))
    first = type(value[0])
    for name, prompt in zip(names, value, strict=True):
        if not isinstance(prompt, first) or not prompt:
            kind = "string" if first is str else "list of token ids"
            raise read.invalid(name, f"{name} must be a non-empty {kind}, not {read.quoted(prompt)}")
    if first is str:
        return tuple(value), names
    return tuple(_ids(name, prompt) for name, prompt in zip(names, value, strict=True)), names


def _ids(name: str, values: list[Any]) -> tuple[int, ...]:
    for place, token in enumerate(values):
        if type(token) is not int or not 0 <= token <= _ID_HIGH:
            raise read.invalid(
                f"{name}[{place}]", f"{name}[{place}] must be a token's id, not {read.quoted(token)}"
            )
    return tuple(values)
