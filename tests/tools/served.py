"""A served parent for system tests: the real `mlxpool up`, or the same parent over scripted workers.

    async with serve(tmp_path, models=…, scripted=True) as served:
        answer = await served.chat("a", "hello")

Processes started here are ended here, by pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.tools import scripted_up, sse
from tests.tools.forked_up import ForkedUp

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


@dataclass
class Answer:
    """Status, headers and body of one answer: decoded where it is JSON, else bytes."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def text(self) -> str:
        """What the assistant said."""
        assert self.status == 200, self.body
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def code(self) -> str:
        """The error's code."""
        return str(self.body["error"]["code"])


class Served:
    """A running parent and a client of it."""

    def __init__(
        self, process: subprocess.Popen[bytes] | ForkedUp, home: Path, client: aiohttp.ClientSession
    ) -> None:
        self.process = process
        self.home = home
        self.client = client
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def up(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"it left with {self.process.returncode}: {self.log()}"
            with contextlib.suppress(OSError, ValueError, aiohttp.ClientError):
                address = json.loads((self.home / "up.json").read_text())
                if address["pid"] == self.process.pid:
                    self.port = address["port"]
                    async with self.client.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
            await asyncio.sleep(0.01)
        raise AssertionError(f"it does not serve: {self.log()}")

    def log(self) -> str:
        """Everything the parent printed."""
        return (self.home / "parent.log").read_text(errors="replace")

    async def request(
        self, method: str, path: str, body: Any = None, *, data: bytes | None = None, **headers: str
    ) -> Answer:
        """One request; `body` is sent as JSON, `data` as it is."""
        payload = data if data is not None else None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.request(method, self.url + path, data=payload, headers=named) as answer:
            raw = await answer.read()
            is_json = answer.headers.get("Content-Type", "").startswith("application/json")
            decoded = json.loads(raw) if is_json else raw
            return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, decoded)

    async def chat(self, model: str | None, prompt: str = "hello", **fields: Any) -> Answer:
        """A whole chat answer."""
        return await self.request("POST", "/v1/chat/completions", chat_body(model, prompt, **fields))

    async def stream_bytes(self, model: str, prompt: str = "hello", **fields: Any) -> bytes:
        """The whole body of a streamed answer."""
        body = chat_body(model, prompt, stream=True, **fields)
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()

    async def stream(self, model: str, prompt: str = "hello", **fields: Any) -> sse.ChatStream:
        """A streamed answer, read strictly and put together."""
        return sse.read_chat(await self.stream_bytes(model, prompt, **fields))

    async def pool(self) -> Any:
        """GET /api/pool"""
        return (await self.request("GET", "/api/pool")).body

    async def worker(self, model: str) -> dict[str, Any] | None:
        """The model's entry in /api/pool."""
        found = [w for w in (await self.pool())["workers"] if w["model"] == model]
        return found[0] if found else None

    async def state(self, model: str) -> str:
        """The model's state in /v1/models."""
        return str((await self.request("GET", f"/v1/models/{model}")).body["state"])

    async def until_state(self, model: str, *states: str, timeout_s: float = 60.0) -> str:
        """Wait for one of these states."""
        state = ""

        async def reached() -> bool:
            nonlocal state
            state = await self.state(model)
            return state in states

        await until(reached, timeout_s, lambda: f"{model} stays {state}, not {states}: {self.log()[-2000:]}")
        return state

    def worker_pids(self) -> list[int]:
        """Live processes that this parent started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [
                child.pid
                for child in psutil.Process(self.process.pid).children(recursive=True)
                if child.status() != psutil.STATUS_ZOMBIE
            ]
        return []

    async def down(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, STOP_TIMEOUT_S)


def chat_body(model: str | None, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], **fields}
    return body if model is None else {"model": model, **body}


@contextlib.asynccontextmanager
async def serve(
    tmp: Path,
    *,
    models: Path | None = None,
    scripted: bool = False,
    budget: str | int | None = None,
    settings: dict[str, str] | None = None,
    config: str | None = None,
    port: int = 0,
    env: dict[str, str] | None = None,
    flags: list[str] | None = None,
) -> AsyncIterator[Served]:
    """A parent over the models in that folder. settings: "section.key" → value; config: the file's text.

    The block may end it itself; what is left is ended here and must leave no worker.
    """
    home = tmp / "home"
    home.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (home / "config.toml").write_text(config)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLXPOOL_")} | (env or {})
    # Tests count processes; those that want a spare say so.
    environment.setdefault("MLXPOOL_POOL_SPARE_WORKER", "false")
    # A budget that a test chose is for its models; one that is about prompts says how much is theirs.
    if budget is not None:
        environment.setdefault("MLXPOOL_CACHE_RAM", "0")
    for key, value in (settings or {}).items():
        environment[f"MLXPOOL_{key.replace('.', '_').upper()}"] = value
    argv = ["--home", str(home), "--port", str(port)]
    argv += ["--models", str(models)] if models is not None else []
    argv += ["--memory-budget", str(budget)] if budget is not None else []
    argv += flags or []
    with (home / "parent.log").open("ab") as log:
        process: subprocess.Popen[bytes] | ForkedUp
        # A kind of job is made known before what runs jobs is imported.
        if scripted and "--scripted-job" not in argv:
            process = ForkedUp(argv, environment, log)
        else:
            program = [scripted_up.__file__] if scripted else ["-m", "mlxpool.parent", "up"]
            process = subprocess.Popen(  # noqa: ASYNC220  # started once, before the test begins
                [sys.executable, *program, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        served = Served(process, home, client)
        try:
            await served.up()
            yield served
        finally:
            pids = served.worker_pids()
            if process.poll() is None:
                process.terminate()
                try:
                    await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    raise
            await gone(pids)


async def gone(pids: list[int], timeout_s: float = 60.0) -> None:
    """Wait until none of these processes runs; fail after the time."""
    await until(lambda: not alive(pids), timeout_s, lambda: f"still there: {alive(pids)}")


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that run (zombies do not)."""
    running = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                running.append(pid)
    return running


async def until(
    true: Callable[[], bool | Awaitable[bool]],
    timeout_s: float = 60.0,
    said: Callable[[], str] = lambda: "it never came true",
) -> None:
    """Wait for a condition; fail after the time."""
    deadline = time.monotonic() + timeout_s
    while not (await now if isinstance(now := true(), Awaitable) else now):
        assert time.monotonic() < deadline, said()
        await asyncio.sleep(0.01)
