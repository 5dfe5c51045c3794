"""What adapters cost: a change of sets, and a decode step with none on, beside others that are mounted.

On a random model of 32 narrow layers with adapters on all seven of each one's linear layers, so that what is
counted per layer weighs most. Steps of two models, one of which never had an adapter, are taken in turns.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxpool.shared import backend
from mlxpool.worker.adapters.layers import AdapterSet, Switch, find, mount
from mlxpool.worker.adapters.reading import read
from mlxpool.worker.load import backend as mlx_backend
from tests.bench import common
from tests.bench.engine import random_folder
from tests.tools import tiny_adapters

SWITCH_LIMIT_MS = 1.0
# The same modules run: all above 1 is noise.
UNUSED_LIMIT = 1.03

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048,
}  # fmt: skip
LINEAR = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
    "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
LIMIT_BYTES = 1 << 30


class Steps:
    """Decode steps of a lone row, timed."""

    def __init__(self, model: Any) -> None:
        self._cache = make_prompt_cache(model)
        model(mx.ones((1, 24), dtype=mx.uint32), cache=self._cache)

    def step_ms(self, model: Any) -> float:
        began_s = time.perf_counter()
        mx.eval(mx.argmax(model(mx.ones((1, 1), dtype=mx.uint32), cache=self._cache)[:, -1], axis=-1))
        return (time.perf_counter() - began_s) * 1000


def measure(folder: Path, rounds: int) -> int:
    """Runs everything and prints the document."""
    report = common.report("adapters", rounds=rounds, backend=mlx_backend(), **SHAPE)
    untouched, model = load_model(folder)[0], load_model(folder)[0]
    if mlx_backend() == "cpu":
        # As a worker serves there.
        untouched.set_dtype(mx.float32)
        model.set_dtype(mx.float32)
    shapes = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name in LINEAR:
            out, into = find(model, f"model.layers.{layer}.{name}").layer.weight.shape
            shapes[f"model.layers.{layer}.{name}"] = into, out
    made = [
        read(tiny_adapters.make(folder / name, seed, rank=8, layers=shapes), LIMIT_BYTES)
        for seed, name in enumerate(("a", "b"))
    ]
    mounts = [mount(model, one) for one in made]
    sets = {name: AdapterSet((name,), (one,)) for name, one in zip("ab", mounts, strict=True)}
    sets["a+b"] = AdapterSet(("a", "b"), mounts)
    switch = Switch(model)
    changed = report.row("from one set to another", "ms")
    before, beside = report.row("step, never mounted", "ms"), report.row("step, two mounted, none on", "ms")
    with_one, with_two = report.row("step, one on", "ms"), report.row("step, two on", "ms")
    steps = {row.name: Steps(model) for row in (beside, with_one, with_two)} | {before.name: Steps(untouched)}
    for _ in range(rounds):
        for name in ("a", "b", "a"):
            began_s = time.perf_counter()
            switch.under(sets[name])
            changed.samples.append((time.perf_counter() - began_s) * 1000)
        before.samples.append(steps[before.name].step_ms(untouched))
        beside.samples.append(steps[beside.name].step_ms(switch.under(None)))
        with_one.samples.append(steps[with_one.name].step_ms(switch.under(sets["a"])))
        with_two.samples.append(steps[with_two.name].step_ms(switch.under(sets["a+b"])))
    for row in report.rows:
        row.settle()
    ratio = (beside.median or 0) / (before.median or 1)
    report.figures = {
        "step with one on, times a step": (with_one.median or 0) / (beside.median or 1),
        "step with two on, times a step": (with_two.median or 0) / (beside.median or 1),
    }
    report.targets = [
        common.Target("a change of sets, median", changed.median, SWITCH_LIMIT_MS, "ms"),
        common.Target("a step beside mounted adapters, times one without", ratio, UNUSED_LIMIT, ""),
    ]
    return report.emit()


def main() -> int:
    """Measures in a worker's environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    environment = backend.worker_environment(backend.detect())
    if environment.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    with tempfile.TemporaryDirectory() as folder:
        return measure(random_folder(SHAPE, Path(folder)), args.rounds)


if __name__ == "__main__":
    sys.exit(main())
