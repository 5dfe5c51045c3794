"""What a step gives the model before its experts are there, and what of it is left when a pass fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.worker.colibri.attention import Attention
from mlxpool.worker.colibri.contract import ExpertSource, ReadDone, Rows
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.load import build, clear
from mlxpool.worker.colibri.slab import Slab
from mlxpool.worker.colibri.sources import open_source
from mlxpool.worker.colibri.stream import ExpertStream
from tests import tiny_glm
from tests.tools.expert_fill import Awaited, fill
from tests.unit import colibri_world

# Layer 0 is dense.
STREAMED, EXPERTS, TOP_K = 3, 16, 4
TOKENS = [int(one) for one in np.random.default_rng(8).integers(0, 250, 12)]


class _Reader:
    """Slots hold no numbers until somebody waits for what is read into them."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        self.told: list[str] = []
        self.fails = False

    def submit(self, layer: int, expert: int, rows: Rows, *, demand: bool = True) -> Future[ReadDone]:
        # Nobody guesses the first layer's.
        assert demand or layer > 1
        for row in rows.values():
            row[:] = 0xFF

        fails = self.fails

        def read() -> int:
            if fails:
                raise ReadFault(layer, expert, "shard", "it broke")
            self.told.append(f"read {layer}")
            return fill(self._source, layer, expert, rows)

        return Awaited(read)

    def hasten(self, _: Future[ReadDone]) -> None:
        pass

    def close(self) -> None:
        self._source.close()


class World(NamedTuple):
    model: Any
    stream: ExpertStream
    reader: _Reader


Made = Callable[..., World]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_glm.config(
        num_hidden_layers=1 + STREAMED, indexer_types=["full", "shared", "full", "shared"]
    )
    return tiny_glm.write_stacked(
        tmp_path_factory.mktemp("passes"), config, tiny_glm.weights(config), dtype="F32"
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    return _logits(colibri_world.resident(folder))


@pytest.fixture
def made(folder: Path) -> Made:
    def make(backend: Backend, slots: int, working: int = 4, **launch: Any) -> World:
        artifact = artifacts.read(folder)
        source = open_source(artifact, "cpu", "buffered")
        reader = _Reader(source)
        asked = StreamLaunch(slots=slots, working_slots=working, **launch)
        stream = ExpertStream(source.artifact, source, reader, asked, backend)
        model = build(artifact, "cpu")
        mx.eval(model.parameters())
        stream.install(model)
        return World(model, stream, reader)

    return make


def _logits(model: Any) -> list[Any]:
    """Of tokens one by one."""
    cache = model.make_cache()
    return [np.array(model(mx.array([[token]]), cache)) for token in TOKENS]


def _same(one: list[Any], other: list[Any]) -> bool:
    return np.array_equal(np.concatenate(one), np.concatenate(other))


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(("slots", "working"), [(1, 4), (3, 1), (6, 4), (15, 1)])
def test_nothing_is_computed_of_experts_that_are_being_read(
    slots: int, working: int, prefetch: bool, made: Made, expected: list[Any]
) -> None:
    world = made("metal", slots, working, prefetch=prefetch)
    assert _same(_logits(world.model), expected)
    assert world.stream.stats().main.misses > len(TOKENS)


@pytest.mark.parametrize("backend", ["metal", "cpu"])
def test_attention_is_made_while_the_layer_before_it_is_read_where_it_is_not_computed_then(
    backend: Backend, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, reader = made(backend, 1, prefetch=False)
    attend = Attention.__call__

    def attending(self: Attention, *given: Any) -> Any:
        reader.told.append("attention")
        return attend(self, *given)

    monkeypatch.setattr(Attention, "__call__", attending)
    _logits(model)
    reader.told.clear()
    mx.eval(model(mx.array([TOKENS[:1]])))
    made_at = [at for at, one in enumerate(reader.told) if one == "attention"]
    first, last = reader.told.index("read 1"), len(reader.told) - 1 - reader.told[::-1].index("read 1")
    # Of the dense layer, of the first that is streamed, and then of the one behind that.
    assert len(made_at) == 1 + STREAMED
    assert made_at[1] < first
    assert made_at[2] < first if backend == "metal" else made_at[2] > last


def _fail_once(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The attention that is made as the `at`-th from now on raises."""
    attend = Attention.__call__
    left = [at]

    def failing(self: Attention, *given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no room for attention")
        return attend(self, *given)

    monkeypatch.setattr(Attention, "__call__", failing)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_pass_that_fails_between_two_layers_changes_no_other(
    fails: bool, ended: bool, made: Made, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a read that it had begun and that fails."""
    model, stream, reader = made("metal", 2, prefetch=False)
    mx.eval(model(mx.array([TOKENS[-1:]])))
    # The second layer that is streamed is made, and the first one's reads are under way.
    _fail_once(monkeypatch, 3)
    reader.fails = fails
    with pytest.raises(MemoryError):
        _logits(model)
    reader.fails = False
    if ended:
        stream.turn_ended()
    assert _same(_logits(model), expected)


def test_a_stream_that_is_closed_after_a_pass_that_failed_keeps_no_slots(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs: list[weakref.ref[Slab]] = []
    allocate = Slab._allocate

    def told(self: Slab, *given: Any) -> None:
        slabs.append(weakref.ref(self))
        allocate(self, *given)

    monkeypatch.setattr(Slab, "_allocate", told)
    model, stream, _ = made("metal", 2)
    _fail_once(monkeypatch, 7)
    with pytest.raises(MemoryError):
        _logits(model)
    stream.close()
    for layout in stream.artifact.layers:
        clear(model, layout)
    del stream, _
    gc.collect()
    assert slabs
    assert not [one for one in slabs if one() is not None]


@pytest.mark.parametrize("prefetch", [True, False])
def test_slots_that_are_assigned_are_never_copied(
    prefetch: bool, made: Made, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products that still read them would have them copied whole."""
    model, _, _ = made("metal", 8, write="assign", prefetch=prefetch)
    assign = Slab.assign
    assigned = copied = 0

    def places(slab: Slab) -> list[int]:
        return [np.array(one, copy=False).__array_interface__["data"][0] for one in slab.arrays.values()]

    def told(self: Slab, slot: int, staged: Rows) -> None:
        nonlocal assigned, copied
        before = places(self)
        assign(self, slot, staged)
        assigned, copied = assigned + 1, copied + (places(self) != before)

    monkeypatch.setattr(Slab, "assign", told)
    # Nothing has run by chance.
    monkeypatch.setattr(mx, "async_eval", lambda *_: None)
    assert _same(_logits(model), expected)
    assert assigned > len(TOKENS)
    assert copied == 0


@pytest.mark.parametrize(("slots", "swept"), [(TOP_K - 1, True), (TOP_K, False)])
def test_a_token_that_needs_more_than_a_layer_holds_is_counted(slots: int, swept: bool, made: Made) -> None:
    model, stream, _ = made("metal", slots, prefetch=False)
    mx.eval(model(mx.array([TOKENS[:1]])))
    assert stream.stats().main.sweeps == (STREAMED if swept else 0)
