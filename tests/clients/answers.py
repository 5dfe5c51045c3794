"""Answers that a scripted worker gives: a worker's own events, and the tools that they call.

Every protocol writes the same ones, so each has a table of what exactly it makes of them (test_exact_*.py).
"""

from __future__ import annotations

from typing import Any

from mlxpool.shared.errors import error
from mlxpool.worker.text.events import (
    Event,
    Failure,
    Finish,
    Prefilled,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)

PROMPT, CACHED, COMPLETION = 12, 4, 7
FAILED = "the model has lost its thread"

_BEGUN = Prefilled(PROMPT, CACHED)
_COUNTED = Usage(PROMPT, COMPLETION, CACHED)


def _call(index: int, call_id: str, name: str, *pieces: str) -> list[Event]:
    return [
        ToolCallStart(index, call_id, name),
        *(ToolCallArguments(index, piece) for piece in pieces),
        ToolCallEnd(index),
    ]


# Name of the model → what it says.
ANSWERS: dict[str, list[Event]] = {
    "text": [_BEGUN, Text("Hello"), Text(", wörld"), _COUNTED, Finish("stop")],
    "reasoning": [
        _BEGUN, Reasoning("Two and"), Reasoning(" two."), Text("Fo"), Text("ur"), _COUNTED, Finish("stop"),
    ],
    "calls": [
        _BEGUN,
        Text("Let me see."),
        *_call(0, "call_a", "weather", '{"city":', ' "Oslo"}'),
        *_call(1, "call_b", "weather", '{"city": "Rome"}'),
        _COUNTED,
        Finish("tool_calls"),
    ],
    "custom": [
        _BEGUN,
        *_call(0, "call_a", "shell", '{"input":', ' "ls \\"a', ' b\\""}'),
        _COUNTED,
        Finish("tool_calls"),
    ],
    "namespaced": [
        _BEGUN, *_call(0, "call_a", "files__read", '{"city": "Oslo"}'), _COUNTED, Finish("tool_calls"),
    ],
    "stop": [_BEGUN, Text("One,"), Text(" two,"), _COUNTED, Finish("stop", " three")],
    "length": [_BEGUN, Text("The capital"), Text(" of"), _COUNTED, Finish("length")],
    "failure": [_BEGUN, Text("Half a"), Failure(error("internal_error", FAILED))],
}  # fmt: skip

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
