"""Jobs of scripts, whose processes are real, if small; and a GPU that a test lends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from mlxpool.parent.database import FILE_NAME, Database
from mlxpool.parent.jobs.following import Readers
from mlxpool.parent.jobs.kinds import KINDS
from mlxpool.parent.jobs.kinds.kind import Fault, Here, Needs
from mlxpool.parent.jobs.runner import Jobs
from mlxpool.parent.jobs.store import Job
from mlxpool.parent.migrations import MIGRATIONS
from mlxpool.shared.config import Settings
from mlxpool.shared.errors import error

SAY = "import sys, os, time, signal, subprocess\nsay = lambda line: print(line, flush=True)\n"
DONE = 'say(\'{"type":"done","result":{"answer":42}}\')'
FOREVER = "time.sleep(600)"
# Of waits for a condition: a busy machine takes its time.
WAIT_S = 30.0


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The configuration of the tests' kinds: what the process does."""

    code: Annotated[str, Meta(description="Python.")]
    number: Annotated[int, Meta(description="To tell two of them apart.", ge=0)] = 0


class ScriptKind:
    """Runs a script. gpu: under a lease."""

    summary = "Run a script."
    positional = ("code",)
    config = Script

    def __init__(self, name: str, *, gpu: bool = False) -> None:
        self.name = name
        self.gpu = gpu
        # Called in `faults`, on its thread.
        self.looking: Callable[[], None] = lambda: None

    def faults(self, config: Script, _: Here) -> list[Fault]:
        self.looking()
        return [Fault("code", "there is nothing to run"), Fault("number", "so it has none")][
            : 0 if config.code else 2
        ]

    def needs(self, config: Script, _: Here) -> Needs:
        if config.code == "needs":
            raise RuntimeError("no needs today")
        return Needs(gpu=self.gpu, memory_bytes=7)

    def argv(self, config: Script, _: Here) -> list[str]:
        if config.code == "missing":
            return ["/nonexistent/program"]
        return [sys.executable, "-c", SAY + config.code]

    def env(self, _config: Script, here: Here) -> dict[str, str]:
        return {"JOB_ID": here.run_id, "OWN_URL": here.own_url}


class LentGpu:
    """Lends it while `free` is set; tells what happened in order."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.told: list[str] = []

    @contextlib.asynccontextmanager
    async def exclusive(self, holder: str, memory_bytes: int) -> AsyncIterator[None]:
        if holder.endswith("never"):
            raise error("model_too_large", f"{memory_bytes} bytes will never be free")
        self.told.append(f"asked by {holder[:12]} for {memory_bytes}")
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.told.append("given up")
            raise
        self.told.append("lent")
        try:
            yield
        finally:
            self.told.append("given back")


class World:
    """Jobs over a home, and what their subscribers hear."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.gpu = LentGpu()
        self.script = ScriptKind("script")
        self.kinds = [self.script, ScriptKind("other"), ScriptKind("heavy", gpu=True)]
        self.kinds.append(ScriptKind("weighty", gpu=True))
        self.database = Database(home / FILE_NAME, MIGRATIONS)
        self.jobs = Jobs(
            lambda: Settings(home=home),
            home,
            self.database,
            self.gpu,
            "cpu",
            own_url="http://127.0.0.1:1",
            kinds=[*self.kinds, *KINDS[:1]],
        )
        self.readers = Readers(self.jobs.store, self.jobs.logs)
        self.rows: list[Job] = []
        self._changed = asyncio.Event()
        self.jobs.subscribe(self._hear)

    def _hear(self, job: Job) -> None:
        self.rows.append(job)
        self._changed.set()

    async def submit(self, code: str, kind: str = "script", number: int = 0) -> Job:
        return await self.jobs.submit(kind, {"code": code, "number": number})

    async def until(self, job: Job, *statuses: str, message: str | None = None) -> Job:
        """The first row of that status, and message where one is named."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for row in self.rows:
                    if row.id == job.id and row.status in statuses and message in (None, row.message):
                        return row
                self._changed.clear()
                await self._changed.wait()

    def statuses(self, job: Job) -> list[str]:
        return list(dict.fromkeys(row.status for row in self.rows if row.id == job.id))

    async def read(self, job: Job, offset: int = 0, follow: bool = True) -> bytes:
        """The stream of its events."""
        async with asyncio.timeout(WAIT_S):
            return b"".join([events async for events in self.readers.read(job, offset, follow)])

    async def events(self, job: Job) -> list[tuple[str, dict[str, object]]]:
        """(type, data) of all its events, without their times."""
        read = []
        for kind, _, data in parse(await self.read(job)):
            event = msgspec.json.decode(data)
            assert isinstance(event.pop("time"), float)
            assert event.pop("type") == kind
            read.append((kind, event))
        return read

    async def close(self) -> None:
        await self.jobs.close()
        await self.database.close()


def parse(stream: bytes) -> list[tuple[str, int, bytes]]:
    """(type, id, data) of each event. Every one is whole."""
    events = []
    *blocks, rest = stream.split(b"\n\n")
    assert rest == b""
    for block in blocks:
        if block != b": still here":
            kind, place, data = block.split(b"\n")
            assert (kind[:7], place[:4], data[:6]) == (b"event: ", b"id: ", b"data: ")
            events.append((kind[7:].decode(), int(place[4:]), data[6:]))
    return events


@contextlib.asynccontextmanager
async def running(home: Path) -> AsyncIterator[World]:
    """Jobs over this home, opened and closed."""
    world = World(home)
    await world.jobs.open()
    try:
        yield world
    finally:
        world.gpu.free.set()
        await world.close()


def stage(share: float, message: str) -> str:
    """Code that says how far it is."""
    name, _, message = message.partition(" ")
    return f'say(\'{{"type":"stage","name":"{name}","progress":{share},"message":"{message}"}}\')'
