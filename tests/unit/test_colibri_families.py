"""Mixtures of experts of other families, streamed: every architecture that is listed, what is planned for
it, its records, its prompts that come back, and what is refused by name."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from click.testing import CliRunner
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, quantize_model

from mlxpool.parent.cli.colibri import colibri_command
from mlxpool.parent.jobs.kinds.dataset import Dataset, DatasetConfig
from mlxpool.parent.jobs.kinds.evaluate import Evaluate, EvaluateConfig
from mlxpool.parent.jobs.kinds.kind import Fault, Here
from mlxpool.parent.library import Library
from mlxpool.shared import checkpoint
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri import families
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.plan import Wishes, plan
from mlxpool.shared.colibri.records import Recipe
from mlxpool.shared.config import ModelSettings, Settings
from mlxpool.shared.control import CacheLaunch
from mlxpool.worker.cache.durability import flush
from mlxpool.worker.colibri.convert.terms import ConvertError
from mlxpool.worker.colibri.load import build
from mlxpool.worker.colibri.lookahead import guesses
from mlxpool.worker.colibri.reader import Reader
from mlxpool.worker.colibri.serving import load_streamed
from mlxpool.worker.colibri.sources import open_source
from mlxpool.worker.colibri.stream import ExpertStream
from mlxpool.worker.engine.terms import Loaded
from tests import tiny_glm
from tests.tools import running_engine
from tests.tools.running_engine import Running

from . import colibri_architectures, colibri_convert_world, colibri_families

PROMPT = [(place * 7 + 3) % 250 for place in range(43)]
# The router asks for something else than the layer's normalised state, for one expert, or not in each layer.
BLIND = {
    "deepseek_v41", "gemma4", "gemma4_text", "jamba", "kimi_k3", "llama4", "longcat_flash",
    "longcat_flash_ngram",
}  # fmt: skip
WAIT_S = 60


def _flat(caches: list[Any]) -> Iterator[Any]:
    for one in caches:
        yield from _flat(one.caches) if hasattr(one, "caches") else (one,)


class Said(NamedTuple):
    """logits: of a chunk of sorted rows and three steps after it. cache_bytes: of what it kept."""

    logits: np.ndarray[Any, Any]
    cache_bytes: int


def _said(model: Any) -> Said:
    caches = make_prompt_cache(model)
    parts = [PROMPT[:40], *([token] for token in PROMPT[40:])]
    found = mx.concatenate([model(mx.array([part]), cache=caches)[0] for part in parts])
    logits = np.array(found.astype(mx.float32))
    assert np.isfinite(logits).all()
    return Said(logits, sum(cache.nbytes for cache in _flat(caches)))


@pytest.fixture
def streamed() -> Iterator[Callable[[Path], tuple[Any, ExpertStream]]]:
    """The folder's model with three slots of eight, and its stream."""
    made: list[ExpertStream] = []

    def make(folder: Path) -> tuple[Any, ExpertStream]:
        artifact = artifacts.read(folder)
        source = open_source(artifact, "cpu", "buffered")
        launch = StreamLaunch(slots=3, working_slots=2)
        made.append(ExpertStream(source.artifact, source, Reader(source, 2, 1 << 28), launch, "cpu"))
        model = build(artifact, "cpu")
        mx.eval(model.parameters())
        made[-1].install(model)
        return model, made[-1]

    yield make
    for stream in made:
        stream.close()


Streamed = Callable[[Path], tuple[Any, ExpertStream]]


@pytest.mark.parametrize("kind", colibri_architectures.KINDS)
def test_streamed_equals_what_mlx_lm_loads_and_is_planned_for(
    kind: str, tmp_path: Path, streamed: Streamed
) -> None:
    folder = colibri_families.write_config(colibri_architectures.config(kind), tmp_path / kind)
    resident, _ = load_model(folder)
    model, stream = streamed(folder)
    dense = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    wanted, ours = _said(resident), _said(model)
    assert np.array_equal(wanted.logits, ours.logits)
    assert stream.stats().main.misses > 0
    artifact = stream.artifact
    assert bool(guesses(resident, artifact.layers, artifact.top_k)) == (kind not in BLIND)
    assert artifact.top_k == (1 if kind == "llama4" else 2)
    wishes = Wishes(context=256, slots=3, prefill_chunk=64)
    made = plan(artifact, wishes, backend="cpu", limit_bytes=None)
    assert (made.experts, made.unique_experts) == (8, artifact.top_k)
    assert made.bytes_of("resident") == dense
    # mlx-lm's caches grow by 256 tokens.
    assert made.bytes_of("target_kv") + _slack(kind) >= wanted.cache_bytes


def _slack(kind: str) -> int:
    """Token ids that an n-gram looks back to."""
    return 64 if kind == "longcat_flash_ngram" else 0


def test_every_architecture_of_mlx_lm_that_has_such_experts_is_listed() -> None:
    listed = {colibri_architectures.config(kind)["model_type"] for kind in colibri_architectures.KINDS}
    others = {
        "glm_moe_dsa",
        "deepseek_v41_text",
        "gemma4_unified",
        "joyai_llm_flash",
        "kimi_k2",
        "minimax_m2",
    }
    assert listed | others == families.STREAMED
    folder = Path(mlx_lm.models.__path__[0])
    texts = {path.stem: path.read_text() for path in folder.glob("*.py") if path.stem != "switch_layers"}
    having = {name for name, text in texts.items() if re.search(r"\bSwitch(GLU|MLP)\(", text)}
    refused = {"muse_spark", "nemotron_h", "phixtral"}
    assert having - set(colibri_architectures.KINDS) == refused
    assert not refused & families.STREAMED
    told = (Path(__file__).parents[2] / "docs" / "colibri.md").read_text().split("## Other architectures")[1]
    works, _ = told.split("Each was streamed", 1)
    assert set(re.findall(r"`(\w+)`", works)) - {"model_type"} == families.STREAMED - {"glm_moe_dsa"}


# ---- records --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_next", "dots1"])
def test_records_of_what_is_published_answer_as_mlx_lms_own_quantised_does(
    kind: str, tmp_path: Path, streamed: Streamed
) -> None:
    config = colibri_architectures.config(kind)
    source = colibri_families.write_config(config, tmp_path / kind, bits=None, each=True)
    colibri_convert_world.run(source, tmp_path / "records", Recipe(4, 32, "affine"))
    resident, _ = load_model(source)
    packed, _ = quantize_model(resident, config, 32, 4)
    assert artifacts.read(tmp_path / "records").form == "records"
    assert np.array_equal(_said(packed).logits, _said(streamed(tmp_path / "records")[0]).logits)


@pytest.mark.parametrize("kind", ["gemma4_text", "gpt_oss", "kimi_k3", "longcat_flash"])
def test_records_of_what_mlx_packed_answer_as_that_does(
    kind: str, tmp_path: Path, streamed: Streamed
) -> None:
    source = colibri_families.write_config(colibri_architectures.config(kind), tmp_path / kind)
    colibri_convert_world.run(source, tmp_path / "records", colibri_convert_world.KEPT)
    model, stream = streamed(tmp_path / "records")
    assert np.array_equal(_said(load_model(source)[0]).logits, _said(model).logits)
    assert stream.stats().main.read_bytes > 0


def _in_one(folder: Path, flipped: bool = False) -> None:
    """Rewrites a checkpoint's experts with gate and up in one. flipped: inputs first."""
    file = folder / "model.safetensors"
    loaded: Any = mx.load(str(file))
    tensors: dict[str, mx.array] = dict(loaded)
    for name in [name for name in tensors if name.endswith(".gate_proj.weight") and tensors[name].ndim == 3]:
        module = name.removesuffix(".gate_proj.weight")
        gate, up, down = (tensors.pop(f"{module}.{one}_proj.weight") for one in ("gate", "up", "down"))
        both = mx.concatenate([gate, up], axis=1)
        block = re.sub(r"(\.experts)?(\.switch_\w+)?$", "", module)
        for called, matrix in (("gate_up_proj", both), ("down_proj", down)):
            tensors[f"{block}.experts.{called}"] = mx.contiguous(matrix.swapaxes(1, 2)) if flipped else matrix
        if f"{module}.gate_proj.bias" in tensors:
            gate, up, down = (tensors.pop(f"{module}.{one}_proj.bias") for one in ("gate", "up", "down"))
            tensors[f"{block}.experts.gate_up_proj_bias"] = mx.concatenate([gate, up], axis=1)
            tensors[f"{block}.experts.down_proj_bias"] = down
    mx.eval(tensors)
    mx.save_safetensors(str(file), tensors, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "gemma4_text"])
def test_records_of_gate_and_up_in_one_answer_as_mlx_lm_does(
    kind: str, tmp_path: Path, streamed: Streamed
) -> None:
    source = colibri_families.write_config(colibri_architectures.config(kind), tmp_path / kind, bits=None)
    _in_one(source)
    with pytest.raises(checkpoint.CheckpointError, match="mlxpool colibri convert"):
        artifacts.read(source)
    colibri_convert_world.run(source, tmp_path / "records", colibri_convert_world.KEPT)
    ours = _said(streamed(tmp_path / "records")[0])
    assert np.array_equal(_said(load_model(source)[0]).logits, ours.logits)


@pytest.mark.parametrize(
    ("kind", "flipped", "told"),
    [
        ("gpt_oss", False, "a gpt_oss keeps its experts in another way than is read here; make a"),
        ("qwen3_vl_moe", True, "are not the two ways of one feed-forward"),
    ],
)
def test_experts_that_lie_row_by_row_or_with_inputs_first_do_not_become_records(
    kind: str, flipped: bool, told: str, tmp_path: Path
) -> None:
    config = colibri_architectures.config(kind)
    source = colibri_families.write_config(config, tmp_path / kind, bits=None)
    _in_one(source, flipped)
    with pytest.raises((ConvertError, checkpoint.CheckpointError), match=told):
        colibri_convert_world.run(source, tmp_path / "records", colibri_convert_world.KEPT)
    assert not colibri_convert_world.stage(tmp_path / "records").exists()


# ---- prompts that come back -----------------------------------------------------------------------------


async def test_a_state_that_cannot_be_rewound_comes_back_while_experts_are_streamed(tmp_path: Path) -> None:
    folder = colibri_families.write("qwen3_next", tmp_path / "m", bits=None)
    launch = StreamLaunch(slots=3, working_slots=4, chunk=64)
    cache = CacheLaunch(1 << 28, str(tmp_path / "kv"), 1 << 30, None, spill_queue_bytes=1 << 28)

    def loaded() -> Loaded:
        return load_streamed(folder, launch, lambda _done, _total: None)

    prompt = [place * 7 % 250 for place in range(150)]
    wanted = running_engine.plan(prompt, max_tokens=8)
    answers = []
    for _ in range(2):
        running = Running(folder, batch=1, width=64, loaded=loaded, cache=cache)
        try:
            await running.ready()
            answers += [await running.ask(wanted) for _ in range(2)]
            assert (await flush(running.engine, WAIT_S)).durable
        finally:
            running.stop()
            running.engine.join(WAIT_S)
    assert [one.text for one in answers] == [answers[0].text] * 4
    cached = [one.usage.cached_tokens for one in answers]
    assert cached[0] == 0
    assert all(count >= 128 for count in cached[1:])


# ---- settings -------------------------------------------------------------------------------------------


class World(NamedTuple):
    home: Path
    library: Library

    @property
    def here(self) -> Here:
        return Here(Settings(home=self.home), self.library, "cpu")

    def fault(self, name: str) -> str | None:
        return self.library.describe(self.library.resolve(name), "cpu", 2**30).fault


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A home with a model "moe" that is to be streamed and could be held."""
    colibri_families.write("qwen3_moe", tmp_path / "models" / "moe", bits=None)
    names = ("moe", "odd")
    settings = Settings(home=tmp_path, models={name: ModelSettings(experts="stream") for name in names})
    return World(tmp_path, Library(settings, tmp_path / "none"))


async def test_headers_are_read_once_and_on_a_thread_whichever_way_it_is_served(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    whole = checkpoint.read_whole_header

    def noted(path: Path) -> checkpoint.Header:
        readers.append(threading.current_thread().name)
        return whole(path)

    monkeypatch.setattr(checkpoint, "read_whole_header", noted)
    await world.library.look()
    assert world.fault("moe") is None
    assert len(readers) == 1
    assert readers[0] != threading.main_thread().name
    streamed = world.library.describe(world.library.resolve("moe"), "cpu", 2**30)
    world.library.use(Settings(home=world.home))
    held = world.library.describe(world.library.resolve("moe"), "cpu", 2**30)
    assert streamed.stream is not None
    assert (held.stream, held.launch, held.fault) == (None, None, None)
    assert held.plan is not None
    world.library.use(Settings(home=world.home, models={"moe": ModelSettings(experts="stream")}))
    again = world.library.describe(world.library.resolve("moe"), "cpu", 2**30)
    assert (again.stream, len(readers)) == (streamed.stream, 2)


REFUSED = {
    "nemotron_h": (
        "backbone.layers.1.mixer.switch_mlp.fc1.weight",
        "its experts are of two projections, and slots are made for gate, up and down",
    ),
    "muse_spark": ("model.layers.0.mlp.experts.gate_proj.weight", "a norm is kept among its experts"),
    "newest_moe": (
        "model.layers.0.mlp.switch_mlp.gate_proj.weight",
        "it is none of the architectures that this is known to work with",
    ),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_other_architectures_are_refused_by_name_with_what_would_work(kind: str, world: World) -> None:
    tensor, why = REFUSED[kind]
    folder = world.home / "models" / "odd"
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), {tensor: mx.zeros((8, 64, 64))})
    config = {"model_type": kind, "num_hidden_layers": 1, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    told = (
        f"config.json: experts of a {kind} can't be streamed: {why}; "
        'experts = "resident" holds the model as a whole'
    )
    assert world.fault("odd") == f'experts = "stream": {told}'
    with pytest.raises((checkpoint.CheckpointError, ConvertError), match=re.escape(told)):
        colibri_convert_world.run(folder, world.home / "records")


def test_its_plan_can_be_asked_for_before_it_is_to_be_streamed(world: World) -> None:
    # The settings of this home's file say nothing of it.
    folder = world.home / "models" / "moe"
    asked = ["plan", str(folder), "--home", str(world.home), "--slots", "3", "--context", "512", "--json"]
    done = CliRunner().invoke(colibri_command, asked)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    lines = {item["name"]: item["bytes"] for item in told["items"]}
    # Keys and values of 2 heads of 32 on 2 layers; of each expert three matrices of 64 by 64.
    assert lines["target_kv"] == 512 * 2 * (2 * 2 * 32) * 4
    assert lines["main_slab"] == (2 * 3 + told["working_slots"]) * 3 * 64 * 64 * 4
    assert lines["reconstructed_kv"] == lines["indexer_kv"] == lines["mtp_slab"] == 0
    assert (told["layers"], told["experts"], told["top_k"], told["working_slots"]) == (2, 8, 2, 4)


# ---- jobs -----------------------------------------------------------------------------------------------


def test_a_job_that_computes_holds_all_of_it_and_says_how_much_that_is(world: World) -> None:
    lines = world.home / "lines.jsonl"
    lines.write_text('{"text": "The river runs past the library."}\n')
    config = EvaluateConfig(model="moe", file=str(lines))
    assert Evaluate().faults(config, world.here) == []
    weights = (world.home / "models/moe/model.safetensors").stat().st_size
    assert Evaluate().needs(config, world.here).memory_bytes > weights + 64 * 2**20


def test_a_job_that_only_asks_takes_models_whose_experts_are_streamed(world: World) -> None:
    config = tiny_glm.config()
    glm = tiny_glm.write_container(world.home / "models" / "glm", config, tiny_glm.weights(config), mtp=False)
    (world.home / "text.jsonl").write_text('{"text": "a river"}\n')
    (world.home / "adapters" / "mine").mkdir(parents=True)

    def faults(model: str, adapter: str | None = None) -> list[Fault]:
        asked = DatasetConfig(model=model, input=str(world.home / "text.jsonl"), adapter=adapter)
        return Dataset().faults(asked, world.here)

    assert faults("glm") == faults("moe") == []
    streamed = Fault("adapter", "the model's experts are streamed, which goes with no adapter")
    assert faults("glm", "mine") == faults("moe", "mine") == [streamed]
    shard = next(glm.glob("out-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (broken,) = faults("glm")
    assert (broken.field, "glm can't be loaded: out-" in broken.message) == ("model", True)
