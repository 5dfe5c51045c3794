"""`python -m mlxpool.parent.hub.pull_process`: one pull as a process, for a job or for the command line.

What it does is said on stdout in the lines of `shared/job_lines.py`. It dies with whoever started it: the
tether's thread runs before anything heavy is imported. Whatever ends it, the stage is left for the next pull
to go on with, so there is nothing to clean up.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxpool.shared import tether

if TYPE_CHECKING:
    from mlxpool.shared.job_teller import Teller

# A part of the whole for each stage of the starter, by how long they take.
_STARTER_SHARES = {"download": 0.6, "extract": 0.05, "convert": 0.25, "publish": 0.1}


def pull_starter(home: Path, teller: Teller) -> dict[str, Any]:
    """The result of pulling the starter model. Raises PullError."""
    from mlxpool.parent import starter

    def report(step: starter.Progress) -> None:
        before = 0.0
        for stage in starter.STAGES[: starter.STAGES.index(step.stage)]:
            before += _STARTER_SHARES[stage]
        part = step.done_bytes / step.total_bytes if step.total_bytes else 1.0
        share = before + _STARTER_SHARES[step.stage] * part
        teller.bytes(share, step.stage, step.done_bytes, step.total_bytes)

    folder = starter.published(home)
    was_there = folder is not None
    if folder is None:
        folder = starter.pull(home, report, waiting=lambda: _waiting(teller))
    return {"model": starter.MODEL_NAME, "path": str(folder), "was_there": was_there}


def pull_repository(home: Path, name: str, revision: str | None, teller: Teller) -> dict[str, Any]:
    """The result of pulling a model of the Hub. Raises PullError."""
    from mlxpool.parent.hub.pull import pull

    def report(stage: str, done: int, total: int) -> None:
        teller.bytes(done / total if total else 1.0, stage, done, total)

    pulled = pull(home, name, revision, report, lambda: _waiting(teller))
    return {"model": name, "path": str(pulled.path), "was_there": pulled.was_there}


def _waiting(teller: Teller) -> None:
    teller.progress(0.0, "wait", "for another pull of it")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 with a Done line, 1 with a Failed line."""
    parser = argparse.ArgumentParser(prog="mlxpool.parent.hub.pull_process")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--revision")
    parser.add_argument("--tether-fd", type=int, required=True)
    parser.add_argument("name")
    options = parser.parse_args(argv)
    tether.watch(options.tether_fd)
    # Its bars would be drawn into a pipe; and a pull asks the Hub for the model and for nothing else.
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    from mlxpool.parent.hub.names import STARTER
    from mlxpool.shared.job_lines import Done, Failed
    from mlxpool.shared.job_teller import Teller, say
    from mlxpool.shared.staging import PullError

    teller = Teller()
    try:
        if options.name == STARTER:
            result = pull_starter(options.home, teller)
        else:
            result = pull_repository(options.home, options.name, options.revision, teller)
    except PullError as problem:
        say(Failed(str(problem)))
        return 1
    say(Done(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
