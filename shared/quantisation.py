"""Which bits each layer gets, so that a model has a wanted number of bits per weight. Pure.

Not every layer bears few bits equally well: what goes into the model and comes out of it (embedding, head,
the first and last eighth of its blocks) and what is summed up unweighted (values, down projections) suffers
most. So all layers start at the fewest bits and are raised rung by rung, the sensitive ones up to two rungs
ahead of the others, until the next raise would pass the target. Modes and their only sizes are MLX's.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence

import msgspec

BITS = (2, 3, 4, 5, 6, 8)
# (group size, bits) that MLX packs these in; affine takes any of the above.
FIXED_MODES = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
# Bits of a scale of theirs; affine has a scale and a bias in the weights' own type.
FIXED_SCALE_BITS = 8
DEFAULT_BITS = 4
DEFAULT_GROUP_SIZE = 64
# How far a result may be from its target, in bits per weight.
TOLERANCE_BPW = 0.1

_BLOCK = re.compile(r"\.(\d+)\.")
_ENDS = ("embed_tokens", "lm_head", "wte", "embeddings", "word_embeddings")
_SUMMED = ("v_proj", "v_a_proj", "v_b_proj", "kv_b_proj", "down_proj")


class Layer(msgspec.Struct, frozen=True):
    """A layer that can be quantised. path: its name in the model. weights: how many. width: of a row."""

    path: str
    weights: int
    width: int


class TargetError(Exception):
    """The target can't be met; says what can."""


def lead(path: str, blocks: int) -> int:
    """How many rungs a layer may be ahead of the least sensitive ones. blocks: how many there are."""
    block = _BLOCK.search(path)
    at = int(block[1]) if block else None
    is_end = any(part in path for part in _ENDS)
    is_outer = at is not None and (at < max(1, blocks // 8) or at >= blocks - max(1, blocks // 8))
    is_summed = any(part in path for part in _SUMMED)
    if is_end or (is_outer and is_summed):
        return 2
    return 1 if is_outer or is_summed else 0


def choose_bits(
    layers: Sequence[Layer],
    target_bpw: float,
    *,
    blocks: int,
    total_weights: int,
    rest_bits: int,
    scale_bits: float,
) -> dict[str, int]:
    """Bits of each layer by path, so that the whole model is within TOLERANCE_BPW of the target.

    total_weights: of the model, those that stay as they are included; rest_bits: what those take.
    scale_bits: what scales and biases add to each quantised weight. Raises TargetError.
    """
    spent = float(rest_bits)
    rung = dict.fromkeys((layer.path for layer in layers), 0)
    for layer in layers:
        spent += layer.weights * (BITS[0] + scale_bits)
    fewest = spent / total_weights
    budget = target_bpw * total_weights
    # The lowest level is raised first; a lead makes a layer count as lower than it is.
    waiting = [(-lead(layer.path, blocks), place) for place, layer in enumerate(layers)]
    heapq.heapify(waiting)
    while waiting:
        level, place = heapq.heappop(waiting)
        layer = layers[place]
        step = BITS[rung[layer.path] + 1] - BITS[rung[layer.path]]
        if spent + layer.weights * step > budget + 1e-9:
            continue  # a smaller layer may still fit
        spent += layer.weights * step
        rung[layer.path] += 1
        if rung[layer.path] + 1 < len(BITS):
            heapq.heappush(waiting, (level + 1, place))
    reached = spent / total_weights
    if abs(reached - target_bpw) > TOLERANCE_BPW:
        what = "the fewest are" if reached == fewest else "the nearest are"
        raise TargetError(f"{target_bpw:g} bits per weight can't be met; {what} {reached:.2f}")
    return {path: BITS[at] for path, at in rung.items()}
