"""From exec of `mlxpool up` to the first `/health` 200, and what the idle parent holds.

The home is empty: no model is loaded, no tokenizer is in the parent. Beside it, in turn, what the
interpreter and the HTTP stack alone take, so that a slow machine can be told from a slow parent.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.bench import common

START_LIMIT_S = 0.4
IDLE_LIMIT_MB = 90.0
# Memory is read once start-up's own garbage is gone.
SETTLE_S = 1.0

BASELINES = {
    "python -c pass": "pass",
    "import of the HTTP stack": "import aiohttp.web, uvloop, msgspec",
}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    report = common.report("startup", rounds=args.rounds, home="empty", poll_s=common.POLL_S)
    started = report.row("exec to /health 200", "s")
    memory = {name: report.row(f"idle parent {name}", "MB") for name in ("rss", "pss", "uss")}
    baselines = {name: report.row(name, "s") for name in BASELINES}
    env = common.clean_environment()
    for _ in range(args.rounds):
        for name, code in BASELINES.items():
            baselines[name].samples.append(common.timed_run([sys.executable, "-c", code], env))
        try:
            took, held = one_start(env)
        except (RuntimeError, OSError) as err:
            started.failed.append(str(err))
            continue
        started.samples.append(took)
        for name, row in memory.items():
            if f"{name}_bytes" in held:
                row.samples.append(held[f"{name}_bytes"] / 1e6)
    report.rows = [row for row in report.rows if row.samples or row.failed]
    report.targets = [
        common.Target("exec to /health 200", started.settle().median, START_LIMIT_S, "s"),
        common.Target("idle parent rss", memory["rss"].settle().median, IDLE_LIMIT_MB, "MB"),
    ]
    return report.emit()


def one_start(env: dict[str, str]) -> tuple[float, dict[str, int]]:
    """Seconds to the first 200, and the parent's memory a moment later."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as scratch:
        port = common.free_port()
        argv = [common.console_script(), "up", "--home", f"{scratch}/home", "--port", str(port)]
        start = time.monotonic()
        with common.serving(argv, port, Path(scratch, "log"), env=env, ready=None) as server:
            up = server.wait_for("/health")
            time.sleep(SETTLE_S)
            return up - start, server.memory()


if __name__ == "__main__":
    sys.exit(main())
