"""Every event of the streams of each protocol as Node's official clients yield them, by the tables that the
Python clients are held to (test_exact_*.py).

Node starts slowly, so one process asks all models of a protocol; each test looks at one model's lines.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import test_exact_chat as chat
from tests.clients import test_exact_messages as messages
from tests.clients import test_exact_responses as responses
from tests.clients.exact import named
from tests.tools.node_modules import run_lines
from tests.tools.served import Served

# The first run fetches the packages.
pytestmark = pytest.mark.timeout(480)

MODELS = ["text", "reasoning", "calls", "length"]
TABLES: dict[str, tuple[Any, list[str]]] = {
    "chat": (chat, MODELS),
    "messages": (messages, MODELS),
    "responses": (responses, [*MODELS, "custom"]),
}

Lines = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def lines(scripted: Served, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Protocol and model → what Node's client said of it, in order."""
    heard: Lines = {(kind, model): [] for kind, (_, models) in TABLES.items() for model in models}
    for kind, (table, models) in TABLES.items():
        folder = tmp_path_factory.mktemp(kind)
        said = run_lines("exact.mjs", folder, scripted.url, ",".join(models), kind, given=table.ASKED)
        for line in said:
            heard[kind, line.pop("model")].append(line)
    return heard


def whole(kind: str, model: str) -> Any:
    """The table's whole answer, with what the client itself puts in."""
    answer = TABLES[kind][0].final(model)
    if kind != "responses":
        return answer
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return {**answer, "output_text": "".join(part["text"] for part in parts)}


@pytest.mark.parametrize(("kind", "model"), [(kind, one) for kind in TABLES for one in TABLES[kind][1]])
def test_every_event_and_the_whole_answer(lines: Lines, kind: str, model: str) -> None:
    *events, last = lines[kind, model]
    assert named([line["event"] for line in events]) == TABLES[kind][0].every_event(model)
    assert named([last["whole"]]) == [whole(kind, model)]
