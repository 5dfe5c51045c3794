"""A streamed model answers as the resident one does, bit for bit, whatever it holds and however it reads.

The resident model is mlx-lm's own SwitchGLU over all experts (colibri_world).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.layout import ExpertLayout
from mlxpool.worker.colibri.contract import ExpertSource, Filling, ReadDone, Rows
from mlxpool.worker.colibri.faults import Interrupted, ReadFault
from mlxpool.worker.colibri.load import build
from mlxpool.worker.colibri.reader import Reader
from mlxpool.worker.colibri.slab import Staging
from mlxpool.worker.colibri.sources import open_source
from mlxpool.worker.colibri.stream import ExpertStream
from mlxpool.worker.engine.prefill import take_in
from tests import tiny_glm
from tests.tools.expert_fill import Awaited, fill
from tests.unit import colibri_families, colibri_world

# More than attention may choose (32), more than a chunk of 64.
PROMPT = [int(one) for one in np.random.default_rng(5).integers(0, 250, 72)]
GREEDY = 4
LAYERS, EXPERTS, TOP_K = 6, 16, 4
LIMIT_S = 60

Numbers = np.ndarray


class Answer(NamedTuple):
    logits: Numbers
    tokens: list[int]


def _answer(model: Any, prompt: list[int], chunk: int, count: int = GREEDY) -> Answer:
    """Logits of every position and `count` greedy tokens."""
    cache, logits = model.make_cache(), []
    for start in range(0, len(prompt), chunk):
        logits.append(model(mx.array([prompt[start : start + chunk]]), cache)[0])
    tokens = [int(mx.argmax(logits[-1][-1]))]
    for _ in range(count):
        logits.append(model(mx.array([tokens[-1:]]), cache)[0])
        tokens.append(int(mx.argmax(logits[-1][-1])))
    return Answer(np.array(mx.concatenate(logits).astype(mx.float32)), tokens)


def _same(one: Answer, other: Answer) -> bool:
    return np.array_equal(one.logits, other.logits) and one.tokens == other.tokens


class Faulty(ExpertSource):
    """A source that is told when to fail, to wait, and that keeps what was asked of it."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        self.artifact = source.artifact
        self.layout = source.layout
        self.segments = source.segments
        self.overwritten = source.overwritten
        self.close = source.close
        self.filled: list[tuple[int, int]] = []
        self.fails: Callable[[int, int], bool] = lambda layer, expert: False
        self.goes = threading.Event()
        self.goes.set()

    def begin(self, layer: int, expert: int, rows: Rows) -> Filling:
        assert self.goes.wait(LIMIT_S)
        self.filled.append((layer, expert))
        if self.fails(layer, expert):
            for row in rows.values():
                row[:] = 77
            raise ReadFault(layer, expert, "shard", "it broke")
        return self._source.begin(layer, expert, rows)


class Streamed(NamedTuple):
    model: Any
    stream: ExpertStream
    source: Faulty


@pytest.fixture
def streamed() -> Iterator[Callable[..., Streamed]]:
    """Of a folder, by launch. On backend "cpu" a step waits for its experts, elsewhere the next layer does;
    what computes is the processor both times."""
    made: list[Streamed] = []

    def make(
        folder: Path,
        slots: int,
        working: int = 4,
        threads: int = 4,
        backend: Backend = "metal",
        **launch: Any,
    ) -> Streamed:
        artifact = artifacts.read(folder)
        source = Faulty(open_source(artifact, "cpu", "buffered"))
        reader = Reader(source, threads, 1 << 28)
        asked = StreamLaunch(slots=slots, working_slots=working, **launch)
        stream = ExpertStream(source.artifact, source, reader, asked, backend)
        model = build(artifact, "cpu")
        mx.eval(model.parameters())
        stream.install(model)
        made.append(Streamed(model, stream, source))
        return made[-1]

    yield make
    for one in made:
        one.source.goes.set()
        one.stream.close()


class Told(NamedTuple):
    folder: Path
    resident: Any


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """4 bits in groups of 64, as mlx-lm writes it; other numbers in float32, whose kernels are quicker."""
    config = tiny_glm.config(hidden_size=128, intermediate_size=128, moe_intermediate_size=64)
    folder = tiny_glm.write_stacked(
        tmp_path_factory.mktemp("stacked"), config, tiny_glm.weights(config), dtype="F32"
    )
    return Told(folder, colibri_world.resident(folder))


def _short(model: Any) -> Answer:
    return _answer(model, PROMPT[:36], 36, 3)


@pytest.fixture(scope="module")
def short(stacked: Told) -> Answer:
    """Past what attention may choose, in one chunk of sorted rows, and some steps of decode."""
    return _short(stacked.resident)


@pytest.fixture(scope="module")
def answers(stacked: Told) -> dict[int, Answer]:
    """The resident model's, by chunk."""
    return {chunk: _answer(stacked.resident, PROMPT, chunk) for chunk in (7, 64, 72)}


@pytest.mark.parametrize("slots", [1, 4, 5, 8, 16])
def test_streamed_equals_resident_with_any_slots_and_chunks(
    slots: int, stacked: Told, answers: dict[int, Answer], streamed: Callable[..., Streamed]
) -> None:
    model, stream, source = streamed(stacked.folder, slots, 0 if slots == EXPERTS else 4)
    for chunk, answer in answers.items():
        assert _same(_answer(model, PROMPT, chunk), answer)
    stream.turn_ended()
    stats = stream.stats().main
    record = source.layout(1).record_bytes
    assert stats.misses > 0
    assert stats.read_bytes == stats.loads * record == len(source.filled) * record
    assert stats.loads == stats.misses + stats.prefetch_issued
    assert stats.slots == slots
    if slots == EXPERTS:
        assert stats.loads == LAYERS * EXPERTS


@pytest.mark.parametrize("chunk", [3, 40])
def test_a_prompt_that_is_only_taken_in_is_all_there(
    chunk: int, stacked: Told, streamed: Callable[..., Streamed]
) -> None:
    """The last layer's experts are not asked, which would wait for those of the layer before."""
    model, _, source = streamed(stacked.folder, 4, prefetch=False)
    caches = [one.make_cache() for one in (model, stacked.resident)]
    for start in range(0, 60, chunk):
        for one, cache in zip((model, stacked.resident), caches, strict=True):
            take_in(one, PROMPT[start : start + chunk], cache)
            mx.eval([layer.state for layer in cache])
    held, resident = (tree_flatten([layer.state for layer in cache]) for cache in caches)
    assert len(held) == len(resident) > LAYERS
    for (name, one), (_, other) in zip(held, resident, strict=True):
        assert np.array_equal(np.array(one), np.array(other)), name
    assert LAYERS not in {layer for layer, _ in source.filled}


@pytest.mark.parametrize("write", ["direct", "assign"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "metal"])
def test_streamed_equals_resident_however_it_reads(
    backend: Backend,
    write: str,
    overlap: bool,
    prefetch: bool,
    stacked: Told,
    answers: dict[int, Answer],
    streamed: Callable[..., Streamed],
) -> None:
    model, stream, _ = streamed(
        stacked.folder, 6, 3, backend=backend, write=write, overlap=overlap, prefetch=prefetch
    )
    assert _same(_answer(model, PROMPT, 64), answers[64])
    stats = stream.stats()
    assert (stats.write, stats.overlap, stats.prefetch) == (write, overlap, prefetch)
    assert (stats.main.prefetch_issued > 0) == prefetch
    assert stats.main.wait_s > 0
    assert stats.main.service.count == stats.main.loads


@pytest.mark.parametrize(("slots", "working"), [(8, 1), (2, 1), (2, 2), (1, 4)])
def test_a_token_computes_each_expert_as_soon_as_it_is_there(
    slots: int, working: int, stacked: Told, short: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads here end when they are waited for, so what is computed before the last of them was there."""
    told: list[int | str] = []
    begin = mx.async_eval

    def computed(*arrays: mx.array) -> None:
        told.append("computed")
        begin(*arrays)  # type: ignore[no-untyped-call]

    artifact = artifacts.read(stacked.folder)
    source = open_source(artifact, "cpu", "buffered")
    model = build(artifact, "cpu")
    launch = StreamLaunch(slots=slots, working_slots=working, prefetch=False)
    stream = ExpertStream(source.artifact, source, _Late(source, told), launch, "cpu")
    stream.install(model)
    assert _same(_short(model), short)
    monkeypatch.setattr(mx, "async_eval", computed)
    told.clear()
    hits, misses = stream.stats().main.hits, stream.stats().main.misses
    cache = model.make_cache()
    model(mx.array([PROMPT[:1]]), cache)
    stats = stream.stats().main
    missed = stats.misses - misses
    assert missed > LAYERS
    reads = [layer for layer in told if layer != "computed"]
    assert len(reads) == missed
    # Each right behind its read; the last of a layer with what follows.
    behind = [(one, told[at + 1]) for at, one in enumerate(told[:-1]) if one != "computed"]
    assert all(follows != layer for layer, follows in behind)
    assert stats.hits - hits == LAYERS * TOP_K - missed
    stream.close()


def test_resident_experts_are_asked_without_waiting_for_the_router(
    stacked: Told, short: Answer, streamed: Callable[..., Streamed]
) -> None:
    model, stream, source = streamed(stacked.folder, EXPERTS, 0)
    stream.preload()
    assert sorted(source.filled) == [(layer, one) for layer in range(1, 7) for one in range(EXPERTS)]
    assert _same(_short(model), short)
    stream.turn_ended()
    stats = stream.stats().main
    assert stream.sync_s == 0
    assert (stats.misses, stats.sweeps, stats.loads) == (0, 0, LAYERS * EXPERTS)
    assert stats.hits > 0
    # Every position's choices and no more, old ones counting a little less.
    routed = (36 + 3) * TOP_K
    assert [round(sum(one.counts)) for one in stream.heat().layers] == pytest.approx([routed] * 6, rel=0.01)


FORMS: dict[str, Callable[..., Path]] = {
    "rows": lambda folder, config, numbers: tiny_glm.write_container(folder, config, numbers, scheme="row"),
    "groups": lambda folder, config, numbers: tiny_glm.write_container(
        folder, config, numbers, scheme="grouped"
    ),
    "floats": tiny_glm.write_experts,
    "mxfp4": lambda folder, config, numbers: tiny_glm.write_stacked(
        folder, config, numbers, mode="mxfp4", dtype="F32"
    ),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_streamed_equals_resident_in_every_form(
    form: str, tmp_path: Path, streamed: Callable[..., Streamed]
) -> None:
    config = tiny_glm.config(num_hidden_layers=2, indexer_types=["full", "shared"])
    folder = FORMS[form](tmp_path / "m", config, tiny_glm.weights(config))
    prompt = PROMPT[:20]
    answer = _answer(colibri_world.resident(folder), prompt, 17, 3)
    for slots, working in ((5, 4), (1, 1)):
        model, stream, _ = streamed(folder, slots, working)
        assert _same(_answer(model, prompt, 17, 3), answer)
        assert stream.stats().main.misses > 0


@pytest.mark.parametrize("kind", list(colibri_families.CONFIGS))
def test_streamed_equals_resident_in_other_architectures(
    kind: str, tmp_path: Path, streamed: Callable[..., Streamed]
) -> None:
    folder = colibri_families.write(kind, tmp_path / kind)
    models = colibri_world.resident(folder), streamed(folder, 3, 2).model
    resident, ours = (_logits(model) for model in models)
    assert np.array_equal(resident, ours)


def _logits(model: Any) -> Numbers:
    cache = make_prompt_cache(model)
    inputs = [PROMPT[:40], *([token] for token in PROMPT[40:44])]
    return np.array(mx.concatenate([model(mx.array([part]), cache)[0] for part in inputs]).astype(mx.float32))


def test_a_chunk_reads_each_expert_that_it_needs_once(
    stacked: Told, streamed: Callable[..., Streamed]
) -> None:
    model, stream, source = streamed(stacked.folder, 4, 4)
    mx.eval(model(mx.array([PROMPT])))
    assert len(set(source.filled)) == len(source.filled)
    held = {layer.layer: set(layer.resident) for layer in stream.heat().layers}
    source.filled.clear()
    mx.eval(model(mx.array([PROMPT])))
    assert len(set(source.filled)) == len(source.filled)
    assert not [(layer, expert) for layer, expert in source.filled if expert in held[layer]]
    stats = stream.stats().main
    assert stats.sweeps == 2 * LAYERS
    assert stats.hits == 4 * LAYERS


def test_what_a_chunk_asked_for_most_stays(stacked: Told, streamed: Callable[..., Streamed]) -> None:
    model, stream, _ = streamed(stacked.folder, 4, 4)
    mx.eval(model(mx.array([PROMPT])))
    for layer in stream.heat().layers:
        others = [count for one, count in enumerate(layer.counts) if one not in layer.resident]
        assert min(layer.counts[one] for one in layer.resident) >= max(others)


def test_reads_that_are_assigned_need_few_buffers(
    stacked: Told,
    answers: dict[int, Answer],
    streamed: Callable[..., Streamed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("stream", "passes"):
        monkeypatch.setattr(f"mlxpool.worker.colibri.{module}.STAGED", 2)
    made = 0
    take = Staging.take

    def counted(self: Staging, layout: ExpertLayout) -> Rows:
        nonlocal made
        made += not self._idle.get(layout.kind)
        return take(self, layout)

    monkeypatch.setattr(Staging, "take", counted)
    held, all_held, _ = streamed(stacked.folder, EXPERTS, 0, write="assign")
    all_held.preload()
    assert all_held.stats().main.resident == LAYERS * EXPERTS
    assert made == 4
    model, _, _ = streamed(stacked.folder, EXPERTS - 1, 2, write="assign", prefetch=False)
    for one in (held, model):
        assert np.array_equal(_answer(one, PROMPT, 64, 0).logits[:64], answers[64].logits[:64])
    assert made <= 8


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_read_that_fails_ends_that_request_and_no_other(
    at: str, stacked: Told, short: Answer, streamed: Callable[..., Streamed]
) -> None:
    # One read at a time: when it fails others haven't begun.
    model, stream, source = streamed(stacked.folder, 6, 4, threads=1)
    if at == "decode":
        mx.eval(model(mx.array([PROMPT])))
        source.fails = lambda layer, expert: layer == 3
    else:
        source.fails = lambda layer, expert: layer == 3 and expert % 5 == 2
    with pytest.raises(ReadFault, match=r"layer 3, expert \d+ could not be read from shard: it broke"):
        _answer(model, PROMPT, 1 if at == "decode" else 64)
    assert stream.stats().main.loads < len(source.filled)
    source.fails = lambda layer, expert: False
    assert _same(_short(model), short)


def _given_up_at(model: Any, stream: ExpertStream, moment: int) -> None:
    """Somebody leaves; it is asked for so many times until it is told."""
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == moment

    stream.stop = stop
    with pytest.raises(Interrupted):
        _short(model)
    assert stream.progress == moment
    stream.stop = lambda: False


def test_a_pass_that_nobody_waits_for_is_given_up_between_groups(
    stacked: Told, short: Answer, streamed: Callable[..., Streamed]
) -> None:
    model, stream, source = streamed(stacked.folder, 4, 4)
    _given_up_at(model, stream, 12)
    assert {layer for layer, _ in source.filled} < set(range(1, 7))
    assert _same(_short(model), short)


def test_a_wide_pass_that_is_given_up_behind_its_attention_reads_nothing(
    stacked: Told, short: Answer, streamed: Callable[..., Streamed]
) -> None:
    model, stream, source = streamed(stacked.folder, 4, 4)
    # Once when the first layer's experts are asked, once when it is known for which.
    _given_up_at(model, stream, 2)
    assert not source.filled
    assert _same(_short(model), short)


def test_slots_can_be_given_back_and_taken_again(
    stacked: Told, short: Answer, streamed: Callable[..., Streamed]
) -> None:
    model, stream, source = streamed(stacked.folder, 8, 4)
    held = stream.stats().slab_bytes
    for slots in (8, 3, 1, EXPERTS):
        stream.resize(slots)
        assert stream.slots == slots
        assert stream.stats().slab_bytes - held == (slots - 8) * stream.slot_bytes
        assert _same(_short(model), short)
    before = len(source.filled)
    assert _same(_short(model), short)
    assert len(source.filled) == before


def test_experts_all_held_can_be_given_back_where_no_working_slots_were_planned(
    stacked: Told, short: Answer, streamed: Callable[..., Streamed]
) -> None:
    model, stream, _ = streamed(stacked.folder, EXPERTS, 0)
    stream.preload()
    assert stream.stats().main.working_slots == 0
    stream.resize(5)
    assert _same(_short(model), short)
    assert stream.stats().main.working_slots == 2 * TOP_K


class _Late:
    """A reader whose reads end when they are waited for, and say of which layer they are."""

    def __init__(self, source: ExpertSource, told: list[int | str]) -> None:
        self._source, self._told = source, told

    def submit(self, layer: int, expert: int, rows: Rows, *, demand: bool = True) -> Future[ReadDone]:
        def read() -> int:
            self._told.append(layer)
            return fill(self._source, layer, expert, rows)

        assert demand
        return Awaited(read)

    def hasten(self, _: Future[ReadDone]) -> None:
        raise AssertionError("nothing is read ahead")

    def close(self) -> None:
        self._source.close()


class _Ahead:
    """A reader whose reads ahead are in one state when their layer's turn comes; others end at once."""

    def __init__(self, source: ExpertSource, state: str) -> None:
        self._source, self._state = source, state
        self.hastened = 0

    def hasten(self, read: Future[ReadDone]) -> None:
        assert not read.done()
        self.hastened += 1

    def submit(self, layer: int, expert: int, rows: Rows, *, demand: bool = True) -> Future[ReadDone]:
        if not demand and self._state == "waiting":
            return Future()
        if not demand and self._state == "failed":
            failed: Future[ReadDone] = Future()
            failed.set_exception(ReadFault(layer, expert, "shard", "it broke"))
            return failed
        read = Awaited(lambda: fill(self._source, layer, expert, rows))
        if demand or self._state == "done":
            read.result()
        return read

    def close(self) -> None:
        self._source.close()


@pytest.mark.parametrize("state", ["waiting", "begun", "done", "failed"])
def test_reads_ahead_make_no_difference_whatever_became_of_them(
    state: str, stacked: Told, short: Answer
) -> None:
    artifact = artifacts.read(stacked.folder)
    source = open_source(artifact, "cpu", "buffered")
    model = build(artifact, "cpu")
    launch = StreamLaunch(slots=7, working_slots=4)
    reader = _Ahead(source, state)
    stream = ExpertStream(source.artifact, source, reader, launch, "cpu")
    stream.install(model)
    assert _same(_short(model), short)
    stream.close()
    stats = stream.stats().main
    if state == "failed":
        assert (stats.loads, stats.prefetch_used) == (stats.misses, 0)
        return
    assert stats.loads == stats.misses + stats.prefetch_issued
    assert reader.hastened == (stats.prefetch_used if state == "begun" else 0)
    if state == "waiting":
        assert (stats.prefetch_issued, stats.prefetch_used) == (0, 0)
    else:
        assert 0 < stats.prefetch_used <= stats.prefetch_issued - stats.prefetch_wasted


def test_favourites_are_pinned_when_a_turn_ends_and_known_at_the_next_start(
    stacked: Told, tmp_path: Path, streamed: Callable[..., Streamed]
) -> None:
    model, stream, _ = streamed(stacked.folder, 8, 4, pins=0.25, usage_folder=str(tmp_path))
    _short(model)
    stream.turn_ended()
    for layer in stream.heat().layers:
        wanted = sorted(range(EXPERTS), key=lambda one: -layer.counts[one])[:2]
        assert set(layer.pinned) <= set(wanted)
    assert stream.stats().main.pinned == 2 * LAYERS
    stream.save()
    _, again, source = streamed(stacked.folder, 8, 4, usage_folder=str(tmp_path))
    again.preload()
    for layer in again.heat().layers:
        others = [count for one, count in enumerate(layer.counts) if one not in layer.resident]
        assert len(layer.resident) == 8
        assert min(layer.counts[one] for one in layer.resident) >= max(others)
        filled = [one for at, one in source.filled if at == layer.layer]
        assert sorted(filled) == layer.resident
