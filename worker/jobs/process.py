"""A computing job's life: tether, imports, its kind's `work`, one last line.

The tether's thread runs before any heavy import, so whoever started the job takes it along. SIGTERM has its
default meaning: it ends the process wherever it is, and what it has staged is no output (shared/staging.py).
What libraries print becomes log lines, plain text; a failure is one line for a person, its traceback is in
the log. torch is kept out for good: nothing here uses it, and transformers would import it for seconds.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from mlxpool.shared import tether

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxpool.shared.job_teller import Teller

# Kind → module with `TASK` and `work(task, teller) -> result`.
KINDS = (
    "quantize",
    "finetune",
    "fuse",
    "evaluate",
    "import_",
    "colibri_convert",
    "colibri_bench",
    "colibri_tune",
)
# A reason is one line for a person.
REASON_CHARS = 600
# Colours, cursor movements and the rest that means something to terminals alone.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_LINE_CHARS = 2000


class JobError(Exception):
    """The job can't be done; the message is for a person."""


class LogLines(io.TextIOBase):
    """A stdout whose lines are `log` events. `fileno` is still the pipe's, for `say`."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._held = ""

    def write(self, text: str) -> int:
        *lines, self._held = re.split(r"[\n\r]", self._held + text)
        for line in lines:
            plain = _CONTROL.sub("", line).rstrip()
            if plain:
                self._log(plain[:_LINE_CHARS])
        return len(text)

    def fileno(self) -> int:
        return 1

    def isatty(self) -> bool:
        return False


class NoLines(LogLines):
    """A stdout that what is told otherwise is printed to."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)


def main(argv: list[str]) -> NoReturn:
    """Exit code 0 with a Done line, 1 with a Failed line."""
    parser = argparse.ArgumentParser(prog="mlxpool.worker.jobs")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--task", required=True)
    parser.add_argument("--tether-fd", type=int, required=True)
    options = parser.parse_args(argv)
    tether.watch(options.tether_fd)
    # A person's Ctrl-C reaches the whole foreground; what it means is the parent's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = _run(options.kind, options.task)
    # Past the interpreter's end: nothing is left to do, and MLX takes its time to be taken down.
    os._exit(code)


def _run(kind: str, told: str) -> int:
    from mlxpool.shared.job_lines import Done, Failed, Log
    from mlxpool.shared.job_teller import Teller, say

    sys.stdout = LogLines(lambda line: say(Log(line)))
    sys.stderr = sys.stdout
    teller = Teller()
    try:
        result = _work(kind, told, teller)
    except Exception as problem:
        reason = _reason(kind, problem)
        say(Failed(reason))
        return 1
    say(Done(result))
    return 0


def _work(kind: str, told: str, teller: Teller) -> dict[str, Any]:
    import msgspec

    from mlxpool.shared.backend import open_files_lack

    lack = open_files_lack()
    if lack is not None:
        raise JobError(lack)
    teller.progress(0.0, "load", "the libraries")
    sys.modules["torch"] = None  # type: ignore[assignment]
    module: Any = importlib.import_module(f"mlxpool.worker.jobs.{kind}")
    task = msgspec.json.decode(told, type=module.TASK)
    result: dict[str, Any] = module.work(task, teller)
    return result


def _reason(kind: str, problem: Exception) -> str:
    """What a person is told. What was not foreseen leaves its traceback in the log."""
    from mlxpool.shared.checkpoint import CheckpointError
    from mlxpool.shared.staging import PullError

    text = " ".join(str(problem).split())[:REASON_CHARS]
    known: tuple[type[Exception], ...] = (JobError, CheckpointError, PullError)
    # Where the imports themselves failed there is nothing of theirs to tell apart.
    for name, error in (
        ("mlxpool.worker.load", "LoadError"),
        ("mlxpool.shared.chat", "ChatTokenizerError"),
        ("mlxpool.shared.training_lines", "LinesError"),
        ("mlxpool.shared.gguf.header", "GgufError"),
    ):
        if name in sys.modules:
            known = (*known, getattr(sys.modules[name], error))
    if isinstance(problem, known):
        return text
    if isinstance(problem, OSError):
        where = f"{problem.filename}: " if problem.filename else ""
        return f"{where}{problem.strerror or text}"
    import traceback

    traceback.print_exc()
    return f"{kind} failed: {type(problem).__name__}: {text}"
