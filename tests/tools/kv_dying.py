"""A process that is in the middle of writing a record when it is killed: `kv_dying ROOT STEP`.

It writes one record whole, then another, and stops for good after the given number of writes of it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from mlxpool.worker.cache.writer import Waiting
from tests.unit.kv_world import chain, open_tier, tokens, waiting, write


def items() -> list[Waiting]:
    """The record that is whole, and the one that is torn."""
    return [waiting(record, own) for record, own in chain(tokens(300))]


def main() -> None:
    root, step = Path(sys.argv[1]), int(sys.argv[2])
    whole, torn = items()
    tier = open_tier(root)
    write(tier, [whole])
    pwritev, publish = os.pwritev, tier.budget.publish
    done = 0

    def wait() -> None:
        print("in the middle", flush=True)
        time.sleep(600)

    def counting(descriptor: int, parts: Any, place: int) -> int:
        nonlocal done
        if done == step:
            pwritev(descriptor, [parts[0][: len(parts[0]) // 2]], place)
            wait()
        done += 1
        return pwritev(descriptor, parts, place)

    def unpublished(*args: Any) -> None:
        wait()
        publish(*args)

    os.pwritev = counting
    tier.budget.publish = unpublished  # type: ignore[method-assign]
    write(tier, [torn])


if __name__ == "__main__":
    main()
