"""What a long conversation costs at its next turn, through the port, with the starter model.

Each round has a prefix of its own (about 4,000 tokens) and takes, in turn: its first token cold; the same
prefix with another last question from memory; that question alone, without the prefix; and, once everything
is flushed, the worker ended and the files out of the page cache, the prefix with a third question from disk.
Beside the restore the same files are read by a plain sequential reader. Attention over the prefix is paid
whatever the prefix cost, so the rest is also timed behind keys and values that are in place already
(plain_rest.py). How fast files are written is kv_disk.py's question; what writing them costs a stream is
asked here: one right behind a prompt whose records are being written, against one on a server without a disk
tier.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.shared import backend
from mlxpool.shared.chat import ChatTokenizer
from tests.bench import common, serving

MODEL = "starter"
HIT_LIMIT, COLD_LIMIT, TWICE_LIMIT, READ_LIMIT, WRITING_LIMIT = 1.3, 0.1, 2.0, 0.8, 0.98
_TEXT = (
    "river lamp stone garden window letter winter bridge paper music table horse silver morning forest road "
    "island ship market clock valley harbour bread story mountain village door field rain summer"
)
WORDS = _TEXT.split()
READ_BYTES = 4 << 20


def first_token_s(port: int, messages: list[dict[str, str]]) -> tuple[float, dict[str, Any]]:
    """Seconds to the first text of a streamed answer, and its usage."""
    body = {
        "model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 2, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage: dict[str, Any] = {}
    with closing(HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        began_s, first_s = time.perf_counter(), 0.0
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read()[:500]!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                # An answer may end with its first token.
                said = any(c["delta"].get("content") or c.get("finish_reason") for c in chunk["choices"])
                if said and not first_s:
                    first_s = time.perf_counter() - began_s
    return first_s, usage


def prefix(seed: int, tokens: int, tokenizer: ChatTokenizer) -> str:
    """A text of about so many tokens that no other seed's begins like."""
    chance = random.Random(seed)
    words = [f"Notes number {seed}."]
    while len(tokenizer.encode(" ".join(words))) < tokens:
        words += chance.choices(WORDS, k=100)
    return " ".join(words)


def question(seed: int) -> str:
    chance = random.Random(1000 + seed)
    return f"Question {seed}: which of these words is the most pleasant one? " + " ".join(
        chance.choices(WORDS, k=40)
    )


def out_of_memory(paths: list[Path]) -> None:
    """Ask the system to forget these files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_s(paths: list[Path]) -> float:
    began_s = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass
    return time.perf_counter() - began_s


def rest_in_place_s(starter: Path, prefix_tokens: int, rest_tokens: int) -> float:
    script = Path(__file__).with_name("plain_rest.py")
    env = backend.worker_environment(backend.detect(), common.clean_environment())
    argv = [sys.executable, str(script), str(starter), str(prefix_tokens), str(rest_tokens)]
    done = subprocess.run(argv, env=env, capture_output=True, check=True, text=True)
    return float(json.loads(done.stdout)[0])


def records(home: Path) -> list[Path]:
    return sorted((home / "kv").rglob("*.safetensors"))


def size_of(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def measure(report: common.Report, starter: Path, rounds: int, tokens: int) -> None:
    tokenizer = ChatTokenizer.open(starter)
    row = report.row
    cold, hit = row("cold", "s"), row("from memory", "s")
    rest, disk = row("the rest alone", "s"), row("from disk", "s")
    read_rate, plain_read = row("restore", "MB/s"), row("a plain reader", "MB/s")
    in_place = row("the rest behind a prefix in place", "s")
    new_bytes = row("a turn of 100 tokens writes", "MB")
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as name:
        scratch = Path(name)
        home = scratch / "home"
        (scratch / "models").mkdir()
        (scratch / "models" / MODEL).symlink_to(starter.resolve())
        port = common.free_port()
        argv = [common.console_script(), "up", "--home", str(home), "--port", str(port)]
        argv += ["--models", str(scratch / "models"), "--model", MODEL]
        env = common.clean_environment() | {"MLXPOOL_CACHE_IDLE_DEMOTE": "never"}
        with common.serving(argv, port, scratch / "log", env=env) as server:
            first_token_s(port, [{"role": "user", "content": "Hello"}])
            for number in range(rounds):
                system = {"role": "system", "content": prefix(number, tokens, tokenizer)}

                def ask(seed: int, *before: dict[str, str], number: int = number) -> tuple[float, int]:
                    user = {"role": "user", "content": question(10 * number + seed)}
                    took_s, usage = first_token_s(port, [*before, user])
                    return took_s, usage["prompt_tokens_details"]["cached_tokens"]

                cold.samples.append(ask(0, system)[0])
                took_s, cached = ask(1, system)
                if cached < tokens * 0.9:
                    raise RuntimeError(f"only {cached} tokens from memory")
                hit.samples.append(took_s)
                rest.samples.append(ask(2)[0])
                in_place.samples.append(rest_in_place_s(starter, cached, len(tokenizer.encode(question(1)))))
                server.json("/api/cache/flush", {}, timeout_s=300)
                before_bytes = size_of(records(home))
                ask(3, system)
                server.json("/api/cache/flush", {}, timeout_s=300)
                new_bytes.samples.append((size_of(records(home)) - before_bytes) / 1e6)
                pid = next(w["pid"] for w in server.json("/api/pool")["workers"] if w["model"] == MODEL)
                os.kill(pid, signal.SIGKILL)
                while any(w["pid"] == pid for w in server.json("/api/pool")["workers"]):
                    time.sleep(0.01)
                # Its own start is not the question: another prompt loads it.
                first_token_s(port, [{"role": "user", "content": f"Hello {number}"}])
                out_of_memory(records(home))
                took_s, cached = ask(4, system)
                if cached < tokens * 0.9:
                    raise RuntimeError(f"only {cached} tokens from disk")
                disk.samples.append(took_s)
                ssd = server.json(f"/api/models/{MODEL}/stats")["ssd_cache"]
                read_rate.samples.append(ssd["restored_bytes"] / ssd["restore_ms_last"] / 1e3)
                paths = records(home)
                out_of_memory(paths)
                plain_read.samples.append(size_of(paths) / read_s(paths) / 1e6)
    targets: list[tuple[common.Row, common.Row, float, bool]] = [
        (hit, rest, HIT_LIMIT, True),
        (hit, in_place, HIT_LIMIT, True),
        (disk, cold, COLD_LIMIT, True),
        (disk, hit, TWICE_LIMIT, True),
        (read_rate, plain_read, READ_LIMIT, False),
    ]
    for one, other, limit, at_most in targets:
        ratios = row(f"{one.name} / {other.name}", "1")
        ratios.samples = [a / b for a, b in zip(one.samples, other.samples, strict=True)]
        median = ratios.settle().median
        report.targets.append(common.Target(ratios.name, median, limit, "1", at_most=at_most))


def measure_writing(report: common.Report, starter: Path, rounds: int) -> None:
    """A stream's rate while records of its prompt are written, against one that writes nothing."""
    tokenizer = ChatTokenizer.open(starter)
    beside, without = report.row("a stream beside writes", "tokens/s"), report.row("without", "tokens/s")
    ratios = report.row("a stream beside writes / without", "1")
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as name, ExitStack() as servers:
        scratch = Path(name)
        (scratch / "models").mkdir()
        (scratch / "models" / MODEL).symlink_to(starter.resolve())
        ports = []
        for ssd in ("true", "false"):
            port = common.free_port()
            argv = [common.console_script(), "up", "--home", str(scratch / ssd), "--port", str(port)]
            argv += ["--models", str(scratch / "models"), "--model", MODEL]
            env = common.clean_environment() | {"MLXPOOL_CACHE_SSD": ssd}
            servers.enter_context(common.serving(argv, port, scratch / f"{ssd}.log", env=env))
            first_token_s(port, [{"role": "user", "content": "Hello"}])
            ports.append(port)
        for number in range(rounds):
            taken = {}
            for port in ports if number % 2 else reversed(ports):
                # Two prompts' records wait to be written when the second begins to answer.
                for part in range(2):
                    messages = [{"role": "user", "content": prefix(10 * number + part, 400, tokenizer)}]
                    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 96}
                    # Whatever it has to say, for so long.
                    body["logit_bias"] = {"2": -100}
                    taken[port] = serving.lone_rate(port, body)
            beside.samples.append(taken[ports[0]])
            without.samples.append(taken[ports[1]])
            ratios.samples.append(taken[ports[0]] / taken[ports[1]])
    median = ratios.settle().median
    report.targets.append(common.Target(ratios.name, median, WRITING_LIMIT, "1", at_most=False))


def main() -> int:
    """Measures and prints the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starter", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--only", choices=("turns", "writing"))
    args = parser.parse_args()
    report = common.report("prompt_cache", starter=str(args.starter), rounds=args.rounds, tokens=args.tokens)
    if args.only != "writing":
        measure(report, args.starter, args.rounds, args.tokens)
    if args.only != "turns":
        measure_writing(report, args.starter, 2 * args.rounds)
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
