"""What form an answer must have, in whichever field it was asked for."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Structure(msgspec.Struct, frozen=True):
    """The form that won by precedence. value: the schema (object or bool) of json_schema, the pattern of
    regex, the text of grammar (EBNF), the strings of choice, None for json_object. strict: whether the
    request insists. field: where it was asked for, for messages."""

    kind: Literal["grammar", "json_schema", "json_object", "regex", "choice"]
    field: str
    value: Any = None
    strict: bool = False
