"""A worker without a model: the real protocol, a real process, and a script for what can go wrong.

`scripted_worker.py [--models DIR]… --tether-fd N --status-fd M [--name NAME]` stands in for
`python -m mlxpool.worker`. What it does is `script.json` in the folder that its Launch names (see
scripted_script.py); what it did is `life/events.jsonl` there, one line per life event with a monotonic time
that all processes of the machine share. Behaviour from before go needs the folder before the Launch names
it: --models says where NAME is looked up; a script that wants such behaviour and could not be found in
time fails its load and says so.

The event loop owns all state but the tether: its thread starts first, ends the process when the parent's
end closes, and hands the Launch over.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import msgspec

if not __package__:
    # Started as a file: the folder that holds `tests` is where its siblings are imported from.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.shared.control import (
    HEARTBEAT_INTERVAL_S,
    MAX_LINE_BYTES,
    Failed,
    Heartbeat,
    Imported,
    Launch,
    Loading,
    Ready,
    Status,
)
from tests.tools.scripted_chat import Engine
from tests.tools.scripted_http import Exchange
from tests.tools.scripted_script import EVENTS_FILE, SCRIPT_FILE, Script, read_events, read_script

# The exit code of a worker whose load failed.
EXIT_LOAD_FAILED = 3


class Life:
    """The log of life events. Events from before the folder is known are written when it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._file: int | None = None
        self._early: list[bytes] = []
        self._lock = threading.Lock()
        self._over = False

    def open(self, folder: Path) -> None:
        """Appends to the folder's log from now on; a second call changes nothing."""
        with self._lock:
            if self._file is None:
                path = folder / EVENTS_FILE
                path.parent.mkdir(exist_ok=True)
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.write(self._file, b"".join(self._early))

    def record(self, event: str, **fields: object) -> None:
        """Writes one event. Safe from any thread; an exit is the last, whatever another thread does."""
        with self._lock:
            if self._over:
                return
            self._over = event == "exit"
            entry = {"event": event, "t": time.monotonic(), "pid": os.getpid(), "model": self.name, **fields}
            line = json.dumps(entry).encode() + b"\n"
            if self._file is None:
                self._early.append(line)
            else:
                os.write(self._file, line)


class ScriptedWorker:
    """One process: its script, its pipes, and the engine that answers."""

    def __init__(self, model_dirs: list[Path], name: str, status_fd: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._status_fd = status_fd
        self._folder = next(
            (d / name for d in model_dirs if name and (d / name / SCRIPT_FILE).exists()), None
        )
        self._script = Script()
        self._socket = ""
        self._is_ready = False
        self._engine: Engine | None = None
        self.launched: asyncio.Future[Launch] = self._loop.create_future()
        self.life = Life(name)

    async def run(self) -> NoReturn:
        """The whole life; ends by exit or signal only."""
        self._loop.add_signal_handler(signal.SIGTERM, self._terminated)
        self._loop.add_signal_handler(signal.SIGINT, lambda: None)
        script = self._script if self._folder is None else self._adopt(self._folder)
        self.life.record("started")
        for line in script.stderr:
            print(line, file=sys.stderr, flush=True)
        await asyncio.sleep(script.import_s)
        if script.crash_at == "import":
            self.crash()
        self._say(Imported(backend="scripted"))
        if script.lie == "ready_before_go":
            self._say(Ready())

        launch = await self.launched
        self._socket = launch.socket
        self.life.name = launch.model
        script = self._script_of(launch)
        self.life.record("go", ram_bytes=launch.cache.ram_bytes if launch.cache is not None else None)

        weights = Path(launch.path) / "model.safetensors"
        weights_bytes = weights.stat().st_size if weights.exists() else 0
        engine = self._engine = Engine(launch, script, weights_bytes, self)
        heartbeats = self._loop.create_task(self._heartbeats(engine))
        await self._load(script, engine, weights_bytes)
        if script.fail_load:
            self._fail(script.fail_load)
        if script.lie != "ready_without_socket":
            await self._listen(launch.socket, engine)
        self.life.record("ready")
        self._say(Ready())
        self._is_ready = True
        if script.crash_at == "ready":
            self.crash()
        if script.lie == "loading_after_ready":
            self._say(Loading(done_bytes=0, total_bytes=weights_bytes))
        await heartbeats
        await self._loop.create_future()
        raise AssertionError("nothing resolves that future")

    def crash(self) -> NoReturn:
        """Dies as the script says: by its exit code if it has one, else by its signal."""
        if self._script.exit_code is not None:
            self.exit(self._script.exit_code, why="crash")
        # An abort on purpose leaves no core file behind.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        name = self._script.crash_signal
        number = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
        self.life.record("exit", signal=number.name, why="crash")
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # A signal to oneself is delivered before kill returns, unless it only stops the process.
        os._exit(128 + number)

    def exit(self, code: int, *, why: str) -> NoReturn:
        """Leaves without unwinding, as a worker does whose work is over."""
        self.life.record("exit", code=code, why=why)
        if self._socket:
            Path(self._socket).unlink(missing_ok=True)
        os._exit(code)

    # Inside

    def _adopt(self, folder: Path) -> Script:
        try:
            script = read_script(folder)
        except ValueError as err:
            self._fail(str(err))
        earlier = sum(1 for event in read_events(folder) if event["event"] == "started")
        self.life.open(folder)
        if script.faulty_runs and earlier >= script.faulty_runs:
            script = script.healthy()
        self._script = script
        return script

    def _script_of(self, launch: Launch) -> Script:
        """The script of the folder that the Launch names, which --name may have found before."""
        if self._folder is None:
            script = self._adopt(Path(launch.path))
            if early := ", ".join(script.needs_name()):
                self._fail(f"{launch.path}/{SCRIPT_FILE}: {early}: acts before go, which needs --models DIR")
        elif self._folder.resolve() != Path(launch.path).resolve():
            self._fail(f"launched with {launch.path}, but --name and --models found {self._folder}")
        return self._script

    def _fail(self, reason: str) -> NoReturn:
        self._say(Failed(reason=reason))
        self.exit(EXIT_LOAD_FAILED, why="failed")

    def _say(self, status: Status) -> None:
        self._say_raw(msgspec.json.encode(status) + b"\n")

    def _say_raw(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._status_fd, data) :]
        except BrokenPipeError:
            # Nobody listens: the tether decides whether that is the end.
            pass

    def _terminated(self) -> None:
        self.life.record("term")
        if not self._script.ignore_sigterm:
            if self._engine is not None and not self._script.stop_heartbeats:
                self._beat(self._engine)
            self.exit(0, why="term")

    async def _load(self, script: Script, engine: Engine, weights_bytes: int) -> None:
        self.life.record("loading")
        for step in range(script.load_lines):
            if script.load_progress:
                self._say(Loading(weights_bytes * step // script.load_lines, weights_bytes))
            await asyncio.sleep(script.load_s / script.load_lines)
            if step == (script.load_lines - 1) // 2:
                await self._trouble(script, engine)
        if script.load_progress:
            self._say(Loading(weights_bytes, weights_bytes))

    async def _trouble(self, script: Script, engine: Engine) -> None:
        """What the script has for the middle of a load."""
        if script.crash_at == "load":
            self.crash()
        if script.hang_at == "load":
            engine.hung = True
            await self._loop.create_future()
        if script.lie == "garbage":
            self._say_raw(b"\xff\x00 this is no message\n")
        elif script.lie == "huge_line":
            self._say_raw(b'{"type":"failed","reason":"' + b"x" * 4 * MAX_LINE_BYTES + b'"}\n')
        elif script.lie == "unknown_type":
            self._say_raw(b'{"type":"gossip","about":"the neighbours"}\n')

    async def _listen(self, path: str, engine: Engine) -> None:
        old_mask = os.umask(0o177)
        try:
            await self._loop.create_unix_server(lambda: Exchange(engine.answer), path, backlog=1024)
        finally:
            os.umask(old_mask)

    async def _heartbeats(self, engine: Engine) -> None:
        while not (self._script.stop_heartbeats and self._is_ready):
            self._beat(engine)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def _beat(self, engine: Engine) -> None:
        self._say(Heartbeat(engine.progress, engine.pending, engine.tokens, engine.cache.summary))


def watch_tether(fd: int, worker: ScriptedWorker, loop: asyncio.AbstractEventLoop) -> None:
    """The tether thread: the first line is the Launch, the end is the end."""
    with os.fdopen(fd, "rb") as tether:
        for line in iter(lambda: tether.readline(MAX_LINE_BYTES), b""):
            try:
                launch = msgspec.json.decode(line, type=Launch)
            except msgspec.DecodeError as err:
                print(f"no Launch: {line!r}: {err}", file=sys.stderr, flush=True)
                worker.exit(EXIT_LOAD_FAILED, why="no launch")
            loop.call_soon_threadsafe(worker.launched.set_result, launch)
    worker.exit(0, why="tether")


def bare_mlx_lm() -> None:
    """mlx_lm's modules without what its package imports: the product's readers name a module, the package
    takes two seconds for transformers and torch."""
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None
    assert found.submodule_search_locations is not None
    package = ModuleType("mlx_lm")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["mlx_lm"] = package


async def amain() -> None:
    """Reads the command line and lives."""
    parser = argparse.ArgumentParser(description="A worker without a model, for tests.")
    parser.add_argument("--models", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--tether-fd", type=int, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--name", default="")
    args = parser.parse_args()
    worker = ScriptedWorker(args.models, args.name, args.status_fd)
    tether = (args.tether_fd, worker, asyncio.get_running_loop())
    threading.Thread(target=watch_tether, args=tether, daemon=True).start()
    await worker.run()


if __name__ == "__main__":
    bare_mlx_lm()
    asyncio.run(amain())
