"""Bits per layer for a target."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.shared.quantisation import BITS, TOLERANCE_BPW, Layer, TargetError, choose_bits, lead

BLOCKS = 16


def model_layers() -> list[Layer]:
    layers = [Layer("model.embed_tokens", 50_000 * 64, 64)]
    for block in range(BLOCKS):
        for name, weights in (
            ("self_attn.q_proj", 4096),
            ("self_attn.v_proj", 2048),
            ("mlp.down_proj", 16384),
        ):
            layers.append(Layer(f"model.layers.{block}.{name}", weights * 64, 64))
    return layers


def reached(layers: list[Layer], bits: dict[str, int], rest_bits: int, total: int) -> float:
    return (sum(layer.weights * (bits[layer.path] + 0.5) for layer in layers) + rest_bits) / total


@given(st.floats(2.6, 8.4))
@settings(max_examples=60, deadline=None)
def test_a_target_is_met_and_never_passed(target: float) -> None:
    layers = model_layers()
    total = sum(layer.weights for layer in layers) + 1000
    bits = choose_bits(layers, target, blocks=BLOCKS, total_weights=total, rest_bits=16_000, scale_bits=0.5)
    assert set(bits) == {layer.path for layer in layers}
    assert set(bits.values()) <= set(BITS)
    assert target - TOLERANCE_BPW <= reached(layers, bits, 16_000, total) <= target + 1e-6


def test_sensitive_layers_get_more() -> None:
    layers = model_layers()
    total = sum(layer.weights for layer in layers)
    bits = choose_bits(layers, 4.5, blocks=BLOCKS, total_weights=total, rest_bits=0, scale_bits=0.5)
    middle, outer = "model.layers.8.", "model.layers.0."
    assert bits[middle + "mlp.down_proj"] > bits[middle + "self_attn.q_proj"]
    assert bits[outer + "self_attn.q_proj"] > bits[middle + "self_attn.q_proj"]
    assert bits[outer + "self_attn.v_proj"] >= bits[middle + "self_attn.v_proj"]


@pytest.mark.parametrize(
    ("path", "rungs"),
    [
        ("lm_head", 2),
        ("model.embed_tokens", 2),
        ("model.layers.0.self_attn.v_proj", 2),
        ("model.layers.15.self_attn.q_proj", 1),
        ("model.layers.8.mlp.down_proj", 1),
        ("model.layers.8.mlp.gate_proj", 0),
    ],
)
def test_how_far_a_layer_may_be_ahead(path: str, rungs: int) -> None:
    assert lead(path, BLOCKS) == rungs


@pytest.mark.parametrize(("target", "message"), [(2.2, "the fewest are 2.50"), (9.5, "the nearest are 8.50")])
def test_a_target_out_of_reach_says_what_is_in_reach(target: float, message: str) -> None:
    layers = model_layers()
    total = sum(layer.weights for layer in layers)
    with pytest.raises(TargetError, match=message):
        choose_bits(layers, target, blocks=BLOCKS, total_weights=total, rest_bits=0, scale_bits=0.5)
