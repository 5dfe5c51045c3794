"""How a model's rope is scaled: honoured where mlx-lm has the same, else refused by name.

Llama 3's scaling is in no metadata: the file holds the factor of each frequency as a tensor. The published
scalings are few, so the one that gives these factors is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mlxpool.shared.text import cut

from .facts import Facts
from .header import GgufError

# Of Llama 3.1 and 3.3 the factor is 8, of 3.2 it is 32; the others are the same in all of them.
_LLAMA3_FACTORS = (8.0, 32.0)
_LOW, _HIGH, _ORIGINAL_CONTEXT = 1.0, 4.0, 8_192
# The factors are float32, computed by others in another order.
_TOLERANCE = 1e-4


def scaling(facts: Facts) -> dict[str, Any] | None:
    """config.json's `rope_scaling`, None where there is none. Raises GgufError."""
    kind = facts.get(facts.own("rope.scaling.type"))
    factor_key = facts.own("rope.scaling.factor")
    if kind is None and facts.has(facts.own("rope.scale_linear")):
        kind, factor_key = "linear", facts.own("rope.scale_linear")
    if kind in (None, "none"):
        return None
    if kind != "linear":
        raise GgufError(
            f"{facts.own('rope.scaling.type')} is {cut(repr(kind))}; this import knows linear and Llama 3's"
        )
    factor = facts.number(factor_key)
    return None if factor == 1 else {"rope_type": "linear", "type": "linear", "factor": factor}


def llama3_scaling(factors: Sequence[float], theta: float, head: int) -> dict[str, Any] | None:
    """config.json's `rope_scaling` for the factors of each frequency (head / 2 of them), None where they
    scale nothing. Raises GgufError where they are of no scaling that is known."""
    if len(factors) == head // 2:
        if all(factor == 1 for factor in factors):
            return None
        for factor in _LLAMA3_FACTORS:
            wanted = _llama3_factors(factor, theta, head)
            if all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(factors, wanted, strict=True)):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": _LOW,
                    "high_freq_factor": _HIGH,
                    "original_max_position_embeddings": _ORIGINAL_CONTEXT,
                }
    raise GgufError("rope_freqs.weight holds factors of no rope scaling that is known (Llama 3.1 to 3.3 are)")


def _llama3_factors(factor: float, theta: float, head: int) -> list[float]:
    """What each frequency is divided by: nothing for short waves, `factor` for long ones, a blend between."""
    factors = []
    for pair in range(head // 2):
        wave = 2 * math.pi * theta ** (2 * pair / head)
        if wave < _ORIGINAL_CONTEXT / _HIGH:
            factors.append(1.0)
        elif wave > _ORIGINAL_CONTEXT / _LOW:
            factors.append(factor)
        else:
            smooth = (_ORIGINAL_CONTEXT / wave - _LOW) / (_HIGH - _LOW)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
