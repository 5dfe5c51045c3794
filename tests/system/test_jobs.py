"""Jobs through a served parent: killed and started again, read by many, ended from a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

from tests.tools.served import Answer, Served, gone, serve, until
from tests.unit.jobs_world import parse

MLXPOOL = [sys.executable, "-c", "from mlxpool.parent.cli import main; main()"]
WAIT_S = 30.0
ENDED = ("done", "failed", "cancelled", "interrupted")


@contextlib.asynccontextmanager
async def serving(tmp: Path) -> AsyncIterator[Served]:
    async with serve(tmp, scripted=True, flags=["--scripted-job"]) as served:
        yield served


async def ask(served: Served, **config: Any) -> Answer:
    return await served.request("POST", "/api/jobs", {"kind": "scripted", "config": config})


async def row(served: Served, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await served.request("GET", f"/api/jobs/{job_id}")).body
    return found


async def until_status(served: Served, job_id: str, *statuses: str, message: str = "") -> dict[str, Any]:
    last: dict[str, Any] = {}

    async def reached() -> bool:
        nonlocal last
        last = await row(served, job_id)
        return last["status"] in statuses and last["message"].startswith(message)

    await until(reached, WAIT_S, lambda: str(last))
    return last


def job_pids(served: Served) -> list[int]:
    return [pid for pid in served.worker_pids() if "scripted_job" in " ".join(psutil.Process(pid).cmdline())]


async def events(
    served: Served, job_id: str, query: str = "", **headers: str
) -> list[tuple[str, int, bytes]]:
    answer = await served.request("GET", f"/api/jobs/{job_id}/events{query}", **headers)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse(answer.body)


async def test_a_killed_servers_jobs_are_gone_and_say_so_right_after_the_restart(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with serving(tmp_path) as served:
        done = (await ask(served, name="done", steps=3)).body["id"]
        ended = await until_status(served, done, "done")
        log = await events(served, done)
        ran = (await ask(served, name="ran", steps=9, hold_at=5, gate=str(gate))).body["id"]
        waits = (await ask(served, name="waits", steps=1)).body["id"]
        await until_status(served, ran, "running", message="work step 4")
        pids = job_pids(served)
        assert len(pids) == 1
        await served.down(signal.SIGKILL)
        await gone(pids, WAIT_S)
    async with serving(tmp_path) as served:
        rows = (await served.request("GET", "/api/jobs")).body["jobs"]
        assert [(one["id"], one["status"], one["error"]) for one in rows] == [
            (waits, "interrupted", "the server ended while it waited"),
            (ran, "interrupted", "the server ended while it ran"),
            (done, "done", None),
        ]
        assert rows[2] == ended
        assert await events(served, done) == log
        # What a client had is not sent again.
        place = log[4][1]
        assert await events(served, done, f"?offset={place}") == log[5:]
        assert await events(served, done, "?offset=0", Last_Event_ID=str(place)) == log[5:]
        assert [kind for kind, _, _ in await events(served, ran)][-1] == "interrupted"
        # The line is free: the same job runs now.
        gate.touch()
        again = (await ask(served, name="ran", steps=9, hold_at=5, gate=str(gate))).body
        assert again["id"] != ran
        assert (await until_status(served, again["id"], *ENDED))["status"] == "done"


async def test_clients_that_never_read_or_leave_cost_the_job_and_the_others_nothing(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with serving(tmp_path) as served:
        job = (await ask(served, name="talks", steps=100, hold_at=2, gate=str(gate), lines=400)).body["id"]
        await until_status(served, job, "running", message="work step 1")
        request = f"GET /api/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n".encode()
        silent = []
        for _ in range(60):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", served.port))
            client.sendall(request)
            silent.append(client)
        for client in silent:
            assert (await asyncio.to_thread(client.recv, 15)) == b"HTTP/1.1 200 OK"
        before = psutil.Process(served.process.pid).memory_info().rss
        reading = asyncio.create_task(events(served, job))
        gate.touch()
        ended = await until_status(served, job, *ENDED)
        assert ended["result"] == {"steps": 100}
        told = await reading
        assert sum(kind == "log" for kind, _, _ in told) == 40_000
        assert told[-1][0] == "done"
        # Sixty logs of 3 MB would be 180.
        assert psutil.Process(served.process.pid).memory_info().rss - before < 60e6
        for client in silent:
            client.close()
        refused: list[int] = []

        async def all_places_are_free() -> bool:
            async with contextlib.AsyncExitStack() as open_streams:
                waiting = (await ask(served, name="w", steps=1, hold_at=1, gate=str(tmp_path / "no"))).body[
                    "id"
                ]
                refused.clear()
                for _ in range(64):
                    answer = await open_streams.enter_async_context(
                        served.client.get(f"{served.url}/api/jobs/{waiting}/events")
                    )
                    refused.extend([answer.status] if answer.status != 200 else [])
                if not refused:
                    over = await served.request("GET", f"/api/jobs/{waiting}/events")
                    assert (over.status, over.code) == (429, "queue_full")
                    assert over.headers["retry-after"] == "5"
            return not refused

        await until(all_places_are_free, WAIT_S, lambda: f"refused: {refused}")


async def test_a_browser_that_reconnects_misses_nothing_and_hears_nothing_twice(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with serving(tmp_path) as served:
        job = (await ask(served, name="j", steps=30, hold_at=15, gate=str(gate))).body["id"]
        await until_status(served, job, "running", message="work step 14")
        heard: list[tuple[str, int, bytes]] = []
        while not heard or heard[-1][0] != "done":
            # Each time it leaves in the middle of whatever comes.
            headers = {"Last-Event-ID": str(heard[-1][1])} if heard else {}
            address = f"{served.url}/api/jobs/{job}/events"
            async with served.client.get(address, headers=headers) as answer:
                piece = await answer.content.read(700)
                while b"\n\n" not in piece:
                    piece += await answer.content.read(700)
            heard += parse(piece[: piece.rindex(b"\n\n") + 2])
            if len(heard) > 20:
                gate.touch()
        assert heard == await events(served, job)


REFUSALS: list[tuple[str, str, bytes | None, int, str]] = [
    ("GET", "/api/jobs/ID/events?offset=-1", None, 400, "offset is '-1'; use a number of bytes"),
    ("GET", "/api/jobs/ID/events?offset=9999999", None, 400, "use at most that"),
    ("GET", "/api/jobs/ID/events?ofset=1", None, 400, "'ofset' is unknown; use offset and follow"),
    ("GET", "/api/jobs/ID/events?follow=yes", None, 400, "follow is 'yes'; use true or false"),
    ("GET", "/api/jobs/..%2Fstate/events", None, 404, "no job '../state' here"),
    ("POST", "/api/jobs", b"[" * 500_000, 400, "use {"),
    ("POST", "/api/jobs", b" " * 600_000, 400, "the body has 600000 bytes, and a job's at most 524288"),
    ("POST", "/api/jobs", b'{"kind":"pull","config":' + b'{"a":' * 100_000, 400, "use {"),
    ("POST", "/api/jobs", b'{"kind":"scripted","config":{"name":"\\ud800","steps":1}}', 400, "use {"),
    (
        "POST",
        "/api/jobs",
        b'{"kind":"scripted","config":{"nam":"x","steps":1e30,"mode":"slow"}}',
        400,
        "config.nam: unknown, did you mean name?; config.name: missing; config.steps: 1e30 is"
        ' not a whole number from 1 to 100000; config.mode: "slow" is not one of calm, quick',
    ),
    (
        "POST",
        "/api/jobs",
        b'{"kind":"scripted","config":{"name":"taken","model":"missing","steps":1}}',
        400,
        "config.model: there is no model 'missing' here; config.name: 'taken' is taken; choose another",
    ),
]


async def test_what_makes_no_sense_is_refused_with_what_would(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        job = (await ask(served, name="j", steps=1)).body["id"]
        for method, path, body, status, message in REFUSALS:
            answer = await served.request(method, path.replace("ID", job), data=body)
            said = answer.body["error"]["message"]
            assert (answer.status, message in said) == (status, True), said
        kinds = (await served.request("GET", "/api/jobs/kinds")).body["kinds"]
        scripted = kinds[-1]
        assert (scripted["name"], scripted["positional"], scripted["gpu"]) == ("scripted", ["name"], False)
        assert scripted["schema"]["properties"]["steps"] == {
            "type": "integer", "minimum": 1, "maximum": 100_000, "description": "Steps it takes.",
        }  # fmt: skip


def command(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MLXPOOL, *words],
        env={**os.environ, "MLXPOOL_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def run(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(command, served.home, *words)


async def test_jobs_are_listed_followed_and_ended_from_a_terminal(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with serving(tmp_path) as served:
        assert (await run(served, "jobs", "list")).stdout == "no jobs yet\n"
        job = (await ask(served, name="first", steps=4, hold_at=3, gate=str(gate))).body["id"]
        await until_status(served, job, "running", message="work step 2")
        listed = (await run(served, "jobs", "list")).stdout.splitlines()
        assert listed[0].split() == ["ID", "KIND", "WHAT", "STATUS", "PROGRESS", "TOOK", "MESSAGE"]
        assert listed[1].split()[:5] == [job, "scripted", "first", "running", "50%"]
        log = served.home / "jobs" / f"{job}.ndjson"
        await until(lambda: b"said 2" in log.read_bytes(), WAIT_S)
        so_far = (await run(served, "jobs", "logs", job)).stdout.splitlines()
        assert [line.partition(" ")[2] for line in so_far] == [
            "started", "  0% load reading", " 25% work step 1 of 4", "step 1  train_loss 3  speed 101",
            "step 1  val_loss 4", "said 1", " 50% work step 2 of 4", "step 2  train_loss 1.5  speed 102",
            "said 2",
        ]  # fmt: skip
        following = asyncio.create_task(run(served, "jobs", "logs", job, "--follow", "--json"))
        gate.touch()
        told = [json.loads(line) for line in (await following).stdout.splitlines()]
        assert [event["type"] for event in told][-1] == "done"
        shown = (await run(served, "jobs", "show", job)).stdout
        assert "status    done\n" in shown
        assert "steps     4\n" in shown
        assert json.loads((await run(served, "jobs", "list", "--json")).stdout)[0]["id"] == job

        hung = (await ask(served, name="hung", steps=4, hold_at=1, gate=str(tmp_path / "no"))).body["id"]
        await until_status(served, hung, "running")
        ended = await run(served, "jobs", "cancel", hung)
        assert (ended.returncode, ended.stdout) == (0, f"{hung}: cancelled\n")
        assert job_pids(served) == []
        unknown = await run(served, "jobs", "show", "job_x")
        assert (unknown.returncode, unknown.stderr) == (
            1,
            "mlxpool: no job 'job_x' here; GET /api/jobs lists those there are\n",
        )

        refused = await run(served, "quantize", "nothing", "--bits", "8")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.startswith("mlxpool: config.model: ")
    alone = command(tmp_path / "home", "jobs", "list")
    assert alone.returncode == 1
    assert "no server is running" in alone.stderr
