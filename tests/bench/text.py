"""What the text machines cost per token, every one of them on: detokeniser, reasoning, tool calls, stops.

Answers of 1,024 to 32,768 tokens of four letters: prose, code full of the letters that markers begin with, a
tool call with one long string in it, one with thousands of small values, and a block that is held until its
bound. Processor time of this thread, since that is what it takes from the engine's; the lengths in turn, so
that a slow moment of the machine hits them all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tokenizers import Tokenizer, decoders, models

from mlxpool.worker.text.detokeniser import ByteDetokeniser, Detokeniser, WindowDetokeniser
from mlxpool.worker.text.format import AnswerFormat, DeclaredTool
from mlxpool.worker.text.model import ModelText
from tests.bench import common

TOKEN_LIMIT_US = 60.0
# Flat: a token of the longest answer against one of the shortest. Twice leaves room for caches and noise.
GROWTH_LIMIT = 2.0
LENGTHS = (1024, 8192, 32768)
_TOKEN_CHARS = 4
# The answer that goes through the other detokeniser; the rest are byte-level.
_WINDOWED = "prose, SentencePiece"

_PROSE = "The river froze early that year, and the boats stayed where they were until spring. "
_CODE = "if (a < b && c[i] <= d) {\n    print(f\"<{x}>\\t{'{'}\")  # [1, 2]\n}\n"
_STOPS = ("\n\nHuman:", "<|user|>", "```end", "END OF ANSWER")
# As many and as long as a request may have; each of them has begun to come all the time.
_HOSTILE = "stops that nearly come"
_HOSTILE_STOPS = (*("a" * 40 + chr(ord("c") + place) * 984 for place in range(15)), "a" * 1023 + "b")
_TOOL = DeclaredTool("write", {"properties": {"content": {"type": "string"}, "items": {"type": "array"}}})


def _repeated(text: str, chars: int) -> str:
    return (text * (chars // len(text) + 1))[:chars]


def _json_call(arguments: dict[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': arguments})}\n</tool_call>"


def answers(chars: int) -> dict[str, tuple[str, str]]:
    """Tool family and text by name, each about `chars` long."""
    thought = f"<think>\n{_repeated(_PROSE, chars // 4)}\n</think>\n\n"
    code = _repeated(_CODE, chars)
    return {
        "prose": ("json_tools", thought + _repeated(_PROSE, chars * 3 // 4)),
        _WINDOWED: ("json_tools", thought + _repeated(_PROSE, chars * 3 // 4)),
        "code": ("json_tools", code),
        "JSON call, one string": ("json_tools", _json_call({"content": code})),
        "JSON call, small values": ("json_tools", _json_call({"items": [[1, "b", None]] * (chars // 17)})),
        "XML call, one string": (
            "qwen3_coder",
            f"<tool_call>\n<function=write>\n<parameter=content>\n{code}\n</parameter>\n</function>\n</tool_call>",
        ),
        "Gemma call, one string": (
            "gemma4",
            f'<|tool_call>call:write{{content:<|"|>{code}<|"|>}}<tool_call|>',
        ),
        _HOSTILE: ("json_tools", "a" * chars),
        "a held block": ("pythonic", f"<|tool_call_start|>[write(content='{code}"),
    }


def measure(name: str, family: str, text: str) -> float:
    """Microseconds of processor time per token of the answer of that name."""
    pieces = [text[at : at + _TOKEN_CHARS] for at in range(0, len(text), _TOKEN_CHARS)]
    detokeniser: Detokeniser
    if name == _WINDOWED:
        tokenizer = sentencepiece(pieces)
        detokeniser = WindowDetokeniser(lambda ids: str(tokenizer.decode(list(ids))))
        ids = [tokenizer.token_to_id(piece.replace(" ", "▁")) for piece in pieces]
    else:
        known = [piece.encode() for piece in pieces]
        detokeniser = ByteDetokeniser(known.__getitem__)
        ids = list(range(len(pieces)))
    model = ModelText(lambda _: detokeniser, lambda _: None, lambda _: True, lambda _: _parse)
    stops = _HOSTILE_STOPS if name == _HOSTILE else _STOPS
    how = AnswerFormat(stops=stops, reasoning="think", tools=family, declared=(_TOOL,))
    answer = model.answer(how)
    began_ns = time.thread_time_ns()
    for token in ids:
        answer.push(token)
    answer.flush()
    return (time.thread_time_ns() - began_ns) / 1000 / len(ids)


def sentencepiece(pieces: list[str]) -> Tokenizer:
    """A vocabulary of these pieces with SentencePiece's decoder, for which ids are decoded in a window."""
    words = dict.fromkeys(piece.replace(" ", "▁") for piece in pieces)
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _parse(text: str, tools: object) -> object:
    raise ValueError(text, tools)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    report = common.report("text", rounds=args.rounds, lengths=LENGTHS, token_chars=_TOKEN_CHARS)
    rows = {(name, n): report.row(f"{name}, {n} tokens", "us") for name in answers(64) for n in LENGTHS}
    for _ in range(args.rounds):
        for length in LENGTHS:
            for name, (family, text) in answers(length * _TOKEN_CHARS).items():
                rows[name, length].samples.append(measure(name, family, text))
    medians = {key: row.settle().median or 0.0 for key, row in rows.items()}
    growth = {name: medians[name, LENGTHS[-1]] / medians[name, LENGTHS[0]] for name in answers(64)}
    report.figures = {f"growth of {name}": ratio for name, ratio in growth.items()}
    report.targets = [
        common.Target("the dearest token", max(medians.values()), TOKEN_LIMIT_US, "us"),
        # A held block looks at what it holds, up to its bound: dearer, and still under the limit.
        common.Target(
            "growth from 1k to 32k tokens",
            max(ratio for name, ratio in growth.items() if name != "a held block"),
            GROWTH_LIMIT,
            "times",
        ),
    ]
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
