"""What every benchmark shares: the facts of the machine, servers to measure, and one shape of result.

A benchmark prints one JSON document, a `Report`. Samples are kept, not just their medians; an attempt that
failed is a row's `failed`, never dropped. Ratios come from interleaved pairs of one run: absolute figures
of a shared machine move by a factor of two, ratios taken side by side do not.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from mlxpool.shared import backend

REPO = Path(__file__).resolve().parents[2]
SCRIPTED_UP = REPO / "tests" / "tools" / "scripted_up.py"

# A server that is not up by then is broken, not slow.
START_TIMEOUT_S = 60.0
# Between attempts to connect while a server starts: it bounds the error of a start-up time.
POLL_S = 0.001
# SIGTERM to exit of an idle server; a second one would hide a shutdown that hangs.
STOP_TIMEOUT_S = 30.0

_PACKAGES = ("mlxpool", "mlx", "mlx-lm", "aiohttp", "uvloop", "msgspec", "transformers", "torch")


class Row(msgspec.Struct):
    """One thing measured: its samples in order, and what they come to.

    unit: of the samples. failed: one message per attempt that gave no sample.
    """

    name: str
    unit: str
    samples: list[float] = []
    failed: list[str] = []
    median: float | None = None
    p99: float | None = None
    low: float | None = None
    high: float | None = None

    def settle(self) -> Row:
        """Fills in the summary from the samples."""
        if self.samples:
            self.median = statistics.median(self.samples)
            self.p99 = percentile(self.samples, 99)
            self.low, self.high = min(self.samples), max(self.samples)
        return self


class Target(msgspec.Struct):
    """A figure this project promises: what was measured against what was set."""

    name: str
    value: float | None
    limit: float
    unit: str
    at_most: bool = True
    met: bool = False

    def settle(self) -> Target:
        """Fills in whether it is met; without a value it is not."""
        if self.value is not None:
            self.met = self.value <= self.limit if self.at_most else self.value >= self.limit
        return self


class Report(msgspec.Struct):
    """One benchmark's document."""

    bench: str
    commit: str
    changed_files: int
    started_unix_s: int
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row] = []
    figures: dict[str, float] = {}
    targets: list[Target] = []
    notes: list[str] = []

    def row(self, name: str, unit: str) -> Row:
        """A new row of this report."""
        self.rows.append(Row(name, unit))
        return self.rows[-1]

    def emit(self) -> int:
        """Prints the document; the exit status says whether every target is met and nothing failed."""
        for row in self.rows:
            row.settle()
        for target in self.targets:
            target.settle()
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        return int(not all(t.met for t in self.targets) or any(row.failed for row in self.rows))


def report(bench: str, **settings: Any) -> Report:
    """An empty report of this checkout on this machine."""
    changed = [line for line in _git("status", "--porcelain").splitlines() if line]
    return Report(
        bench=bench,
        commit=_git("rev-parse", "HEAD").strip() or "unknown",
        changed_files=len(changed),
        started_unix_s=int(time.time()),
        machine=machine(),
        settings=settings,
    )


def machine() -> dict[str, Any]:
    """What a reader must know to compare: system, processor, memory, versions, load before the run."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "packages": versions,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile. Raises ValueError without samples."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples, no percentile")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of the user's own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MLXPOOL_")}


def free_port() -> int:
    """A TCP port of the loopback interface that nothing uses right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def console_script() -> str:
    """The installed `mlxpool` command beside this interpreter. Raises FileNotFoundError."""
    script = Path(sys.executable).with_name("mlxpool")
    if not script.exists():
        raise FileNotFoundError(f"{script}: install the project into this environment first")
    return str(script)


class Server:
    """A server process this benchmark started, and how to ask it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log

    def json(self, path: str, body: object = None, timeout_s: float = 60) -> Any:
        """The JSON answer of a GET, or of a POST where there is a body. Raises RuntimeError with the log."""
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as err:
            said = err.read()[:500].decode(errors="replace")
            raise RuntimeError(f"{path}: {err.code}: {said}") from None

    def wait_for(self, path: str, timeout_s: float = START_TIMEOUT_S) -> float:
        """Waits for a 200; its monotonic time. Raises RuntimeError with the last lines of the log."""
        deadline = time.monotonic() + timeout_s
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\n\r\n".encode()
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server left with {self.process.returncode}: {self.tail()}")
            with contextlib.suppress(OSError), socket.socket() as client:
                client.connect(("127.0.0.1", self.port))
                client.settimeout(timeout_s)
                client.sendall(head)
                if b" 200 " in client.recv(4096).split(b"\r\n", 1)[0]:
                    return time.monotonic()
            time.sleep(POLL_S)
        raise RuntimeError(f"no 200 on {path} within {timeout_s:.0f} s: {self.tail()}")

    def tail(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-2000:]

    def memory(self) -> dict[str, int]:
        """Bytes of the process: resident and, where the system tells, proportional."""
        full = psutil.Process(self.process.pid).memory_full_info()
        found = {"rss_bytes": full.rss, "uss_bytes": full.uss}
        return found | ({"pss_bytes": full.pss} if hasattr(full, "pss") else {})

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to its group when it does not leave. Raises RuntimeError in that case."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(STOP_TIMEOUT_S)
            raise RuntimeError(f"still there {STOP_TIMEOUT_S:.0f} s after SIGTERM: {self.tail()}") from None


@contextlib.contextmanager
def serving(
    argv: Sequence[str],
    port: int,
    log: Path,
    *,
    env: dict[str, str] | None = None,
    ready: str | None = "/health",
) -> Iterator[Server]:
    """A server process for the time of the block; ready: the path that answers 200 when it is up."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=clean_environment() if env is None else env,
            start_new_session=True,
        )
    server = Server(process, port, log)
    try:
        if ready is not None:
            server.wait_for(ready)
        yield server
    finally:
        server.stop()


def scripted_pool(home: Path, models: Path, port: int, **options: str) -> list[str]:
    """The command of a parent with scripted workers; options are its flags, without dashes."""
    argv = [
        sys.executable,
        str(SCRIPTED_UP),
        "--home",
        str(home),
        "--models",
        str(models),
        "--port",
        str(port),
    ]
    for flag, value in options.items():
        argv += [f"--{flag.replace('_', '-')}", value]
    return argv


def worker_socket(server: Server, model: str) -> str:
    """The UNIX socket that a loaded model's worker listens on, asked of the system. Raises RuntimeError."""
    workers = {worker["model"]: worker for worker in server.json("/api/pool")["workers"]}
    if model not in workers or not workers[model].get("pid"):
        raise RuntimeError(f"no worker of {model}: {workers}")
    listening = psutil.Process(workers[model]["pid"]).net_connections("unix")
    paths = sorted({str(one.laddr) for one in listening if str(one.laddr).startswith("/")})
    if len(paths) != 1:
        raise RuntimeError(f"the worker of {model} has the sockets {paths}")
    return paths[0]


def timed_run(argv: Sequence[str], env: dict[str, str]) -> float:
    """Seconds from start to exit of a command. Raises RuntimeError when it fails."""
    start = time.monotonic()
    done = subprocess.run(argv, env=env, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    took = time.monotonic() - start
    if done.returncode:
        raise RuntimeError(f"{argv}: {done.returncode}: {done.stderr[-1000:].decode(errors='replace')}")
    return took


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(REPO), *arguments], capture_output=True, text=True, check=False)
    return done.stdout


def _processor() -> str:
    if sys.platform == "darwin":
        named = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return named.stdout.strip()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def as_a_worker() -> None:
    """Begin this process anew in a worker's environment, unless it has that: MLX's own BLAS for the processor
    is many times slower than the one that workers have."""
    env = backend.worker_environment(backend.detect())
    if any(os.environ.get(key) != value for key, value in env.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
