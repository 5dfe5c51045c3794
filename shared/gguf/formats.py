"""The ways a GGUF stores a tensor's numbers, by the number its header gives them.

A row is a whole number of blocks, so any row can be read alone. The widths are the format's own; a test
compares them with the `gguf` package, which dequantises them.
"""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """`values` numbers of a row in `size_bytes` bytes."""

    name: str
    values: int
    size_bytes: int


FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4),
    1: Format("F16", 1, 2),
    2: Format("Q4_0", 32, 18),
    3: Format("Q4_1", 32, 20),
    6: Format("Q5_0", 32, 22),
    7: Format("Q5_1", 32, 24),
    8: Format("Q8_0", 32, 34),
    10: Format("Q2_K", 256, 84),
    11: Format("Q3_K", 256, 110),
    12: Format("Q4_K", 256, 144),
    13: Format("Q5_K", 256, 176),
    14: Format("Q6_K", 256, 210),
    16: Format("IQ2_XXS", 256, 66),
    17: Format("IQ2_XS", 256, 74),
    18: Format("IQ3_XXS", 256, 98),
    19: Format("IQ1_S", 256, 50),
    20: Format("IQ4_NL", 32, 18),
    21: Format("IQ3_S", 256, 110),
    22: Format("IQ2_S", 256, 82),
    23: Format("IQ4_XS", 256, 136),
    29: Format("IQ1_M", 256, 56),
    30: Format("BF16", 1, 2),
    34: Format("TQ1_0", 256, 54),
    35: Format("TQ2_0", 256, 66),
    39: Format("MXFP4", 32, 17),
}
F32 = 0

# Formats that are MLX's affine quantisation in another order of bits, and how many bits they have.
AFFINE_BITS = {2: 4, 3: 4, 8: 8}
# Numbers that share a scale in each of them.
AFFINE_GROUP = 32
