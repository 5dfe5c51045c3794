"""Convert the starter model's GGUF into a model folder: `python -m mlxpool.worker.starter GGUF OUT_DIR`.

The one thing that is the starter's own is the type: quantised kernels of MLX's CPU backend are scalar, so
there the weights are float32; on Metal and CUDA they stay in the file's own quantisation. The conversion is
that of every import (`mlxpool.worker.gguf`).

Owns nothing but the files it writes into OUT_DIR; the caller stages and publishes that folder. Progress
goes to stdout as JSON lines `{"done": bytes, "total": bytes}`, failures to stderr with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from mlxpool.shared import backend
from mlxpool.shared.gguf.header import GgufError
from mlxpool.shared.gguf.plan import Dtype
from mlxpool.worker.gguf.convert import convert


def backend_dtype() -> Dtype:
    """What this machine's MLX backend serves fast."""
    return "float32" if backend.detect() in ("cpu", "none") else "native"


def _print_progress(done: int, total: int) -> None:
    sys.stdout.write(msgspec.json.encode({"done": done, "total": total}).decode() + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """The command line: 0 when the folder is written, 1 with a reason on stderr when it can't be."""
    parser = argparse.ArgumentParser(prog="mlxpool.worker.starter", description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float32", "native"), default=None)
    options = parser.parse_args(argv)
    try:
        convert(options.gguf, options.out, options.dtype or backend_dtype(), _print_progress)
    except (GgufError, OSError) as err:
        sys.stderr.write(f"the starter model could not be converted: {err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
