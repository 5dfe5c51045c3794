"""What a grammar costs: the first one of a worker, one more, a token's mask, and the memory of it all.

On the starter's tokenizer (49,152 tokens), each grammar over the sample answers below it. The compiling
process is started anew each round, but this process keeps what it has imported: the first grammar of a worker
is measured in the first round alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import psutil

from mlxpool.shared.api.structure import Structure
from mlxpool.shared.api.tools import Tool, ToolChoice
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.worker.grammar.service import GrammarService
from mlxpool.worker.grammar.spec import Demand
from tests.bench import common
from tests.tools.starter_fixture import starter_model

WIDTH = 49_152
# A constrained stream may cost a tenth; the mask is filled while the forward runs, which takes milliseconds.
FILL_LIMIT_US = 300.0

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "address": {"$ref": "#/$defs/address"},
    },
    "required": ["name", "age", "email", "tags", "address"],
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        }
    },
}
_ANSWER = """{"name": "Anna Smith", "age": 41, "email": "anna@example.org", "tags": ["red", "blue"],
 "address": {"street": "12 Long Lane, second floor", "city": "York"}, "note": "anything at all, and more"}"""
_CALL = '<tool_call>\n{"name": "save", "arguments": ' + _ANSWER + "}\n</tool_call>"


def cases() -> dict[str, tuple[Demand, str]]:
    """What is asked for and a fitting answer, by name."""

    def structure(kind: str, value: object = None) -> Demand:
        return Demand(Structure(kind, "response_format", value))  # type: ignore[arg-type]

    wide = {"type": "object", "properties": {f"field{n}": {"type": "string"} for n in range(100)}}
    thousand = [f"value {n}" for n in range(1000)]
    return {
        "a schema": (structure("json_schema", _PERSON), _ANSWER),
        "any object": (structure("json_object"), _ANSWER),
        "an open object of 100 fields": (structure("json_schema", wide), '{"field7": "seven", "more": 1}'),
        "an enum of 1,000": (structure("json_schema", {"enum": thousand}), '"value 7"'),
        "1,000 choices": (structure("choice", thousand), "value 77"),
        "a forced call": (
            Demand(tools=(Tool("save", _PERSON, {}),), choice=ToolChoice("required"), family="json_tools"),
            _CALL,
        ),
        "a regular expression": (
            structure("regex", r"[A-Z][a-z]+( [a-z]+)*\. \d{4}-\d{2}"),
            "The end of it. 2026-11",
        ),
    }


async def measure(report: common.Report, tokenizer: ChatTokenizer, rounds: int) -> None:
    """Fills the report's rows."""
    here = psutil.Process()
    before = here.memory_info().rss
    first, start = report.row("first grammar of a worker", "s"), report.row("first of a new process", "s")
    rows = {
        name: (
            report.row(f"compiled: {name}", "ms"),
            report.row(f"mask: {name}", "us"),
            report.row(f"constraint made: {name}", "us"),
        )
        for name in cases()
    }
    for turn in range(rounds):
        service = GrammarService(tokenizer, WIDTH, 8)
        began = time.perf_counter()
        await service.hold(Demand(Structure("json_schema", "response_format", {"const": turn})))
        (start if turn else first).samples.append(time.perf_counter() - began)
        if turn == 0:
            report.figures["worker grows by, MB"] = (here.memory_info().rss - before) / 1e6
        for name, (demand, answer) in cases().items():
            await one(service, demand, tokenizer.encode(answer), rows[name])
        helper = psutil.Process(service.helper_pid)
        report.figures["compiling process, MB RSS"] = helper.memory_info().rss / 1e6
        if hasattr(helper.memory_full_info(), "pss"):
            report.figures["compiling process, MB PSS"] = helper.memory_full_info().pss / 1e6
            report.figures["worker, MB PSS"] = here.memory_full_info().pss / 1e6
        await service.close()


async def one(
    service: GrammarService, demand: Demand, ids: list[int], rows: tuple[common.Row, common.Row, common.Row]
) -> None:
    """One grammar compiled, and a row led through an answer of it."""
    compiled, mask, made = rows
    began = time.perf_counter()
    held = await service.hold(demand)
    compiled.samples.append((time.perf_counter() - began) * 1e3)
    if held.compiled is None:
        compiled.failed.append(str(held.warnings))
        return
    began = time.perf_counter()
    constraint = held.compiled.constraint()
    made.samples.append((time.perf_counter() - began) * 1e6)
    words = np.zeros(WIDTH // 32, dtype=np.int32)
    for token in ids:
        began = time.perf_counter()
        constraint.fill(words)
        mask.samples.append((time.perf_counter() - began) * 1e6)
        if not constraint.accept(token):
            mask.failed.append(f"token {token} is refused")
            break
    constraint.release()


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starter", type=Path)
    args = parser.parse_args()
    report = common.report("grammar", rounds=args.rounds, width=WIDTH, cores=os.cpu_count())
    tokenizer = ChatTokenizer.open(args.starter or starter_model())
    asyncio.run(measure(report, tokenizer, args.rounds))
    for row in report.rows:
        row.settle()
    masks = [row.median or 0.0 for row in report.rows if row.name.startswith("mask")]
    report.targets = [common.Target("the dearest mask, median", max(masks), FILL_LIMIT_US, "us")]
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
