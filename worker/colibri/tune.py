"""Settings of a streamed model tried on this machine: what to try and to keep is tune_search's to say.

Each run begins alike: slots as after loading, no expert in the page cache, a prompt's keys and values as they
were when it had been read. So runs differ in what they are to compare, and in what else the machine does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec

from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.launch import IoMode, StreamLaunch
from mlxpool.shared.colibri.layout import Artifact
from mlxpool.shared.colibri.measured import Disk, Name, TuneResult
from mlxpool.shared.colibri.tasks import ColibriTuneTask
from mlxpool.shared.colibri.tuned import Tuned
from mlxpool.worker import load
from mlxpool.worker.colibri import serving
from mlxpool.worker.colibri.bench import Progress, own_rate, warm_tokens
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.prompts import prompt
from mlxpool.worker.colibri.rig import Prompt, Rig
from mlxpool.worker.colibri.sources import open_source
from mlxpool.worker.colibri.tune_search import DEPTHS, Candidate, Pair, Run, Search, Setup

# Short: prefill is not what is compared, and each of its tokens reads experts.
PROMPT_TOKENS = 16
# Of one run, those that count: as many as come in the seconds there are, within these.
LEAST_TOKENS = 8
MOST_TOKENS = 64
# A run that takes so many times longer than the first is cut short: it has lost.
_PATIENCE = 3
# Of the whole, until the search begins.
_BEGUN = 0.15


def tune(task: ColibriTuneTask, encode: Callable[[str], list[int]], progress: Progress) -> TuneResult:
    """Raises CheckpointError, LoadError where the model can't be streamed as it would be without tuning."""
    folder, first = Path(task.folder), task.variants[0].launch
    artifact = artifacts.read(folder)
    disk = own_rate(artifact, first.queue_depth, progress)
    serving.set_memory_limits(task.limit_bytes, first)
    rig = Rig(folder, first, lambda done, total: progress(0.02 + 0.08 * done / max(total, 1), "load", ""))
    try:
        bench = _Bench(task, rig, encode)
        progress(0.1, "begin", "as it is without tuning")
        start = bench.begin()
        search = Search(start, choices(task, start, artifact, load.backend()))
        for number, candidate in enumerate(search.candidates()):
            share = _BEGUN + (1 - _BEGUN) * number / max(search.most, 1)
            _try(bench, search, candidate, partial(progress, share, candidate.name))
    finally:
        rig.close()
    return TuneResult(disk, bench.start_rate, search.trials, left(search), found(search, start, disk, bench))


def _try(bench: _Bench, search: Search, candidate: Candidate, tell: Callable[[str], None]) -> None:
    """One candidate to its end."""
    tell(f"{candidate.value}")
    pairs: list[Pair] = []
    while True:
        number = len(pairs)
        try:
            if number == 0:
                best = bench.run(search.best, number)
                other = bench.run(candidate.setup, number)
            else:
                other = bench.run(candidate.setup, number)
                best = bench.run(search.best, number)
        except (load.LoadError, CheckpointError, ReadFault) as problem:
            search.failed(candidate, str(problem))
            return
        pairs.append(Pair(best, other))
        tell(f"{candidate.value}: {other.rate:.2f} tok/s, {best.rate:.2f} without")
        if search.told(candidate, pairs) is not None:
            return


class _Bench:
    """What runs are made with. start_rate: tokens a second of the first."""

    def __init__(self, task: ColibriTuneTask, rig: Rig, encode: Callable[[str], list[int]]) -> None:
        self._rig = rig
        self._variants = {(one.slots, one.mtp): one.launch for one in task.variants}
        self._first = task.variants[0]
        self._seconds = task.seconds
        self._encode = encode
        self._warm = warm_tokens(self._first.slots, rig.artifact.top_k)
        self._tokens, self._limit_s = MOST_TOKENS, task.seconds
        self._prompts: list[Prompt] = []
        self.start_rate = 0.0

    def begin(self) -> Setup:
        """Read the prompts, one for each order, and find out how many tokens a run has."""
        launch = self._first.launch
        io: Any = self._rig.stats().io
        start = Setup(
            self._first.slots, io, launch.prefetch, launch.overlap, launch.queue_depth, self._first.mtp
        )
        self._prompts = [
            self._rig.prefill(prompt(self._encode, PROMPT_TOKENS, number)) for number in range(2)
        ]
        first = self.run(start, 0)
        self._tokens = max(LEAST_TOKENS, min(MOST_TOKENS, len(first.tokens) - 1 - self._warm))
        self._limit_s = _PATIENCE * self._tokens / first.rate
        self.start_rate = first.rate
        return start

    def run(self, setup: Setup, number: int) -> Run:
        """Decode after one of the prompts. Raises LoadError, CheckpointError, ReadFault."""
        self._rig.use(self.launch(setup))
        done = self._rig.decode(self._prompts[number], self._warm, self._tokens, self._limit_s)
        return Run(done.tokens, done.rate)

    def launch(self, setup: Setup) -> StreamLaunch:
        return msgspec.structs.replace(
            self._variants[setup.slots, setup.mtp],
            io=setup.io,
            prefetch=setup.prefetch,
            overlap=setup.overlap,
            queue_depth=setup.queue_depth,
        )


def choices(
    task: ColibriTuneTask, start: Setup, artifact: Artifact, backend: Backend
) -> dict[Name, Sequence[Any]]:
    """What may be tried of each setting. Where all experts are held nothing but drafts makes a difference."""
    made: dict[Name, Sequence[Any]] = {
        "mtp": [one.mtp for one in task.variants if one.slots == start.slots],
    }
    if start.slots < max(layout.experts for layout in artifact.layers):
        made["slots"] = [one.slots for one in task.variants if one.mtp == start.mtp]
        made["io"] = io_modes(artifact, backend)
        made["queue_depth"] = DEPTHS
        made["prefetch"] = made["overlap"] = (True, False)
    return {name: values for name, values in made.items() if name in task.names}


def io_modes(artifact: Artifact, backend: Backend) -> list[IoMode]:
    """The ways of reading that the disk has and that can be compared."""
    found: list[IoMode] = []
    for mode in get_args(IoMode):
        if mode == "auto":
            continue
        # Reads through a page cache that can't be emptied would be from memory, and win.
        if mode == "buffered" and sys.platform != "linux":
            continue
        source = open_source(artifact, backend, mode)
        if source.io == mode:
            found.append(mode)
        source.close()
    return found


def left(search: Search) -> list[Name]:
    """What was not tried."""
    tried = {trial.name for trial in search.trials}
    return [name for name in get_args(Name) if name not in tried]


def found(search: Search, start: Setup, disk: Disk, bench: _Bench) -> Tuned:
    """What to keep: of each setting that was tried the value that is best, and of slots only fewer than there
    is room for: a larger budget shall have more."""
    tried = {trial.name for trial in search.trials if trial.verdict != "failed"}
    best = {name: getattr(search.best, name) for name in tried}
    if search.best.slots == start.slots:
        best.pop("slots", None)
    return Tuned(
        **best,
        disk_bytes_per_s=disk.bytes_per_s,
        tok_per_s=search.best_rate or bench.start_rate,
        when=time.time(),
    )
