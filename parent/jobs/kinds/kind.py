"""What a kind of job is: the shape of its configuration, what it needs, and a command line.

A kind decides nothing while it runs: everything a person can get wrong is found by `faults` before the row is
made, and the rest is the business of the process, which speaks `shared/job_lines.py` on stdout. The shape
alone makes the kind's HTTP, its command's flags and its form on the page; nothing of them is written twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from mlxpool.parent.library import Library
from mlxpool.shared.backend import Backend
from mlxpool.shared.config import Settings

# What a text of a configuration names: a form offers those, a command makes a path absolute.
Source = Literal["model", "adapter", "dataset", "file"]


def source(of: Source) -> msgspec.Meta:
    """To annotate a configuration's field with, beside its description."""
    return msgspec.Meta(extra_json_schema={"x-source": of})


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with a configuration. field: of the configuration. message: the value, and what would
    work."""

    field: str
    message: str


class Needs(msgspec.Struct, frozen=True):
    """What a job needs of the machine. gpu: nothing else may compute meanwhile, so it runs under an exclusive
    lease; of kinds with `gpu` alone. memory_bytes: at its peak; models that are idle make way for it."""

    gpu: bool = False
    network: bool = False
    memory_bytes: int = 0


class Here(msgspec.Struct, frozen=True):
    """Where a job would run. own_url: the server's address, for kinds that ask it. run_id:
    the job's id, `""` while it is only looked at."""

    settings: Settings
    library: Library
    backend: Backend
    own_url: str = ""
    run_id: str = ""

    @property
    def home(self) -> Path:
        return self.settings.home


class Kind(Protocol):
    """One kind of job. Stateless. None of its methods runs on the event loop: they may read files."""

    @property
    def name(self) -> str:
        """As in rows, `/api/jobs` and, unless its command has another name, the command line."""

    @property
    def summary(self) -> str:
        """One sentence for people: help of the command, head of the form."""

    @property
    def gpu(self) -> bool:
        """Whether its jobs run under an exclusive lease: all kinds that do take turns in one line, every
        other kind has a line of its own."""

    @property
    def positional(self) -> tuple[str, ...]:
        """Fields that its command takes as arguments, in order; all others are flags."""

    @property
    def config(self) -> type[msgspec.Struct]:
        """What it is configured with: a frozen struct that forbids unknown fields, each field annotated with
        a `msgspec.Meta(description=…)`. Reading it checks what can be told from the values alone."""

    def faults(self, config: Any, here: Here) -> list[Fault]:
        """Everything that would keep it from succeeding, as far as it can be known now; [] when nothing."""

    def needs(self, config: Any, here: Here) -> Needs:
        """Asked once it is its turn."""

    def argv(self, config: Any, here: Here) -> list[str]:
        """The process that does it, but for its tether."""

    def env(self, config: Any, here: Here) -> Mapping[str, str]:
        """What its process's environment has beyond the server's own."""
