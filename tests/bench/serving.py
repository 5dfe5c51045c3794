"""Decoding as a client sees it: through the port, against loops and servers without one.

A lone greedy stream through the port, against mlx-lm's own loop in a process of its own; eight greedy streams
at once, against mlx_lm.server; and a stream that a JSON schema constrains, against one that nothing does.
Same folder, same environment (OpenBLAS preloaded on the CPU backend), same prompts, one of each in turn. A
lone stream's rate counts tokens after the first, so that prefill is outside; eight streams' counts all of it.
No prompt's answer ends by itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.shared import backend
from mlxpool.shared.chat import ChatTokenizer
from tests.bench import common

LONE_LIMIT, EIGHT_LIMIT, CONSTRAINED_LIMIT = 0.95, 1.0, 0.9
STREAMS = 8
STORY = "Write a very long story about a lighthouse keeper, the sea and the number {}."
# Nothing but digits, for ever: the grammar masks nearly all of the vocabulary at each token.
LIST_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 4000}
MODEL = "starter"

# Tokens after the first, per second.
Rate = Callable[[int], float]


class PlainLoop:
    """tests/bench/plain_loop.py and its pipe."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        script = Path(__file__).with_name("plain_loop.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        assert self._stdout.readline() == "ready\n"

    def rate(self, prompt: list[int], tokens: int) -> float:
        self._stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        self._stdin.flush()
        answer = json.loads(self._stdout.readline())
        return float(answer["tokens"] / answer["seconds"])

    def close(self) -> None:
        self._stdin.close()
        self.process.wait(30)


@contextmanager
def plain_loop(folder: Path, env: dict[str, str]) -> Iterator[PlainLoop]:
    loop = PlainLoop(folder, env)
    try:
        yield loop
    finally:
        loop.close()


class Times:
    """Of one stream: when its first and its last text came, and its completion tokens."""

    first_s = last_s = 0.0
    tokens = 0


def stream(port: int, body: dict[str, Any]) -> Times:
    """One streamed chat. Raises RuntimeError for anything but a whole stream."""
    times = Times()
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:500]!r}")
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if chunk.get("usage"):
            times.tokens = chunk["usage"]["completion_tokens"]
        if any(choice["delta"].get("content") for choice in chunk["choices"]):
            times.last_s = time.perf_counter()
            times.first_s = times.first_s or times.last_s
    connection.close()
    if times.tokens < 2:
        raise RuntimeError(f"a stream of {times.tokens} tokens")
    return times


def lone_rate(port: int, body: dict[str, Any]) -> float:
    times = stream(port, body)
    return (times.tokens - 1) / (times.last_s - times.first_s)


def together_rate(port: int, bodies: list[dict[str, Any]]) -> float:
    """All tokens, over the time from the requests to the last text: who prefills all prompts before the first
    token and who prefills them beside the others' tokens are asked the same."""
    began_s = time.perf_counter()
    done: list[Times] = []
    threads = [threading.Thread(target=lambda body=body: done.append(stream(port, body))) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(done) != len(bodies):
        raise RuntimeError(f"{len(bodies) - len(done)} streams failed")
    return sum(times.tokens for times in done) / (max(times.last_s for times in done) - began_s)


def story(number: int, tokens: int, model: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": STORY.format(number)}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens, **fields}


def measure(report: common.Report, starter: Path, rounds: int, tokens: int, only: str) -> None:
    """Rounds of each contender in turn."""
    env = backend.worker_environment(backend.detect(), common.clean_environment())
    report.settings |= {"rounds": rounds, "tokens": tokens, "LD_PRELOAD": env.get("LD_PRELOAD", "")}
    tokenizer = ChatTokenizer.open(starter)
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as name, ExitStack() as servers:
        scratch = Path(name)
        (scratch / "models").mkdir()
        (scratch / "models" / MODEL).symlink_to(starter.resolve())
        loop = servers.enter_context(plain_loop(starter, env))
        theirs, ours = common.free_port(), common.free_port()
        argv = [sys.executable, "-m", "mlx_lm", "server", "--port", str(theirs), "--model", str(starter)]
        servers.enter_context(common.serving(argv, theirs, scratch / "theirs.log", env=env))
        argv = [common.console_script(), "up", "--home", str(scratch / "home"), "--port", str(ours)]
        argv += ["--models", str(scratch / "models")]
        servers.enter_context(common.serving(argv, ours, scratch / "ours.log"))

        def plain(number: int) -> float:
            messages = [{"role": "user", "content": STORY.format(number)}]
            return loop.rate(tokenizer.encode(tokenizer.render(messages)), tokens)

        form = {"type": "json_schema", "json_schema": {"name": "f", "schema": LIST_SCHEMA, "strict": True}}
        pairs: list[tuple[str, Rate, str, Rate, float]] = [
            (
                "a lone stream through the port",
                lambda number: lone_rate(ours, story(number, tokens, MODEL)),
                "generate_step",
                plain,
                LONE_LIMIT,
            ),
            (
                "eight streams through the port",
                lambda number: together_rate(
                    ours, [story(number * STREAMS + row, tokens, MODEL) for row in range(STREAMS)]
                ),
                "mlx_lm.server",
                lambda number: together_rate(
                    theirs, [story(number * STREAMS + row, tokens, str(starter)) for row in range(STREAMS)]
                ),
                EIGHT_LIMIT,
            ),
            (
                "a stream that a schema constrains",
                lambda number: lone_rate(ours, story(number, tokens, MODEL, response_format=form)),
                "a lone stream through the port, beside it",
                lambda number: lone_rate(ours, story(number, tokens, MODEL)),
                CONSTRAINED_LIMIT,
            ),
        ]
        for one, one_rate, other, other_rate, limit in pairs:
            if only not in one:
                continue
            compare(report, rounds, one, one_rate, other, other_rate, limit)


def compare(
    report: common.Report, rounds: int, one: str, one_rate: Rate, other: str, other_rate: Rate, limit: float
) -> None:
    """Pairs in turn, each round the other one first; the target is the median of the pairs' ratios."""
    one_rate(10**6)
    other_rate(10**6)
    rows = {one: report.row(one, "tokens/s"), other: report.row(f"{other} ({one})", "tokens/s")}
    ratios = report.row(f"{one} / {other}", "1")
    for number in range(rounds):
        order = [(one, one_rate), (other, other_rate)]
        taken: dict[str, float] = {}
        for name, rate in order if number % 2 else reversed(order):
            try:
                taken[name] = rate(number)
                rows[name].samples.append(taken[name])
            except (OSError, RuntimeError) as err:
                rows[name].failed.append(str(err))
        if len(taken) == 2:
            ratios.samples.append(taken[one] / taken[other])
    median = ratios.settle().median
    report.targets.append(common.Target(ratios.name, median, limit, "1", at_most=False))


def main() -> int:
    """Measures and prints the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starter", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", default="", help="the pairs with this in their names")
    args = parser.parse_args()
    report = common.report("serving", starter=str(args.starter))
    measure(report, args.starter, args.rounds, args.tokens, args.only)
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
