"""`python -m mlxpool.parent.jobs.dataset --task JSON`: asks the server line by line, and writes what parses.

Some requests are under way at once; lines are written in the order of their records, whatever order the
answers come in, so the same seed gives the same file. The file has a hidden name until it is whole, and
nothing is resumed: a killed run's part goes when the server starts, or when the name is made next.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import msgspec

from mlxpool.shared import tether
from mlxpool.shared.job_lines import Done, Failed, Log
from mlxpool.shared.job_teller import Teller, say
from mlxpool.shared.text import cut

from . import records, templates
from .asking import ANSWER_TIMEOUT_S, Refusal, ask
from .task import KEY_VARIABLE, DatasetTask

# An answer that is no line is asked for again, with another seed.
MAX_READINGS = 3
# So many records in a row without a line: something is wrong that the next ones will not change.
MAX_FAILED_IN_A_ROW = 20
# A seed's tries are far from the next record's.
_SEED_STRIDE = 1_000_003
_MAX_SEED = 2**32
# Figures are told this often at most; a line each where there are few.
_TOLD_POINTS = 200
_SAID_CHARS = 300


class DatasetError(Exception):
    """The dataset can't be made; one line for a person."""


class _Run:
    """Owns the file and the figures; everything on one event loop."""

    def __init__(
        self, task: DatasetTask, client: aiohttp.ClientSession, file: BinaryIO, teller: Teller
    ) -> None:
        self._task = task
        self._client = client
        self._file = file
        self._teller = teller
        self._records = records.read(Path(task.input), templates.places(task.template.prompt))
        self.count = task.count or len(self._records)
        self._waiting: dict[int, bytes] = {}
        self._next = 0
        self._failed_in_a_row = 0
        self.lines = self.failed = self.tokens = 0

    async def work(self) -> None:
        """Every record, `concurrency` at once. Raises DatasetError, OSError."""
        places = iter(range(self.count))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._task.concurrency, self.count)):
                    group.create_task(self._ask_each(places))
        except ExceptionGroup as problems:
            # Of several the first: the others were cancelled because of it, or say the same.
            raise problems.exceptions[0] from None

    async def _ask_each(self, places: Iterator[int]) -> None:
        for place in places:
            line = await self._line(place)
            self._put(place, b"" if line is None else msgspec.json.encode(line) + b"\n")

    async def _line(self, place: int) -> dict[str, Any] | None:
        """The record's line, None where the model gives none. Raises DatasetError where none ever will."""
        record = self._records[place % len(self._records)]
        why = ""
        for tried in range(MAX_READINGS):
            try:
                reply = await ask(self._client, self._task.url, self._body(record, place, tried))
            except Refusal as refusal:
                if refusal.is_final:
                    raise DatasetError(cut(str(refusal), _SAID_CHARS)) from None
                why = str(refusal)
                break
            self.tokens += reply.tokens
            line = templates.line(self._task.template, record, reply.text)
            if line is not None:
                return line
            why = f"the answer is no line: {reply.text!r}"
        self._failed_in_a_row += 1
        say(Log(cut(f"record {place + 1}: {why}", _SAID_CHARS)))
        if self._failed_in_a_row >= MAX_FAILED_IN_A_ROW or self._failed_in_a_row == self.count:
            raise DatasetError(
                cut(f"{self._failed_in_a_row} records in a row gave no line; the last: {why}", _SAID_CHARS)
            )
        return None

    def _body(self, record: records.Record, place: int, tried: int) -> dict[str, Any]:
        task = self._task
        asked = {"role": "user", "content": templates.filled(task.template.prompt, record)}
        system = [] if task.system is None else [{"role": "system", "content": task.system}]
        body: dict[str, Any] = {
            "model": task.model,
            "messages": [*system, asked],
            "max_tokens": task.max_tokens,
            "temperature": task.temperature,
        }
        form = templates.answer_format(task.template)
        if form is not None:
            body["response_format"] = form
        if task.seed is not None:
            body["seed"] = (task.seed + place + tried * _SEED_STRIDE) % _MAX_SEED
        if task.adapter is not None:
            body["adapter"] = task.adapter
        return body

    def _put(self, place: int, line: bytes) -> None:
        """Write what is next in order; tell how far it is. line: empty where there is none."""
        if line:
            self.lines += 1
            self._failed_in_a_row = 0
        else:
            self.failed += 1
        self._waiting[place] = line
        while self._next in self._waiting:
            self._file.write(self._waiting.pop(self._next))
            self._next += 1
        done = self.lines + self.failed
        self._teller.progress(done / self.count, "ask", f"{self.lines} of {self.count} lines")
        if done % max(1, self.count // _TOLD_POINTS) == 0 or done == self.count:
            self._teller.metric(lines=self.lines, tokens=self.tokens, failed=self.failed)


async def make(task: DatasetTask, key: str, teller: Teller) -> dict[str, Any]:
    """The dataset, published. Raises DatasetError, RecordsError, OSError."""
    target = Path(task.target)
    part = target.with_name(f".{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:
            with part.open("wb") as file:
                run = _Run(task, client, file, teller)
                await run.work()
                file.flush()
                os.fsync(file.fileno())
        if not run.lines:
            raise DatasetError("not one record gave a line; the job's log says why")
        _publish(part, target)
    finally:
        part.unlink(missing_ok=True)
    return {
        "dataset": target.stem,
        "path": str(target),
        "lines": run.lines,
        "failed": run.failed,
        "tokens": run.tokens,
    }


async def _until_told(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """The work, cancelled by SIGTERM, so that it takes its part away."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _publish(part: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise DatasetError(f"there is a {target} by now; choose another name")
    os.rename(part, target)


def main(argv: list[str]) -> int:
    """Exit code 0 with a Done line, 1 with a Failed line."""
    parser = argparse.ArgumentParser(prog="mlxpool.parent.jobs.dataset")
    parser.add_argument("--task", required=True)
    parser.add_argument("--tether-fd", type=int, required=True)
    options = parser.parse_args(argv)
    tether.watch(options.tether_fd)
    # A person's Ctrl-C reaches the whole foreground; what it means is the parent's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(options.task, type=DatasetTask)
    try:
        result = asyncio.run(_until_told(make(task, os.environ.pop(KEY_VARIABLE, ""), Teller())))
    except (DatasetError, records.RecordsError) as problem:
        say(Failed(str(problem)))
        return 1
    except OSError as problem:
        say(Failed(f"{problem.filename or task.target}: {problem.strerror or problem}"))
        return 1
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    say(Done(result))
    return 0
