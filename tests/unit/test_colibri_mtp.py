"""The draft layer of a checkpoint: what it proposes, what is left of it after a round, whose slots it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.worker.colibri import load, mtp
from mlxpool.worker.colibri.contract import Filling, Rows
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.model import Model, layer_cache
from mlxpool.worker.colibri.mtp import MtpDraft, add_draft_layer
from mlxpool.worker.colibri.serving import load_streamed
from mlxpool.worker.colibri.sources import FileSource
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.terms import Loaded
from mlxpool.worker.load import warmed_up
from mlxpool.worker.request.plan import Plan
from mlxpool.worker.text.events import Failure, Finish
from tests import tiny_glm
from tests.tiny_glm import Weights
from tests.tools.running_engine import Running, plan, until
from tests.unit.colibri_world import with_experts

# Layer 0 is dense, layer 3 the draft layer; attention chooses past 32 tokens.
SMALL = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "dtype": "float32"}
MTP = "model.layers.3"


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return tiny_glm.config(**SMALL)


@pytest.fixture(scope="module")
def numbers(config: dict[str, Any]) -> Weights:
    return tiny_glm.weights(config, 3)


def agreeing(numbers: Weights, config: dict[str, Any], gain: float) -> Weights:
    """Weights whose draft layer says what the model says, but for what the layers between add: `gain` of it.

    The model's next token is then mostly the last one's doing, and the draft layer passes that on.
    """
    made = dict(numbers)
    for name, number in numbers.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            made[name] = number * np.float32(0.0 if name.startswith(MTP) else gain)
    width = config["hidden_size"]
    made[f"{MTP}.eh_proj.weight"] = np.eye(width, 2 * width, dtype=np.float32)
    made[f"{MTP}.enorm.weight"] = np.ones(width, np.float32)
    made[f"{MTP}.shared_head.norm.weight"] = numbers["model.norm.weight"]
    return made


def resident(folder: Path, numbers: Weights) -> Model:
    """The model with its draft layer, every expert in memory in float32."""
    found = artifacts.read(folder)
    model = load.build(found, "cpu")
    assert isinstance(model, Model)
    add_draft_layer(model, found, "cpu")
    with_experts(model, numbers)
    args = model.args
    experts = SwitchGLU(args.hidden_size, args.moe_intermediate_size, args.n_routed_experts)
    for projection in ("gate_proj", "up_proj", "down_proj"):
        names = [f"{MTP}.mlp.experts.{one}.{projection}.weight" for one in range(args.n_routed_experts)]
        experts[projection].weight = mx.array(np.stack([numbers[name] for name in names]))
    load.put(model, "mtp.mlp.switch_mlp", experts)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def folder(config: dict[str, Any], numbers: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_glm.write_experts(tmp_path_factory.mktemp("glm") / "plain", config, numbers, dtype="F32")


@pytest.fixture(scope="module")
def untrained(folder: Path, numbers: Weights) -> Model:
    return resident(folder, numbers)


def best(logits: mx.array, _ahead: int) -> mx.array:
    return mx.argmax(logits, axis=-1)


def expected(model: Model, ids: Sequence[int], first: int, count: int) -> list[int]:
    """What the draft layer says after `ids`, each time from the beginning and in one pass: it has seen the
    states of the ids from `first` on."""
    layer: mtp.DraftLayer = model.mtp
    states = model.model.norm(model.hidden(mx.array([ids[:-1]])))[:, first:]
    tokens, drafts = list(ids[first + 1 :]), []
    for _ in range(count):
        x = layer.joined(model.model.embed_tokens(mx.array([tokens])), states)
        behind = layer.state(x, layer_cache("indexer" in layer.self_attn))[:, -1:]
        drafts.append(int(mx.argmax(model.lm_head(behind)[0, -1]).item()))
        states = mx.concatenate([states, behind], axis=1)
        tokens.append(drafts[-1])
    return drafts


def prompt(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(32, 127, length).tolist()
    return found


@pytest.mark.parametrize("length", [2, 9, 31, 90])
@pytest.mark.parametrize("count", [1, 4])
def test_drafts_are_those_of_a_pass_over_all_that_is_known(untrained: Model, length: int, count: int) -> None:
    draft, ids, cache = MtpDraft(untrained, count), prompt(length), untrained.make_cache()
    untrained(mx.array([ids[:-1]]), cache)
    draft.open()
    assert draft.propose(ids, count, best) == expected(untrained, ids, 0, count)


def test_what_drafts_left_is_cut_off_and_what_came_is_taken_in_from_the_model(untrained: Model) -> None:
    """Rounds of which none, some and all drafts come, past what attention chooses from."""
    draft, ids, cache = MtpDraft(untrained, 3), prompt(26), untrained.make_cache()
    untrained(mx.array([ids[:-1]]), cache)
    draft.open()
    for comes in (0, 2, 3, 1, 3, 0, 3):
        drafts = list(draft.propose(ids, 3, best))
        assert drafts == expected(untrained, ids, 0, 3)
        untrained(mx.array([[ids[-1], *drafts]]), cache)
        for each in cache:
            each.trim(3 - comes)
        other = (drafts[comes] + 1) % 256 if comes < 3 else 77
        ids = [*ids, *drafts[:comes], other]
    assert len(ids) > 40


def test_a_prompt_in_chunks_is_taken_in_whole_up_to_the_window(
    untrained: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "WINDOW_TOKENS", 16)
    draft, ids, cache = MtpDraft(untrained, 2), prompt(70), untrained.make_cache()
    for start in range(0, 69, 10):
        untrained(mx.array([ids[start : min(start + 10, 69)]]), cache)
    draft.open()
    # The last pass has 9, and the one before it ends the window.
    assert draft.propose(ids, 2, best) == expected(untrained, ids, 50, 2)


def test_the_first_draft_that_is_not_likely_enough_ends_the_drafts(untrained: Model) -> None:
    ids = prompt(30)
    probabilities: list[float] = []

    def noting(logits: mx.array, _ahead: int) -> mx.array:
        probabilities.append(float(np.array(mx.softmax(logits[0])).max()))
        return mx.argmax(logits, axis=-1)

    def drafts(confidence: float) -> list[int]:
        draft = MtpDraft(untrained, 5, confidence)
        untrained(mx.array([ids[:-1]]), untrained.make_cache())
        draft.open()
        return list(draft.propose(ids, 5, noting))

    every = drafts(0.0)
    assert len(every) == len(probabilities) == 5
    for one in list(probabilities):
        kept = next((place for place, other in enumerate(probabilities[:5]) if other < one + 1e-6), 5)
        assert drafts(one + 1e-6) == every[:kept]
    assert drafts(1.1) == []


def test_other_rows_passes_are_nothing_to_guess_from(untrained: Model) -> None:
    draft, ids = MtpDraft(untrained, 2), prompt(12)
    other = [*prompt(12, seed=9)[:-2], (ids[-2] + 1) % 256]
    untrained(mx.array([other]), untrained.make_cache())
    draft.open()
    assert draft.propose(ids, 2, best) == []
    # A prompt that was restored: its row's first pass is all that is known.
    cache = untrained.make_cache()
    untrained.hidden(mx.array([ids[:-1]]), cache)
    untrained(mx.array([ids[-1:]]), cache)
    ids = [*ids, 50]
    assert draft.propose(ids, 2, best) == expected(untrained, ids, 11, 2)
    # In a batch nobody's.
    untrained(mx.array([ids, ids]), untrained.make_cache())
    assert draft.propose(ids, 2, best) == []


def test_the_last_token_is_not_guessed_for(untrained: Model) -> None:
    draft, ids = MtpDraft(untrained, 2), prompt(12)
    untrained(mx.array([ids[:-1]]), untrained.make_cache())
    draft.open()
    assert draft.propose(ids, 0, best) == []


class Engines:
    """Engines that end with the test."""

    def __init__(self) -> None:
        self.started: list[Running] = []

    async def start(self, loaded: Callable[[], Loaded]) -> Running:
        running = Running(Path("unread"), 1, 32, loaded=loaded)
        self.started.append(running)
        return await running.ready()


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    made = Engines()
    yield made
    for running in made.started:
        stream = (await running.engine.loaded).stream
        if stream is not None:
            await running.engine.call(stream.close)
        running.stop()


def in_memory(model: Model, ahead: int) -> Loaded:
    """What an engine is given of a resident model. ahead: 0 for no drafts."""
    model.tap = None
    unasked: Any = None  # by engines without a prompt cache
    draft = MtpDraft(model, ahead) if ahead else None
    return msgspec.structs.replace(warmed_up(model, 0, unasked), draft=draft)


def streamed(folder: Path, launch: StreamLaunch) -> Loaded:
    return load_streamed(folder, launch, lambda _done, _total: None)


async def answers(running: Running, plans: Sequence[Plan]) -> tuple[list[list[int]], int, int, int]:
    """All ids of each, and how many tokens were drafted, accepted, and passes made, together."""
    ids, told = [], np.zeros(3, int)
    for of in plans:
        client, row = running.submit(of)
        await asyncio.wait_for(client.ended.wait(), 60)
        assert isinstance(client.events[-1], Finish), client.events
        ids.append(row.ids)
        if client.usage.speculation is not None:
            told += msgspec.structs.astuple(client.usage.speculation)
    drafted, accepted, calls = (int(count) for count in told)
    return ids, drafted, accepted, calls


@pytest.mark.parametrize("ahead", [1, 3, 5])
async def test_answers_are_those_without_drafts_and_take_fewer_passes(
    config: dict[str, Any], numbers: Weights, tmp_path: Path, engines: Engines, ahead: int
) -> None:
    made = agreeing(numbers, config, 0.15)
    model = resident(tiny_glm.write_experts(tmp_path, config, made, dtype="F32"), made)
    plans = [plan(prompt(length, length), max_tokens=20) for length in (1, 2, 25, 61)]
    plans += [plan(prompt(30, seed), max_tokens=20, temperature=0.8, seed=seed) for seed in (1, 2)]
    alone, *_ = await answers(await engines.start(partial(in_memory, model, 0)), plans)
    ids, drafted, accepted, calls = await answers(
        await engines.start(partial(in_memory, model, ahead)), plans
    )
    assert ids == alone
    assert drafted > accepted > 0
    assert calls + accepted == 20 * len(plans)
    assert calls < 0.85 * 20 * len(plans)


async def test_an_untrained_draft_layer_changes_no_answer(untrained: Model, engines: Engines) -> None:
    plans = [plan(prompt(length), max_tokens=24) for length in (3, 40)]
    alone, *_ = await answers(await engines.start(partial(in_memory, untrained, 0)), plans)
    ids, drafted, _, _ = await answers(await engines.start(partial(in_memory, untrained, 3)), plans)
    assert (ids, drafted > 0) == (alone, True)


@pytest.mark.parametrize("form", ["stacked", "row", "grouped"])
def test_every_form_of_a_folder_has_a_draft_layer_that_fits(
    config: dict[str, Any], numbers: Weights, tmp_path: Path, form: Literal["stacked", "row", "grouped"]
) -> None:
    if form == "stacked":
        found = artifacts.read(tiny_glm.write_stacked(tmp_path, config, numbers, mtp=True))
    else:
        found = artifacts.read(tiny_glm.write_container(tmp_path, config, numbers, scheme=form))
    model = load.build(found, "cpu")
    assert isinstance(model, Model)
    add_draft_layer(model, found, "cpu")
    mx.eval(model.parameters())
    # The container's draft layer has no indexer.
    assert ("indexer" in model.mtp.self_attn) == (form == "stacked")
    tokens, states = mx.array([[65, 66]]), mx.random.normal((1, 2, config["hidden_size"]))
    joined = np.array(model.mtp.joined(model.model.embed_tokens(tokens), states))
    exact = Exact(numbers, config).joined([65, 66], np.array(states))
    # 4 bits in the stacked folder, 8 in the container.
    assert np.abs(joined - exact).max() < (0.6 if form == "stacked" else 0.06)


class Exact:
    """The joining of the two inputs, in numpy, by the checkpoint's numbers."""

    def __init__(self, numbers: Weights, config: dict[str, Any]) -> None:
        self._numbers, self._eps = numbers, config["rms_norm_eps"]

    def joined(self, tokens: Sequence[int], states: Any) -> Any:
        embedded = self._numbers["model.embed_tokens.weight"][list(tokens)][None]
        both = np.concatenate([self._normed(embedded, "enorm"), self._normed(states, "hnorm")], axis=-1)
        return both @ self._numbers[f"{MTP}.eh_proj.weight"].T

    def _normed(self, x: Any, name: str) -> Any:
        scale = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self._eps)
        return x * scale * self._numbers[f"{MTP}.{name}.weight"]


def test_an_embedding_and_a_head_that_are_repeated_beside_the_layer_are_left_there(
    config: dict[str, Any], numbers: Weights, tmp_path: Path
) -> None:
    repeated = {
        **numbers,
        f"{MTP}.embed_tokens.weight": numbers["model.embed_tokens.weight"],
        f"{MTP}.shared_head.head.weight": numbers["lm_head.weight"],
    }
    found = artifacts.read(tiny_glm.write_experts(tmp_path, config, repeated, dtype="F32"))
    model = load.build(found, "cpu")
    add_draft_layer(model, found, "cpu")  # type: ignore[arg-type]


def test_a_folder_without_a_draft_layer_is_refused(
    config: dict[str, Any], numbers: Weights, tmp_path: Path
) -> None:
    found = artifacts.read(tiny_glm.write_experts(tmp_path, config, numbers, dtype="F32", mtp=False))
    model = load.build(found, "cpu")
    with pytest.raises(CheckpointError, match="holds no draft layer"):
        add_draft_layer(model, found, "cpu")  # type: ignore[arg-type]


SLOTS = {
    "one slot": StreamLaunch(slots=1, working_slots=4, mtp_slots=1, mtp_working_slots=4, drafts=3, chunk=32),
    "some": StreamLaunch(slots=6, working_slots=8, mtp_slots=5, mtp_working_slots=8, drafts=3, chunk=32),
    "all": StreamLaunch(slots=16, working_slots=0, mtp_slots=16, mtp_working_slots=0, drafts=3, chunk=32),
}


@pytest.mark.parametrize(
    ("slots", "form"),
    [("one slot", "experts"), ("some", "experts"), ("all", "experts"), ("some", "container")],
)
async def test_streamed_answers_are_those_without_drafts_and_the_layers_own_slots_are_used(
    config: dict[str, Any],
    numbers: Weights,
    tmp_path: Path,
    engines: Engines,
    slots: str,
    form: Literal["experts", "container"],
) -> None:
    launch = SLOTS[slots]
    made = agreeing(numbers, config, 0.15)
    if form == "experts":
        tiny_glm.write_experts(tmp_path, config, made, dtype="F32")
    else:
        tiny_glm.write_container(tmp_path, config, made)
    plans = [plan(prompt(length, length), max_tokens=20) for length in (2, 50)]
    undrafted = msgspec.structs.replace(launch, drafts=0)
    alone, *_ = await answers(await engines.start(partial(streamed, tmp_path, undrafted)), plans)
    drafted = await engines.start(partial(streamed, tmp_path, launch))
    ids, guessed, accepted, calls = await answers(drafted, plans)
    assert ids == alone
    assert (accepted > 6, calls + accepted) == (True, 40)
    stream = (await drafted.engine.loaded).stream
    assert stream is not None
    own = stream.stats().mtp
    assert own is not None
    assert (own.layers, own.experts, own.slots) == (1, 16, launch.mtp_slots)
    assert own.read_bytes == own.loads * artifacts.read(tmp_path).layouts[3].record_bytes
    if launch.mtp_slots < 16:
        # A draft asks for one token's experts, and a catching up for none.
        assert own.hits + own.misses == 4 * guessed
        assert own.loads == own.misses > 4


@pytest.fixture
def agreeing_folder(config: dict[str, Any], numbers: Weights, tmp_path: Path) -> Path:
    return tiny_glm.write_experts(tmp_path, config, agreeing(numbers, config, 0.15), dtype="F32")


async def test_an_expert_of_the_draft_layer_that_cannot_be_read_ends_that_request_alone(
    agreeing_folder: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await engines.start(partial(streamed, agreeing_folder, SLOTS["one slot"]))
    of = plan(prompt(20), max_tokens=20)
    (expected,), *_ = await answers(running, [of])
    broken = [True]
    begin = FileSource.begin

    def failing(self: FileSource, layer: int, expert: int, rows: Rows) -> Filling:
        if layer == 3 and broken:
            broken.pop()
            raise ReadFault(layer, expert, "out-mtp-00000.safetensors", "the disk is gone")
        return begin(self, layer, expert, rows)

    monkeypatch.setattr(FileSource, "begin", failing)
    client = await running.ask(of)
    (failure,) = (event for event in client.events if isinstance(event, Failure))
    assert "layer 3, expert" in failure.error.message
    assert "the disk is gone" in failure.error.message
    assert (await answers(running, [of]))[0] == [expected]


async def test_a_draft_is_given_up_when_nobody_waits_for_it(
    agreeing_folder: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await engines.start(partial(streamed, agreeing_folder, SLOTS["one slot"]))
    of = plan(prompt(20), max_tokens=20)
    (expected,), *_ = await answers(running, [of])
    rows: list[Row] = []
    begin = FileSource.begin

    def leaving(self: FileSource, layer: int, expert: int, rows_of: Rows) -> Filling:
        if layer == 3 and rows and rows[0].emitted > 4:
            rows.pop().cancelled = True
        return begin(self, layer, expert, rows_of)

    monkeypatch.setattr(FileSource, "begin", leaving)
    client, row = running.submit(of)
    rows.append(row)
    await until(lambda: running.engine.pending == 0)
    assert not any(isinstance(event, Finish | Failure) for event in client.events)
    assert 4 < row.emitted < 20
    assert running.engine.counters.cancelled == 1
    assert (await answers(running, [of]))[0] == [expected]


async def test_a_requests_telemetry_tells_what_was_drafted(agreeing_folder: Path, engines: Engines) -> None:
    running = await engines.start(partial(streamed, agreeing_folder, SLOTS["some"]))
    client = await running.ask(plan(prompt(20), max_tokens=20))
    told = running.engine.streamed
    assert told is not None
    assert told.last_turn is not None
    assert client.usage.speculation is not None
    turn = told.last_turn
    assert (turn.tokens, turn.accepted) == (20, client.usage.speculation.accepted)
    assert turn.drafted == client.usage.speculation.drafted > 0
