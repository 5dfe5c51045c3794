"""How the answer to one request is read: which machines its text goes through. Pure and frozen."""

from __future__ import annotations

from typing import Any

import msgspec


class DeclaredTool(msgspec.Struct, frozen=True):
    """A function that may be called. parameters: the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]


class AnswerFormat(msgspec.Struct, frozen=True):
    """reasoning: the family whose blocks are split off, None for a model without. starts_inside: the prompt
    has opened the block. tools: the family whose calls are looked for, None where none may be made. one_call:
    the answer is over with its first call. continues: the answer goes on from a text, so its first word's
    space is text too."""

    stops: tuple[str, ...] = ()
    reasoning: str | None = None
    starts_inside: bool = False
    tools: str | None = None
    declared: tuple[DeclaredTool, ...] = ()
    one_call: bool = False
    continues: bool = False
