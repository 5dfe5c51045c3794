"""Functions that a request declares, and whether they must be called."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Tool(msgspec.Struct, frozen=True):
    """A declared function. parameters: JSON schema of its arguments. written: the tool as the client wrote
    it, which is what templates render."""

    name: str
    parameters: dict[str, Any]
    written: dict[str, Any]
    description: str = ""
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True):
    """mode `one`: the function `name` must be called. `required`: some function must."""

    mode: Literal["none", "auto", "required", "one"] = "auto"
    name: str | None = None
