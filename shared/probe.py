"""What a short look at MLX says about a machine: written by the worker's probe, read by `mlxpool doctor`."""

from __future__ import annotations

import msgspec


class ProbeReport(msgspec.Struct, frozen=True):
    """One line of JSON on the probe's stdout.

    device: MLX's default one. name: the chip. working_set_bytes: what a Metal device recommends to hold at
    most, None elsewhere. float32_gflops: rate of a 512 x 512 matrix product, best of three.
    """

    device: str
    name: str
    working_set_bytes: int | None
    float32_gflops: float
