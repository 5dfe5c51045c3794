"""The engine against mlx-lm's own loops, in one process, on one model, in interleaved pairs.

A lone stream against `generate_step`, eight against `BatchGenerator`, greedy and sampled; then what a
grammar, penalties and log-probabilities cost a stream, against the same stream without. A pair is one run of
each, right after each other, and a figure is the median of the pairs' ratios. Only decoding is timed: from
when every stream has its first token to when the first one ends.

With the starter also fairness: a long prompt is prefilled beside a running stream, and short requests come.
The starter needs OpenBLAS on the CPU backend: the benchmark starts itself anew in a worker's environment.
`--random 1b` takes random weights of that shape in bf16 instead, for a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import mlx.core as mx

from mlxpool.shared import backend
from mlxpool.worker.engine.chunks import TARGET_S, ChunkWidth
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.engine.prefill import Prefills, Prompt
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.terms import Limits, Loaded
from mlxpool.worker.load import backend as mlx_backend
from mlxpool.worker.load import load
from mlxpool.worker.request.plan import Plan, Sampling
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser
from mlxpool.worker.text.events import Event, Failure, Finish
from tests.bench import common

LONE_LIMIT = 0.98
EIGHT_LIMIT = 1.0
CONSTRAINED_LIMIT = 1 / 1.1
STREAMS = 8
PROMPT_TOKENS = 24
# What xgrammar takes at most to fill a mask of a 49k vocabulary (tests/bench/grammar.py: 3 to 22 us).
FILL_S = 22e-6
# Tokens between two states that were never seen before: a real grammar comes back to old ones far more often.
STATE_TOKENS = 10
_GRAMMARS = itertools.count()
SAMPLED_TEMPERATURE = 0.7
LONG_PROMPT_TOKENS = 6000
SHORT_PROMPT_TOKENS = 50
# Where in the long prompt's prefill a short request comes.
SHORT_AT = (0.2, 0.5, 0.8)

SHAPES: dict[str, dict[str, int]] = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 2048,
    },
}  # fmt: skip


class Allowing:
    """A grammar that takes as long as a real one, in one state for some tokens and then in a new one."""

    over = False

    def __init__(self) -> None:
        self._accepted = 0
        self._own = next(_GRAMMARS) << 16

    def fill(self, mask: Any) -> bool:
        began_s = time.perf_counter()
        mask[:] = -1
        mask[-1] = self._own + self._accepted // STATE_TOKENS
        while time.perf_counter() - began_s < FILL_S:
            pass
        return True

    def accept(self, _token: int) -> bool:
        self._accepted += 1
        return True

    def release(self) -> None:
        pass


class Stream:
    """When one row's tokens came."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.tokens: list[int] = []
        self.ended = asyncio.Event()

    def note(self, token: int) -> bytes:
        """Called by the engine's thread, as part of the row's text."""
        self.at_s.append(time.perf_counter())
        self.tokens.append(token)
        return b"."

    def put(self, events: Sequence[Event]) -> None:
        if events and isinstance(events[-1], Failure):
            raise RuntimeError(events[-1].error.message)
        if events and isinstance(events[-1], Finish):
            self.ended.set()


class Bench:
    """The model, an engine with it, and mlx-lm's loops over it; one of them runs at a time."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.model = loaded.model
        width = ChunkWidth(mlx_backend())
        self.engine = Engine(lambda: loaded, Limits(STREAMS, 1 << 40), width)
        self.engine.start()

    def submit(self, prompt: Sequence[int], count: int, **settings: Any) -> tuple[Stream, Row]:
        constraint = settings.pop("constraint", None)
        top_logprobs = settings.pop("top_logprobs", None)
        of = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": len(prompt), **settings}
        plan = Plan(tuple(prompt), count, True, Sampling(**of), frozenset(), top_logprobs=top_logprobs)
        stream = Stream()
        text = AnswerText(ByteDetokeniser(stream.note))
        return stream, Row(plan, text, stream.put, constraint, lambda _: b".")

    async def ours(self, streams: int, count: int, **settings: Any) -> float:
        """Tokens per second of so many streams together."""
        made = []
        for place in range(streams):
            own = {**settings, "constraint": Allowing()} if settings.get("constraint") else settings
            made.append(self.submit(prompt(place), count, **own))
        self.engine.submit_all([row for _, row in made])
        for stream, _ in made:
            await stream.ended.wait()
        return rate([stream.at_s for stream, _ in made])

    def lone_loop(self, count: int, temperature: float) -> float:
        from mlx_lm.generate import generate_step
        from mlx_lm.sample_utils import make_sampler

        sampler = make_sampler(temp=temperature)
        at_s = []
        for _ in generate_step(mx.array(prompt(0)), self.model, max_tokens=count, sampler=sampler):
            at_s.append(time.perf_counter())
        return rate([at_s])

    def batch_loop(self, count: int, temperature: float) -> float:
        from mlx_lm.generate import BatchGenerator
        from mlx_lm.sample_utils import make_sampler

        generator = BatchGenerator(self.model, max_tokens=count)
        samplers = [make_sampler(temp=temperature) for _ in range(STREAMS)] if temperature else None
        uids = generator.insert([prompt(place) for place in range(STREAMS)], samplers=samplers)
        at_s: dict[int, list[float]] = {uid: [] for uid in uids}
        running = set(uids)
        while running:
            _, responses = generator.next()
            now_s = time.perf_counter()
            for response in responses:
                at_s[response.uid].append(now_s)
                if response.finish_reason is not None:
                    running.discard(response.uid)
        generator.close()
        return rate(list(at_s.values()))


def prompt(place: int) -> list[int]:
    """Another prompt for every place, of about the same length."""
    return [(place * 31 + n * 17) % 1000 + 10 for n in range(PROMPT_TOKENS + place)]


def rate(streams: Sequence[Sequence[float]]) -> float:
    """Tokens per second of all streams together, between the last first token and the first last one."""
    begin_s = max(at_s[0] for at_s in streams)
    end_s = min(at_s[-1] for at_s in streams)
    said = sum(sum(begin_s < one <= end_s for one in at_s) for at_s in streams)
    return said / (end_s - begin_s)


async def pairs(
    bench: Bench, report: common.Report, name: str, rounds: int, ours: Any, other: Callable[[], Any]
) -> float:
    """The median ratio of ours to the other: one of each in turn, every second time the other first."""
    mine, theirs, ratios = (report.row(f"{name}: {who}", unit) for who, unit in
                            (("engine", "tok/s"), ("other", "tok/s"), ("ratio", "x")))  # fmt: skip

    async def run(make: Callable[[], Any]) -> float:
        made = make()
        return float(await made if asyncio.iscoroutine(made) else made)

    await run(ours)
    await run(other)
    for turn in range(rounds):
        if turn % 2:
            there, here = await run(other), await run(ours)
        else:
            here, there = await run(ours), await run(other)
        mine.samples.append(here)
        theirs.samples.append(there)
        ratios.samples.append(here / there)
    value = statistics.median(ratios.samples)
    report.figures[name] = value
    print(f"{name}: {value:.3f} ({statistics.median(mine.samples):.1f} tok/s)", file=sys.stderr, flush=True)
    return value


async def speed(bench: Bench, report: common.Report, rounds: int, lone: int, eight: int, only: str) -> None:
    """Every pair with `only` in its name; lone and eight: tokens of a lone stream, and of each of eight."""

    async def against(name: str, limit: float | None, ours: Any, other: Any) -> None:
        if only not in name:
            return
        value = await pairs(bench, report, name, rounds, ours, other)
        if limit is not None:
            report.targets.append(common.Target(name, value, limit, "x", at_most=False))

    hot = SAMPLED_TEMPERATURE
    shaped = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_context": 0}
    plain = lambda: bench.ours(1, lone)  # noqa: E731
    crowd = lambda: bench.ours(STREAMS, eight)  # noqa: E731
    await against("lone greedy / generate_step", LONE_LIMIT, plain, lambda: bench.lone_loop(lone, 0.0))
    await against("eight greedy / BatchGenerator", EIGHT_LIMIT, crowd, lambda: bench.batch_loop(eight, 0.0))
    await against(
        "lone sampled / generate_step",
        LONE_LIMIT,
        lambda: bench.ours(1, lone, temperature=hot),
        lambda: bench.lone_loop(lone, hot),
    )
    await against(
        "eight sampled / BatchGenerator",
        EIGHT_LIMIT,
        lambda: bench.ours(STREAMS, eight, temperature=hot),
        lambda: bench.batch_loop(eight, hot),
    )
    await against(
        "lone constrained / free", CONSTRAINED_LIMIT, lambda: bench.ours(1, lone, constraint=True), plain
    )
    await against(
        "eight constrained / free",
        CONSTRAINED_LIMIT,
        lambda: bench.ours(STREAMS, eight, constraint=True),
        crowd,
    )
    await against("lone with penalties / without", None, lambda: bench.ours(1, lone, **shaped), plain)
    await against("lone with log-probs / without", None, lambda: bench.ours(1, lone, top_logprobs=5), plain)
    await against(
        "lone top-p 0.9 / greedy", None, lambda: bench.ours(1, lone, temperature=hot, top_p=0.9), plain
    )


async def until(check: Callable[[], bool]) -> None:
    """Wait for what the engine's thread does."""
    while not check():  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)


async def fairness(bench: Bench, report: common.Report) -> None:
    """A stream and short requests beside the prefill of a long prompt."""
    chunks: list[float] = []
    run = Prefills.run

    def timed(self: Prefills, of: Prompt, end: int, alone: bool) -> None:
        began_s = time.perf_counter()
        run(self, of, end, alone)
        if of.end > SHORT_PROMPT_TOKENS and not alone:
            chunks.append(time.perf_counter() - began_s)
            progress[0] = of.done / of.end

    progress = [0.0]
    Prefills.run = timed  # type: ignore[method-assign]
    try:

        async def short(place: int) -> float:
            ids = [(place * 7 + n * 3) % 1000 + 10 for n in range(SHORT_PROMPT_TOKENS)]
            stream, row = bench.submit(ids, 1)
            began_s = time.perf_counter()
            bench.engine.submit(row)
            await stream.ended.wait()
            return stream.at_s[0] - began_s

        # As in a worker that was idle once.
        await bench.engine.call(lambda: None)
        alone_s = statistics.median([await short(place) for place in range(5)])
        running, running_row = bench.submit(prompt(1), 10_000)
        bench.engine.submit(running_row)
        await until(lambda: len(running.at_s) > 5)
        long, long_row = bench.submit([(n * 13) % 1000 + 10 for n in range(LONG_PROMPT_TOKENS)], 1)
        began_s = time.perf_counter()
        bench.engine.submit(long_row)
        waited = report.row("first token of a short request beside a long prefill", "s")
        for place, share in enumerate(SHORT_AT):
            await until(lambda share=share: progress[0] >= share)
            waited.samples.append(await short(20 + place))
        await long.ended.wait()
        ended_s = long.at_s[0]
        bench.engine.cancel(running_row)
    finally:
        Prefills.run = run  # type: ignore[method-assign]
    at_s = [one for one in running.at_s if began_s <= one <= ended_s]
    gaps = report.row("gaps of a stream beside a long prefill", "s")
    gaps.samples = [late - early for early, late in itertools.pairwise(at_s)]
    report.row("chunks of the long prefill", "s").samples = chunks
    chunk_s = max(chunks)
    report.figures |= {"short alone, s": alone_s, "long prefill, s": ended_s - began_s}
    report.targets += [
        common.Target("a chunk", chunk_s, TARGET_S, "s"),
        common.Target("longest gap of a stream", max(gaps.samples), 2 * chunk_s, "s"),
        common.Target("short request's first token", max(waited.samples), 3 * alone_s + chunk_s, "s"),
    ]


def random_folder(shape: dict[str, int], out: Path) -> Path:
    """A llama of this shape with random bf16 weights."""
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.models import llama

    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True}
    config |= {**shape, "max_position_embeddings": 32_768, "bos_token_id": 1, "eos_token_id": 2}
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.random.seed(1)
    model.update(
        tree_map(lambda value: (mx.random.normal(value.shape) * 0.02).astype(mx.bfloat16), model.parameters())
    )
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))
    # Nothing is encoded here; a folder is only complete with one.
    (out / "tokenizer.json").write_text("{}")
    return out


async def measure(folder: Path, args: argparse.Namespace) -> int:
    """Runs what the arguments ask for."""
    report = common.report("engine", folder=folder.name, rounds=args.rounds, backend=mlx_backend())
    bench = Bench(load(folder, lambda _done, _total: None))
    await bench.engine.loaded
    if not args.only_fairness:
        await speed(bench, report, args.rounds, args.lone, args.eight, args.only)
    if not args.random:
        await fairness(bench, report)
    return report.emit()


def main() -> int:
    """Measures and prints the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starter", type=Path, help="the starter model's folder")
    parser.add_argument("--random", choices=SHAPES, help="random weights of this shape instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lone", type=int, default=32, help="tokens of a lone stream")
    parser.add_argument("--eight", type=int, default=20, help="tokens of each of eight streams")
    parser.add_argument("--only", default="", help="the pairs with this in their names")
    parser.add_argument("--only-fairness", action="store_true")
    args = parser.parse_args()
    if not args.starter and not args.random:
        parser.error("name a model: --starter FOLDER or --random SHAPE")
    environment = backend.worker_environment(backend.detect())
    if environment.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    with tempfile.TemporaryDirectory() as made:
        folder = args.starter or random_folder(SHAPES[args.random], Path(made))
        status = asyncio.run(measure(folder, args))
    sys.stdout.flush()
    # The engine's thread never ends by itself, and a process torn down beside it may abort.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
