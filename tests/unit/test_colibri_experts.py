"""Products of routed experts: what MLX's kernels are given for numbers that they have no form for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri.layout import PROJECTIONS, ExpertLayout, Part, Quantised
from mlxpool.worker.colibri.experts import Constants, Experts
from mlxpool.worker.colibri.slab import Slab

WIDTH, SLOTS = 64, 5


def _silu(up: mx.array, gate: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _layout() -> ExpertLayout:
    parts = []
    for name in PROJECTIONS:
        parts.append(Part(name, "weight", "U32", (WIDTH, WIDTH // 8), WIDTH * WIDTH // 2, piece=name))
        parts.append(Part(name, "row_scales", "F32", (WIDTH,), 4 * WIDTH, piece=name))
    return ExpertLayout(0, "mlp", 8, (), tuple(parts), dict.fromkeys(PROJECTIONS, Quantised("row", 4)))


def _filled() -> Slab:
    slab, draw = Slab(_layout(), SLOTS, "direct"), np.random.default_rng(1)
    for slot in range(SLOTS):
        for (_, part), row in slab.rows(slot).items():
            if part == "weight":
                row[:] = draw.integers(0, 256, row.size, np.uint8)
            else:
                row[:] = draw.uniform(0.01, 0.05, WIDTH).astype(np.float32).view(np.uint8)
    return slab


def test_on_cuda_each_slot_has_constants_where_its_kernels_look_for_them() -> None:
    constants = Constants("cuda")
    for slots in (2, SLOTS, 3):
        held = constants.of(-8.0, slots, 6, 2)
        mx.eval(held)
        seen = np.array(held, copy=False)
        # Whole slots apart: what a kernel that counts from the first one finds is its own.
        assert seen.strides == (48, 8, 4)
        assert seen.shape == (slots, 6, 2)
        assert (seen == -8.0).all()


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_rows_of_one_scale_are_what_their_numbers_say(backend: Backend) -> None:
    slab = _filled()
    experts = Experts(_layout(), _silu, Constants(backend))
    x = mx.random.normal((3, 1, WIDTH), key=mx.random.key(2))
    places = [4, 0, 2]

    def matrix(name: str, slot: int) -> mx.array:
        packed = np.array(slab.arrays[name, "weight"][slot]).view(np.uint8)
        numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(WIDTH, WIDTH).astype(np.float32) - 8
        return mx.array(numbers * np.array(slab.arrays[name, "row_scales"][slot])[:, None])

    wanted = []
    for row, slot in enumerate(places):
        up, gate, down = (matrix(name, slot).T for name in ("up_proj", "gate_proj", "down_proj"))
        wanted.append(_silu(x[row] @ up, x[row] @ gate) @ down)
    found = experts(slab, x, slab.places(places), False)
    assert np.allclose(np.array(found), np.array(mx.stack(wanted)), rtol=1e-4, atol=1e-5)
