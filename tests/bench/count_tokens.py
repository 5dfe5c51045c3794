"""What counting a prompt's tokens takes: 50,000 characters of prose over HTTP, with the starter's tokenizer.

The text is this project's own pages, from another place each time, so that nothing of it is known already.
No worker runs. Beside it, what the first count takes, which reads the tokenizer.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.bench import common

CHARS = 50_000
LIMIT_MS = 30.0
# Code paths and the allocator are warm by then.
WARM_UP_ROUNDS = 3
MESSAGES = 50
MODEL = "starter"


def prose() -> str:
    """Text of several times the length that is asked for, from the pages of this project."""
    pages = [path.read_text() for path in sorted((common.REPO / "docs").glob("*.md"))]
    text = "\n".join(pages)
    return text * (2 * CHARS // len(text) + 2)


def bodies(text: str, place: int) -> dict[str, list[dict[str, Any]]]:
    """The same characters as one message, and as a conversation."""
    given = text[place : place + CHARS]
    each = CHARS // MESSAGES
    roles = ("user", "assistant")
    return {
        "one message": [{"role": "user", "content": given}],
        f"{MESSAGES} messages": [
            {"role": roles[n % 2], "content": given[n * each : (n + 1) * each]} for n in range(MESSAGES)
        ],
    }


def count_ms(client: http.client.HTTPConnection, messages: list[dict[str, Any]]) -> float:
    """Milliseconds from the request to its answer. Raises RuntimeError for anything but a count."""
    body = msgspec.json.encode({"model": MODEL, "messages": messages})
    start = time.perf_counter()
    client.request("POST", "/v1/messages/count_tokens", body)
    answer = client.getresponse()
    said = answer.read()
    took_ms = (time.perf_counter() - start) * 1000
    if answer.status != 200 or msgspec.json.decode(said)["input_tokens"] < CHARS // 20:
        raise RuntimeError(f"{answer.status}: {said[:300]!r}")
    return took_ms


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starter", type=Path, required=True, help="the starter model's folder")
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    report = common.report("count_tokens", rounds=args.rounds, chars=CHARS)
    text = prose()
    rows = {shape: report.row(f"{CHARS} characters, {shape}", "ms") for shape in bodies(text, 0)}
    first = report.row("the first count, which reads the tokenizer", "ms")
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as scratch:
        home, models = Path(scratch, "home"), Path(scratch, "models")
        home.mkdir()
        models.mkdir()
        (models / MODEL).symlink_to(args.starter.resolve())
        port = common.free_port()
        argv = common.scripted_pool(home, models, port)
        with common.serving(argv, port, Path(scratch, "log")):
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=common.START_TIMEOUT_S)
            for n in range(WARM_UP_ROUNDS + args.rounds):
                for shape, messages in bodies(text, n * 997 % CHARS).items():
                    took_ms = count_ms(client, messages)
                    if not first.samples:
                        first.samples.append(took_ms)
                    if n >= WARM_UP_ROUNDS:
                        rows[shape].samples.append(took_ms)
    for shape, row in rows.items():
        report.targets.append(common.Target(f"p50, {shape}", row.settle().median, LIMIT_MS, "ms"))
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
