"""`python -m mlxpool.worker.probe`: import MLX, compute something, say how fast it went.

`mlxpool doctor` runs this in a process of its own with a worker's environment, because the parent never
imports MLX and because an MLX that can't be loaded may end the process it is loaded into.
"""

from __future__ import annotations

import sys
import time

import mlx.core as mx
import msgspec

from mlxpool.shared.probe import ProbeReport

# 0.27 GFLOP: 0.1 s on the reference BLAS of the CPU wheel, 3 ms on OpenBLAS.
_SIDE = 512
_RUNS = 3


def probe() -> ProbeReport:
    """Raises what MLX raises where it has no working device."""
    info = mx.device_info()
    working_set = info.get("max_recommended_working_set_size")
    return ProbeReport(
        device=str(mx.default_device()),
        name=str(info.get("device_name", "")),
        working_set_bytes=int(working_set) if working_set else None,
        float32_gflops=round(2 * _SIDE**3 / min(_matmul_s() for _ in range(_RUNS)) / 1e9, 2),
    )


def _matmul_s() -> float:
    """Seconds of one product."""
    factor = mx.random.normal((_SIDE, _SIDE))
    mx.eval(factor)
    begun = time.perf_counter()
    mx.eval(factor @ factor)
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(probe()) + b"\n")
