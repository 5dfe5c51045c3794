"""What is guessed of the next layer, when guessing stops, and models that say nothing to guess by."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.layout import ExpertLayout, Part, Piece, Strided
from mlxpool.worker.colibri.contract import ReadDone
from mlxpool.worker.colibri.load import build
from mlxpool.worker.colibri.lookahead import LEAST_AGREEMENT, Gate, guesses
from mlxpool.worker.colibri.reads import Reads
from mlxpool.worker.colibri.slab import Slab, Staging
from mlxpool.worker.colibri.slots import Slots
from tests import tiny_glm

EXPERTS, WIDTH = 8, 16


class _Block(nn.Module):
    def __init__(self, router: nn.Module | None, name: str) -> None:
        super().__init__()
        self.experts = nn.Linear(1, 1)
        if router is not None:
            setattr(self, name, router)


class _Decoder(nn.Module):
    def __init__(self, router: nn.Module | None, name: str = "gate", width: int = WIDTH) -> None:
        super().__init__()
        self.mlp = _Block(router, name)
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.post_attention_layernorm.weight = mx.random.uniform(0.5, 2, (width,))


class _Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = list(layers)


def _layouts(*layers: int) -> list[ExpertLayout]:
    return [ExpertLayout(one, f"layers.{one}.mlp.experts", EXPERTS, (), (), {}) for one in layers]


@pytest.mark.parametrize("name", ["gate", "router"])
def test_the_next_layers_router_is_asked_under_the_next_layers_norm(name: str) -> None:
    mx.random.seed(3)
    router = nn.Linear(WIDTH, EXPERTS)
    model = _Model(_Decoder(nn.Linear(WIDTH, EXPERTS), name), _Decoder(router, name))
    found = guesses(model, _layouts(0, 1), top_k=4)
    assert list(found) == [0]
    state = mx.random.normal((1, 3, WIDTH))
    here, there = (layer.post_attention_layernorm for layer in model.layers)
    wanted = np.argsort(-np.array(router(state * there.weight))[0], axis=-1)[:, :3]
    assert np.array(found[0](state * here.weight))[0].tolist() == wanted.tolist()


def test_the_least_likely_choice_is_left_out(tmp_path: Path) -> None:
    config = tiny_glm.config(hidden_size=64, moe_intermediate_size=64, intermediate_size=64)
    artifact = artifacts.read(tiny_glm.write_stacked(tmp_path / "m", config, tiny_glm.weights(config)))
    model = build(artifact, "cpu")
    found = guesses(model, artifact.layers, artifact.top_k)
    assert list(found) == [1, 2, 3, 4, 5]
    state = mx.random.normal((1, 1, 64)).astype(mx.bfloat16)
    first, second = (model.model.layers[one] for one in (2, 3))
    ratio = second.post_attention_layernorm.weight / first.post_attention_layernorm.weight
    ids, scores = second.mlp.gate(state * ratio)
    order = np.argsort(-np.array(scores)[0, 0], kind="stable")
    assert np.array(found[2](state))[0, 0].tolist() == np.array(ids)[0, 0][order][:3].tolist()


def test_a_model_that_says_nothing_to_guess_by_is_not_guessed_of() -> None:
    routed = nn.Linear(WIDTH, EXPERTS)
    for first, second in (
        (_Decoder(routed), _Decoder(None)),
        (_Decoder(routed), _Decoder(nn.Linear(WIDTH, EXPERTS + 1))),
        (_Decoder(routed, width=WIDTH // 2), _Decoder(routed)),
        (_Decoder(routed), nn.Linear(1, 1)),
    ):
        assert guesses(_Model(first, second), _layouts(0, 1), top_k=4) == {}
    both = _Model(_Decoder(routed), _Decoder(routed))
    assert guesses(both, _layouts(0), top_k=4) == {}
    assert guesses(both, _layouts(0, 1), top_k=1) == {}


def test_guesses_that_are_wrong_stop_until_the_next_turn() -> None:
    gate = Gate(4)
    for _ in range(20):
        gate.told([1, 2, 3, 4], {1, 2, 3, 9})
    assert gate.open
    assert gate.agreement == pytest.approx(0.75)
    for _ in range(60):
        gate.told([1, 2, 3, 4], {1, 7, 8, 9})
    assert gate.agreement < LEAST_AGREEMENT
    assert not gate.open
    gate.reset()
    assert gate.open


def test_a_few_wrong_guesses_at_first_do_not_close_it() -> None:
    gate = Gate(4)
    for _ in range(4):
        gate.told([1, 2], {7})
    assert gate.open


def test_fewer_are_read_ahead_where_the_disk_has_no_turn_for_them() -> None:
    gate = Gate(7)
    gate.turned(7, 5)
    assert gate.most == 2
    gate.turned(2, 2)
    assert gate.most == 1
    for _ in range(4):
        gate.turned(gate.most, 0)
    assert gate.most == 5
    gate.turned(1, 0)
    assert gate.most == 5


def test_a_guess_for_a_pass_that_never_came_is_not_held_against_the_next_turns() -> None:
    part = Part("up_proj", "weight", "U8", (1,), 1, piece="up_proj.weight")
    piece = Piece("up_proj.weight", "U8", (1,), 1, Strided("x", 0, 1))
    layout = ExpertLayout(0, "mlp", EXPERTS, (piece,), (part,), {})

    def at_once(*_: Any, **__: Any) -> Future[ReadDone]:
        done: Future[ReadDone] = Future()
        done.set_result(ReadDone(1, 0.0))
        return done

    reader: Any = SimpleNamespace(submit=at_once)
    slots = Slots(layout, Slab(layout, 4, "direct"), Reads(reader, Staging()), 2)
    slots.expect([0, 1])
    slots.turn_ended()
    slots.take_in({5: 1})
    assert slots.gate.agreement == 1.0
    slots.expect([2, 3])
    slots.take_in({5: 1})
    assert slots.gate.agreement == 0.0
