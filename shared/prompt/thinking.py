"""Whether the model reasons before it answers, and how deep: what the template is told. Pure.

Precedence: chat_template_kwargs, then reasoning_effort (`none` is off, every other name is on), then the
server's setting, then the model's own default, about which the template is told nothing. Templates differ
in the name they read the switch under, and in whether they read a depth; one that reads neither belongs to
a model that does as it was trained, so asking it costs nothing and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec

from mlxpool.shared.api.chat import Effort
from mlxpool.shared.api.template_kwargs import SWITCHES

DEPTH = "reasoning_effort"

# Requests know six names, templates three or four; from the deepest down.
_DEEPEST = ("max", "xhigh", "high")
_SHALLOW: dict[str, str] = {"none": "low", "minimal": "low", "low": "low", "medium": "medium"}


class Thinking(msgspec.Struct, frozen=True):
    """enabled: None where nobody said. variables: for the template."""

    enabled: bool | None
    variables: dict[str, Any]


def decide(
    asked: bool | None,
    effort: Effort | None,
    server_default: bool | None,
    reads: Collection[str],
    template: str,
) -> Thinking:
    """asked: chat_template_kwargs' word. reads: the names that the template reads from outside."""
    by_effort = None if effort is None else effort != "none"
    enabled = next((said for said in (asked, by_effort, server_default) if said is not None), None)
    variables: dict[str, Any] = {}
    switch = next((name for name in SWITCHES if name in reads), None)
    if switch is not None and enabled is not None:
        variables[switch] = enabled
    if DEPTH in reads and effort is not None and not (effort == "none" and switch is not None):
        variables[DEPTH] = _SHALLOW.get(effort) or _deepest(template)
    return Thinking(enabled, variables)


def _deepest(template: str) -> str:
    """The deepest depth that the template names in quotes; `high` where it names none."""
    return next((name for name in _DEEPEST if re.search(rf"""["']{name}["']""", template)), "high")
