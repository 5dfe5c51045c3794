"""From tokens to a row's events: how an answer ends, and what its reason says."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from mlxpool.worker.engine.answering import events_of
from mlxpool.worker.engine.group import Sampled
from mlxpool.worker.engine.row import Row
from mlxpool.worker.request.plan import Plan, Sampling
from mlxpool.worker.text.events import Event, Finish, ToolCallArguments, ToolCallEnd
from mlxpool.worker.text.format import AnswerFormat, DeclaredTool
from tests.tools.answers import machine

EOS = 1000
_GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=1)
_FORMATS = {
    family: AnswerFormat(tools=family, declared=(DeclaredTool("f", {}),))
    for family in ("qwen3_coder", "json_tools")
}


def answered(pieces: Sequence[str], how: AnswerFormat, max_tokens: int) -> list[Event]:
    """All events of a row whose tokens are these pieces and then an eos."""
    plan = Plan((1, 2), max_tokens, True, _GREEDY, frozenset({EOS}), how)
    row = Row(plan, machine(pieces, how), lambda _: None)
    events: list[Event] = []
    for token in (*range(len(pieces)), EOS):
        said, over = events_of(Sampled(row, token, None), "batch")
        events += said
        if over:
            break
    return events


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("qwen3_coder", "<tool_call><function=f><parameter=x>\n1\n</parameter>", {"x": "1"}),
        ("json_tools", '<tool_call>{"name": "f", "arguments": {"x": "ab', {"x": "ab"}),
    ],
)
def test_an_eos_closes_an_open_call_and_a_length_limit_does_not(
    family: str, text: str, arguments: dict[str, str]
) -> None:
    def written(events: list[Event]) -> str:
        return "".join(event.text for event in events if isinstance(event, ToolCallArguments))

    ended = answered(list(text), _FORMATS[family], max_tokens=len(text) + 1)
    assert json.loads(written(ended)) == arguments
    assert ended[-1] == Finish("tool_calls")
    cut = answered(list(text), _FORMATS[family], max_tokens=len(text))
    assert written(ended).startswith(written(cut))
    assert not any(isinstance(event, ToolCallEnd) for event in cut)
    assert cut[-1] == Finish("length")
