"""A job shown while it runs: one bar on a terminal, one line a stage on a pipe, and its figures as they come.

A command that began a job ends it when it is interrupted; one that found the same job under way only leaves.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec

from mlxpool.parent.cli import client
from mlxpool.parent.cli.common import Failure
from mlxpool.parent.jobs.store import Job
from mlxpool.shared.job_lines import Done, Failed, Metric, Stage, read_line

_POLL_S = 0.2
# A process whose tether is closed kills itself and what it has started; it needs no more than this.
_END_S = 5.0


class Report:
    """Where progress goes. This one goes nowhere."""

    def stage(self, progress: float, message: str) -> None:
        """How far it is, 0 to 1; message: its first word is the stage."""

    def metric(self, values: Mapping[str, float]) -> None:
        """Figures that belong together."""


class _OnPipe(Report):
    def __init__(self) -> None:
        self._begun: set[str] = set()

    def stage(self, progress: float, message: str) -> None:  # noqa: ARG002  # a pipe has no bar
        stage = message.partition(" ")[0]
        if stage not in self._begun:
            self._begun.add(stage)
            click.echo(f"{stage} …", err=True)

    def metric(self, values: Mapping[str, float]) -> None:
        click.echo(figures(values), err=True)


class _OnTerminal(Report):
    def __init__(self, update: Callable[[float, str], None], write: Callable[[str], None]) -> None:
        self._update = update
        self._write = write

    def stage(self, progress: float, message: str) -> None:
        self._update(progress, message)

    def metric(self, values: Mapping[str, float]) -> None:
        self._write(figures(values))


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Report]:
    """Where a job's progress is shown, on stderr."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet:
        yield Report()
        return
    if not console.is_terminal:
        yield _OnPipe()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("", total=1.0)
        yield _OnTerminal(
            lambda share, message: bars.update(bar, completed=share, description=escape(message)),
            lambda text: bars.console.print(escape(text), highlight=False),
        )


def figures(values: Mapping[str, float]) -> str:
    """Figures for people: `iteration 10  train_loss 2.31`."""
    return "  ".join(
        f"{name} {int(value) if float(value).is_integer() else f'{value:.6g}'}"
        for name, value in values.items()
    )


def run(server: client.Client, kind: str, config: object, report: Report) -> Job:
    """Ask for a job and follow it to its end; its row. Raises Failure where the server refuses it."""
    begun = time.time()
    job = server.post("/api/jobs", {"kind": kind, "config": config}, Job)
    try:
        return follow(server, job, report)
    except KeyboardInterrupt:
        # The server's clock is this machine's: an older row was somebody else's wish.
        if job.created >= begun:
            server.post(f"/api/jobs/{job.id}/cancel", {}, Job)
        raise


def follow(server: client.Client, job: Job, report: Report) -> Job:
    """The row once the job has ended."""
    for event in server.events(f"/api/jobs/{job.id}/events"):
        match read_line(event.data):
            case Stage(name, share, message):
                report.stage(share, f"{name} {message}".strip())
            case Metric(values):
                report.metric(values)
            case _:
                pass
    # The last event comes a moment before the row's end, and none where the server was ended hard.
    while (job := server.get(f"/api/jobs/{job.id}", Job)).active:
        time.sleep(_POLL_S)
    return job


def own_process(
    argv: Sequence[str], report: Report, what: str, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a job's process without a server, under a tether of ours; interrupting closes it. Its result.

    what: the kind of job, for a person. env: None = this command's own. Raises Failure.
    """
    tether_read, tether = os.pipe()
    process = subprocess.Popen(
        [*argv, "--tether-fd", str(tether_read)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=(tether_read,),
        start_new_session=True,
    )
    os.close(tether_read)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            match read_line(line):
                case Stage(name, share, message):
                    report.stage(share, f"{name} {message}".strip())
                case Done(result):
                    return result
                case Failed(error):
                    raise Failure(error)
        raise Failure(f"the {what} ended without a result (exit code {process.wait()})")
    finally:
        os.close(tether)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def result_of(job: Job) -> dict[str, Any]:
    """What an ended job has made. Raises Failure where it has made nothing."""
    if job.status == "done" and job.result is not None:
        return job.result
    raise Failure(job.error or f"the {job.kind} was ended: {job.message}")


class Event(msgspec.Struct, frozen=True):
    """One line of a job's log, for people."""

    type: str
    time: float = 0.0
    name: str = ""
    progress: float = 0.0
    message: str = ""
    values: dict[str, float | None] = {}
    line: str = ""
    error: str = ""
    result: dict[str, Any] = {}

    def told(self) -> str:
        """What it says."""
        match self.type:
            case "stage":
                return f"{self.progress:4.0%} {self.name} {self.message}".rstrip()
            case "metric":
                return figures({name: float("nan") if v is None else v for name, v in self.values.items()})
            case "log":
                return self.line
            case "done":
                return f"done: {msgspec.json.encode(self.result).decode()}"
            case _:
                said = self.message or self.error
                return f"{self.type}: {said}" if said else self.type
