"""A streamed model against what its disk and its arithmetic allow, and against the same model held whole.

A step's bound is the sum over layers of dense computation, the longer of computing its hits and reading its
misses, and computing its misses; each part is measured by itself: experts by products out of slots of one
layer after another (the same ones again would come from the processor's cache), dense by what mlx-lm's own
model with all experts takes beyond these, reads by a plain reader that makes as many of the same requests at
the same depth right behind the step. The hits and misses are those that the step had. Then: all experts held,
against mlx-lm's own module; a prefill chunk's bytes against reading each needed expert once; what the process
holds against its plan.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import mlx.core as mx
import numpy as np
import psutil
from mlx import nn

from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri import plan as plans
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.worker.colibri.device_copies import with_device_copies
from mlxpool.worker.colibri.load import build, module_at, put
from mlxpool.worker.colibri.reader import Reader
from mlxpool.worker.colibri.sources import open_source
from mlxpool.worker.colibri.stream import ExpertStream
from mlxpool.worker.engine.prefill import give_back, take_in
from mlxpool.worker.load import backend, evaluate, set_memory_limits
from tests import random_glm, tiny_glm
from tests.bench import common
from tests.bench.plain_reader import PlainReader

OF_BOUND = 1.10
OF_RESIDENT = 0.95
OF_BYTES = 0.02
SHARES = (0.0, 0.25, 0.5, 0.75)


class Step(NamedTuple):
    seconds: float
    layers: list[tuple[int, int]]  # hits and misses


class Served:
    """A model of the folder whose experts are streamed."""

    def __init__(self, folder: Path, launch: StreamLaunch) -> None:
        self.artifact = artifacts.read(folder)
        self.model: Any = build(self.artifact, backend())
        evaluate(self.model, lambda *_: None)
        source = with_device_copies(open_source(self.artifact, backend(), launch.io), backend())
        self.reader = Reader(source, launch.queue_depth, launch.in_flight_bytes)
        self.stream = ExpertStream(self.artifact, source, self.reader, launch, backend())
        self.stream.install(self.model)
        self.caches = self.model.make_cache()

    def step(self, token: int) -> tuple[Step, int]:
        layers = self.stream._main.layers
        before = [(layer.hits, layer.misses) for layer in layers]
        began = time.perf_counter()
        logits = self.model(mx.array([[token]]), cache=self.caches)
        following = int(mx.argmax(logits[0, -1]).item())
        elapsed = time.perf_counter() - began
        after = [(layer.hits, layer.misses) for layer in layers]
        counts = [(two[0] - one[0], two[1] - one[1]) for one, two in zip(before, after, strict=True)]
        return Step(elapsed, counts), following

    def prefill(self, tokens: list[int], chunk: int) -> None:
        for start in range(0, len(tokens), chunk):
            take_in(self.model, tokens[start : start + chunk], self.caches)
            mx.eval([cache.state for cache in self.caches])
            give_back()

    def close(self) -> None:
        self.stream.close()


def main() -> int:
    """Measures and prints."""
    common.as_a_worker()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--folder", type=Path, help="made there if it lacks, and left")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warm", type=int, default=12, help="steps before those that count")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--prefetch", nargs="+", type=int, choices=(0, 1), default=[0, 1])
    parser.add_argument("--layers", type=int, help="fewer than the shape has, the first one dense")
    parser.add_argument("--io", default="direct")
    parser.add_argument("--budget", type=int, default=6 * 10**9, help="bytes, of the plan")
    parser.add_argument("--parts", nargs="+", default=["decode", "resident", "prefill", "plan"])
    args = parser.parse_args()
    report = common.report("expert_decode", shape=args.shape, steps=args.steps, depth=args.depth, io=args.io)
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as scratch:
        folder = args.folder or Path(scratch) / "model"
        if not (folder / "config.json").is_file():
            began = time.perf_counter()
            shape, numbers = (random_glm.CPU, "float32") if args.shape == "cpu" else (random_glm.GPU, "4bit")
            if args.layers is not None:
                types = tiny_glm.config(**shape)["indexer_types"][: args.layers]
                shape = {**shape, "num_hidden_layers": args.layers, "indexer_types": types}
            random_glm.write(folder, shape, numbers)  # type: ignore[arg-type]
            # Direct reads wait for pages that the cache has yet to write.
            os.sync()
            print(f"written in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        for part in args.parts:
            began = time.perf_counter()
            try:
                PARTS[part](report, folder, args)
            except Exception:
                # What was measured before is worth having.
                traceback.print_exc()
                report.row(part, "").failed.append(traceback.format_exc(limit=-1))
            gc.collect()
            print(f"{part}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
            mx.clear_cache()
    return int(report.emit())


class Drawn(nn.Module):  # type: ignore[misc]  # mlx has no types here
    """A router whose choices are drawn. Those of random weights are nearly the same for every token, and soon
    all held; like those they are known once the layer before is computed."""

    def __init__(self, router: Any, experts: int, top_k: int, seed: int) -> None:
        super().__init__()
        self.router, self._experts, self._top_k = router, experts, top_k
        self._draw = np.random.default_rng(seed)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        ids, scores = self.router(x)
        drawn = self._draw.permutation(self._experts)[: self._top_k].astype(np.uint32)
        return ids * 0 + mx.array(drawn).astype(ids.dtype), scores


def draw_routes(model: Any, artifact: artifacts.Artifact) -> None:
    for layout in artifact.layers:
        block = module_at(model, layout.module.rpartition(".")[0])
        block.gate = Drawn(block.gate, layout.experts, artifact.top_k, layout.layer)


def launch(args: Any, slots: int, **more: Any) -> StreamLaunch:
    settings = {"slots": slots, "working_slots": 16, "queue_depth": args.depth, "io": args.io, **more}
    return StreamLaunch(**settings)


def decode(report: Any, folder: Path, args: Any) -> None:
    """Steps at several shares of residents, each against its bound."""
    experts = artifacts.read(folder).layers[0].experts
    computed_s = compute_seconds(folder, args)
    dense_s = dense_seconds(folder, args, computed_s)
    for count, seconds in enumerate(computed_s):
        report.row(f"product of {count}", "ms").samples.append(1000 * seconds)
    layouts = artifacts.read(folder).layers
    plain = PlainReader(folder, layouts, args.depth, args.io == "direct")
    draw = np.random.default_rng(2)
    report.row("dense part of a step", "ms").samples.append(1000 * dense_s)
    for share in args.shares:
        for prefetch in args.prefetch:
            served = Served(folder, launch(args, max(1, round(share * experts)), prefetch=bool(prefetch)))
            served.stream.preload()
            if not prefetch:
                draw_routes(served.model, served.artifact)
            token = 1
            took = report.row(f"step, {share:.0%} held, prefetch {bool(prefetch)}", "ms")
            bound = report.row(f"bound, {share:.0%} held, prefetch {bool(prefetch)}", "ms")
            reads = report.row(f"its misses read plainly, {share:.0%} held, prefetch {bool(prefetch)}", "ms")
            hits = Counter[str]()
            for number in range(args.warm + args.steps):
                step, token = served.step(token)
                if number < args.warm:
                    continue
                took.samples.append(1000 * step.seconds)
                # The disk is asked for as many right behind the step: its rate is not the same for long.
                reads_s = [
                    plain.read(of.layer, draw.permutation(experts)[:miss].tolist())
                    for of, (_, miss) in zip(layouts, step.layers, strict=True)
                ]
                least_s = dense_s + sum(
                    max(computed_s[hit], read_s) + computed_s[miss]
                    for read_s, (hit, miss) in zip(reads_s, step.layers, strict=True)
                )
                reads.samples.append(1000 * sum(reads_s))
                bound.samples.append(1000 * least_s)
                hits["hits"] += sum(hit for hit, _ in step.layers)
                hits["misses"] += sum(miss for _, miss in step.layers)
            ratio = statistics.fmean(took.samples) / statistics.fmean(bound.samples)
            report.figures[f"step over bound, {share:.0%} held, prefetch {bool(prefetch)}"] = ratio
            report.figures[f"hit rate, {share:.0%} held, prefetch {bool(prefetch)}"] = (
                hits["hits"] / hits.total()
            )
            report.figures[f"wait for routers, {share:.0%} held, prefetch {bool(prefetch)}, ms a step"] = (
                1000 * served.stream.sync_s / (args.warm + args.steps)
            )
            if not prefetch:
                name = f"step over bound, {share:.0%} held, prefetch {bool(prefetch)}"
                report.targets.append(common.Target(name, ratio, OF_BOUND, ""))
            stats = served.stream.stats().main
            if share == 0 and not prefetch:
                rate = reads_rate(served, folder, args)
                report.figures["demand reads over the disk's own rate"] = rate
                report.targets.append(
                    common.Target("demand reads over the disk's own rate", rate, 0.9, "", at_most=False)
                )
            report.figures[f"read, {share:.0%} held, prefetch {bool(prefetch)}, GB"] = stats.read_bytes / 1e9
            served.close()
            del served
            mx.clear_cache()
    plain.close()


def reads_rate(served: Served, folder: Path, args: Any) -> float:
    """Whole layers through the reader against a plain reader at the same depth, in turn."""
    layout = served.artifact.layers[0]
    slab = served.stream._main.layers[0]._working()
    rows = [slab.rows(slot) for slot in range(slab.slots)]
    draw = np.random.default_rng(1)
    reader = PlainReader(folder, [layout], args.depth, args.io == "direct")
    ours: list[float] = []
    plain: list[float] = []
    for turn in range(6):
        order = draw.permutation(layout.experts).tolist()

        def mine(order: list[int] = order) -> None:
            began = time.perf_counter()
            asked = [
                served.reader.submit(layout.layer, expert, rows[place % len(rows)])
                for place, expert in enumerate(order)
            ]
            for one in asked:
                one.result()
            ours.append(time.perf_counter() - began)

        def other(order: list[int] = order) -> None:
            plain.append(reader.read(layout.layer, order))

        for side in (mine, other) if turn % 2 else (other, mine):
            side()
    reader.close()
    return statistics.median(plain) / statistics.median(ours)


def dense_seconds(folder: Path, args: Any, computed_s: list[float]) -> float:
    """What a step takes beyond its experts' products, those of mlx-lm's own modules with all experts held: a
    model without experts would find its weights in the processor's cache."""
    artifact = artifacts.read(folder)
    served = Served(folder, launch(args, artifact.layers[0].experts, working_slots=0))
    served.stream.preload()
    whole = held_whole(served)
    draw_routes(whole, artifact)
    caches = whole.make_cache()
    token, took = 1, []
    for _ in range(args.warm + args.steps):
        began = time.perf_counter()
        token = int(mx.argmax(whole(mx.array([[token]]), cache=caches)[0, -1]).item())
        took.append(time.perf_counter() - began)
    served.close()
    return statistics.median(took[args.warm :]) - len(artifact.layers) * computed_s[artifact.top_k]


def compute_seconds(folder: Path, args: Any) -> list[float]:
    """By rows: their products out of a layer's slots, without anything to wait for but them."""
    artifact = artifacts.read(folder)
    slots = min(artifact.layers[0].experts, 2 * artifact.top_k)
    served = Served(folder, launch(args, slots))
    layers = served.stream._main.layers
    for layer in layers:
        layer.slots.begin(layer.slots.table.ahead(range(slots), slots))
        layer.slots.finish(range(slots))
    hidden = artifact.config["hidden_size"]
    dtype = mx.float32 if args.shape == "cpu" else mx.bfloat16
    flat = mx.random.normal((1, 1, hidden)).astype(dtype)
    made = [0.0]
    for rows in range(1, artifact.top_k + 1):
        places = [(mx.arange(rows, dtype=mx.uint32) + first) % slots for first in range(slots)]
        mx.eval(places)

        def many(count: int, places: list[mx.array] = places, rows: int = rows) -> float:
            # A chain: each needs the one before, so that they can't be computed side by side.
            began = time.perf_counter()
            y = flat
            for number in range(count):
                layer = layers[number % len(layers)]
                taken = places[number // len(layers) * rows % slots]
                y = layer._experts(layer.slots.slab, y[:1] * 1e-3 + flat, taken, False)
            mx.eval(y)
            return time.perf_counter() - began

        many(4)
        long, short = (statistics.median(many(count) for _ in range(5)) for count in (24, 4))
        made.append(max((long - short) / 20, 0.0))
    served.close()
    return made


def resident(report: Any, folder: Path, args: Any) -> None:
    """All experts in slots against mlx-lm's module with the same numbers."""
    experts = artifacts.read(folder).layers[0].experts
    served = Served(folder, launch(args, experts, working_slots=0))
    served.stream.preload()
    whole = held_whole(served)
    token = 1
    ours, theirs = report.row("step, all held in slots", "ms"), report.row("step, mlx-lm's module", "ms")
    caches = whole.make_cache()
    rounds = args.warm + args.steps
    for number in range(rounds):
        step, following = served.step(token)
        began = time.perf_counter()
        other = int(mx.argmax(whole(mx.array([[token]]), cache=caches)[0, -1]).item())
        elapsed = time.perf_counter() - began
        if following != other:
            raise RuntimeError(f"token {number} differs: {following} streamed, {other} resident")
        token = following
        if number >= args.warm:
            ours.samples.append(1000 * step.seconds)
            theirs.samples.append(1000 * elapsed)
    ratio = statistics.median(theirs.samples) / statistics.median(ours.samples)
    report.figures["rate with all held over mlx-lm's"] = ratio
    report.targets.append(
        common.Target("rate with all held over mlx-lm's", ratio, OF_RESIDENT, "", at_most=False)
    )
    served.close()


def held_whole(served: Served) -> Any:
    """The same model with mlx-lm's own modules over the very arrays of the slots."""
    from mlx_lm.models.switch_layers import SwitchGLU

    model: Any = build(served.artifact, backend())
    evaluate(model, lambda *_: None)
    for layer in served.stream._main.layers:
        held = layer.slots.table.held
        if [held[one] for one in range(layer.layout.experts)] != list(range(layer.layout.experts)):
            raise RuntimeError("slots are not in the order of experts")
        made = SwitchGLU(random_glm.GROUP_SIZE, random_glm.GROUP_SIZE, 1)
        for projection, part in layer.slots.slab.arrays:
            if part == "scales":
                made[projection] = made[projection].to_quantized(random_glm.GROUP_SIZE, 4)
        for (projection, part), array in layer.slots.slab.arrays.items():
            made[projection][part] = array
        put(model, layer.layout.module, made)
    return model


def prefill(report: Any, folder: Path, args: Any) -> None:
    """A chunk's bytes against each needed expert once."""
    artifact = artifacts.read(folder)
    vocab = artifact.config["vocab_size"]
    served = Served(folder, launch(args, max(1, artifact.layers[0].experts // 4)))
    needed = 0
    layers = served.stream._main.layers
    seen: list[int] = []
    for layer in layers:
        inner = layer._sweep

        def counting(x: Any, ids: Any, planned: Any, inner: Callable[..., Any] = inner) -> Any:
            seen.append(len(planned.early) + len(planned.late) + len(planned.through))
            return inner(x, ids, planned)

        layer._sweep = counting  # type: ignore[method-assign]
    chunk = 512 if args.shape == "gpu" else 64
    tokens = np.random.default_rng(3).integers(0, vocab, 2 * chunk).tolist()
    # Kernels are compiled at their first use.
    served.prefill(tokens[:chunk], chunk)
    served.caches = served.model.make_cache()
    seen.clear()
    read_bytes = served.stream.stats().main.read_bytes
    began = time.perf_counter()
    served.prefill(tokens, chunk)
    elapsed = time.perf_counter() - began
    needed = sum(seen) * artifact.layers[0].record_bytes
    ratio = (served.stream.stats().main.read_bytes - read_bytes) / needed
    report.row(f"prefill of two chunks of {chunk}", "s").samples.append(elapsed)
    report.figures["prefill bytes over each needed expert once a chunk"] = ratio
    report.figures["prefill read rate, GB/s"] = needed / elapsed / 1e9
    report.targets.append(
        common.Target("prefill bytes over each needed expert once a chunk", ratio, 1 + OF_BYTES, "")
    )
    served.close()


def plan(report: Any, folder: Path, args: Any) -> None:
    """What is held at full context against the plan."""
    on_device = artifacts.on_backend(artifacts.read(folder), backend())
    wishes = plans.Wishes(context=2048 if args.shape == "gpu" else 512)
    made = plans.plan(on_device, wishes, backend=backend(), limit_bytes=args.budget)
    set_memory_limits(made.planned_bytes)
    mx.set_cache_limit(made.bytes_of("allocator_reserve"))
    mx.reset_peak_memory()
    served = Served(
        folder,
        launch(args, made.slots, working_slots=made.working_slots, chunk=made.chunk),
    )
    vocab = served.artifact.config["vocab_size"]
    tokens = np.random.default_rng(4).integers(0, vocab, made.context - 8).tolist()
    with Watched() as watched:
        served.prefill(tokens, made.chunk)
        at_end = held_bytes()
        token = 1
        for _ in range(8):
            _, token = served.step(token)
    held = watched.most_bytes
    report.notes.append(made.explanation)
    report.figures["slots"] = made.slots
    report.figures["planned, GB"] = made.planned_bytes / 1e9
    for item in made.items:
        report.figures[f"planned for {item.label}, GB"] = item.bytes / 1e9
    report.figures["MLX's peak, GB"] = mx.get_peak_memory() / 1e9
    report.figures["MLX's active and kept, GB"] = (mx.get_active_memory() + mx.get_cache_memory()) / 1e9
    report.figures["process USS, GB"] = psutil.Process().memory_full_info().uss / 1e9
    report.figures["held behind the prompt over planned"] = at_end / made.planned_bytes
    report.figures["held over planned"] = held / made.planned_bytes
    report.figures["held over planned without reserves"] = held / (
        made.planned_bytes - made.bytes_of("allocator_reserve", "runtime_reserve", "safety_reserve")
    )
    report.targets.append(common.Target("held over planned", held / made.planned_bytes, 1.0, ""))
    served.close()


class Watched:
    """The most that the process holds meanwhile, looked at a few times a second."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(0.1)
            self.most_bytes = max(self.most_bytes, held_bytes())


def held_bytes() -> int:
    """Of the device's memory, its context included, where it has its own; else of the machine's."""
    if backend() != "cuda":
        return int(psutil.Process().memory_full_info().uss)
    # Managed memory is nobody's in the list of processes, so it is what others have that is taken off.
    others = sum(size for pid, size in _asked("compute-apps", "pid,used_memory") if pid != os.getpid())
    return (_asked("gpu", "memory.used")[0][0] - others) * 2**20


def _asked(about: str, fields: str) -> list[list[int]]:
    command = ["nvidia-smi", f"--query-{about}={fields}", "--format=csv,noheader,nounits", "-i", "0"]
    told = subprocess.check_output(command, text=True)
    return [[int(field) for field in line.split(",")] for line in told.splitlines()]


PARTS = {"decode": decode, "resident": resident, "prefill": prefill, "plan": plan}

if __name__ == "__main__":
    sys.exit(main())
