"""mlx-lm's own greedy loop, in a process of its own, asked over a pipe.

A line of JSON on stdin, `{"prompt": [ids], "tokens": n}`, is answered by one on stdout: seconds from the
first token to the last, and how many came after the first. Nothing is around the loop: no text, no client.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model


def main() -> int:
    """Answers until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    model, _ = load_model(args.model)
    mx.eval(model.parameters())
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began_s, count = 0.0, 0
        for _ in generate_step(mx.array(asked["prompt"]), model, max_tokens=asked["tokens"]):
            count += 1
            if count == 1:
                began_s = time.perf_counter()
        print(json.dumps({"seconds": time.perf_counter() - began_s, "tokens": count - 1}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
