"""Pulls as a server's jobs, removal over HTTP, and the commands `pull` and `rm` with and without a server."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tools.fake_hub import FakeHub, Fault
from tests.tools.hub_models import MEBIBYTE, environment, write_random_model
from tests.tools.scripted_script import make_scripted_model
from tests.tools.served import Served, gone, serve

MLXPOOL = [sys.executable, "-c", "from mlxpool.parent.cli import main; main()"]
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub() as served:
        served.add("org/scripted", make_scripted_model(tmp_path / "sources", "scripted"))
        served.add("org/big", write_random_model(tmp_path / "sources" / "big"))
        yield served


def command(hub: FakeHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MLXPOOL, *arguments],
        env=environment(hub, home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def run(hub: FakeHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(command, hub, home, *arguments)


async def submit(served: Served, name: str) -> dict[str, Any]:
    answer = await served.request("POST", "/api/jobs", {"kind": "pull", "config": {"name": name}})
    assert answer.status == 202
    row: dict[str, Any] = answer.body
    return row


async def until_ended(served: Served, job_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        row: dict[str, Any] = (await served.request("GET", f"/api/jobs/{job_id}")).body
        if row["status"] not in ("queued", "running"):
            return row
        assert time.monotonic() < deadline, row
        await asyncio.sleep(0.02)


async def until_message(served: Served, job_id: str, message: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        row: dict[str, Any] = (await served.request("GET", f"/api/jobs/{job_id}")).body
        if row["message"] == message:
            return row
        assert time.monotonic() < deadline, row
        await asyncio.sleep(0.02)


async def until_held(hub: FakeHub) -> None:
    assert await asyncio.to_thread(hub.holding.wait, 60)


async def names(served: Served) -> list[str]:
    return [model["id"] for model in (await served.request("GET", "/v1/models")).body["data"]]


async def test_a_model_that_a_job_pulled_is_listed_and_answers(hub: FakeHub, tmp_path: Path) -> None:
    async with serve(tmp_path, scripted=True, env={"HF_ENDPOINT": hub.url}) as served:
        queued = await submit(served, "org/scripted")
        assert (queued["kind"], queued["config"], queued["status"]) == (
            "pull",
            {"name": "org/scripted"},
            "queued",
        )
        row = await until_ended(served, queued["id"])
        folder = str(served.home / "models" / "org" / "scripted")
        assert (row["status"], row["progress"], row["error"]) == ("done", 1.0, None)
        assert row["result"] == {"model": "org/scripted", "path": folder, "was_there": False}
        assert (await served.request("GET", "/api/jobs")).body["jobs"] == [row]
        assert await names(served) == ["org/scripted"]
        assert (await served.chat("org/scripted")).text
        (entry,) = (await served.request("GET", "/api/library")).body["models"]
        assert (entry["name"], entry["path"], entry["source"]) == ("org/scripted", folder, "home")
        assert (entry["state"], entry["verdict"], entry["removable"]) == ("ready", "fits", True)
        fit = (await served.request("GET", "/api/fit?model=org/scripted&context=512")).body
        assert (fit["model"], fit["context"], fit["verdict"]) == ("org/scripted", 512, "fits")

        refused = await served.request("DELETE", "/api/library/org/scripted")
        assert (refused.status, refused.body["error"]["message"]) == (
            400,
            "org/scripted is ready; unload it first: POST /api/models/org/scripted/unload",
        )
        await served.request("POST", "/api/models/org/scripted/unload", {})
        await served.until_state("org/scripted", "absent")
        removed = await served.request("DELETE", "/api/library/org/scripted")
        assert (removed.status, removed.body["id"], removed.body["path"]) == (200, "org/scripted", folder)
        assert removed.body["freed_bytes"] > entry["size_bytes"] / 2
        assert await names(served) == []
        assert (await served.chat("org/scripted")).code == "model_not_found"
        assert (await served.request("DELETE", "/api/library/org/scripted")).status == 404


async def test_a_job_that_is_cancelled_leaves_no_process_and_no_model(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = Fault(hold_after=MEBIBYTE)
    async with serve(tmp_path, scripted=True, env={"HF_ENDPOINT": hub.url}) as served:
        first = await submit(served, "org/big")
        await until_held(hub)
        row = await until_message(served, first["id"], "download 1.0 MB of 4.2 MB")
        assert (row["status"], row["progress"]) == ("running", 0.25)
        assert (await submit(served, "org/big"))["id"] == first["id"]
        behind = await submit(served, "org/scripted")
        pids = [
            pid for pid in served.worker_pids() if "pull_process" in " ".join(psutil.Process(pid).cmdline())
        ]
        assert len(pids) == 1
        assert (await served.request("POST", f"/api/jobs/{first['id']}/cancel")).status == 202
        row = await until_ended(served, first["id"])
        assert (row["status"], row["message"], row["error"]) == ("cancelled", "cancelled", None)
        await gone(pids)
        assert "org/big" not in await names(served)
        # The next one's turn comes, and what the cancelled one had is gone on with.
        assert (await until_ended(served, behind["id"]))["status"] == "done"
        assert (await until_ended(served, (await submit(served, "org/big"))["id"]))["status"] == "done"


async def test_a_failed_pull_says_why_in_its_row(hub: FakeHub, tmp_path: Path) -> None:
    async with serve(tmp_path, scripted=True, env={"HF_ENDPOINT": hub.url}) as served:
        row = await until_ended(served, (await submit(served, "org/missing"))["id"])
        assert row["status"] == "failed"
        assert row["error"].startswith(f"there is no model org/missing at {hub.url}; if it is private, ")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_server_that_ends_takes_its_pull_along(
    hub: FakeHub, tmp_path: Path, number: signal.Signals
) -> None:
    hub.faults[WEIGHTS] = Fault(hold_after=MEBIBYTE)
    async with serve(tmp_path, scripted=True, env={"HF_ENDPOINT": hub.url}) as served:
        await submit(served, "org/big")
        await until_held(hub)
        pids = served.worker_pids()
        begun = time.monotonic()
        assert await served.down(number) == (0 if number == signal.SIGTERM else -9)
        await gone(pids)
        assert time.monotonic() - begun < 5


REFUSALS: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/api/jobs", None, 400, "use {"),
    ("POST", "/api/jobs", {"kind": "bake"}, 400, "kind is 'bake'; use one of: pull"),
    ("POST", "/api/jobs", {"kind": "pull", "config": {"name": "x"}}, 400, "use org/name"),
    ("GET", "/api/jobs/job_x", None, 404, "no job 'job_x' here"),
    ("POST", "/api/jobs/job_x/cancel", None, 404, "no job 'job_x' here"),
    ("GET", "/api/fit", None, 400, "model is missing; use ?model=NAME&context=TOKENS"),
    ("GET", "/api/fit?model=m&context=1k", None, 400, "context is '1k'; use a whole number of tokens"),
    ("GET", "/api/fit?model=m&contxt=1", None, 400, "'contxt' is unknown; use model and context"),
    ("GET", "/api/fit?model=zz", None, 404, "no model 'zz' on this server"),
    ("GET", "/api/fit?model=broken", None, 400, "broken can't be loaded: config.json: no JSON object"),
    ("DELETE", "/api/library/m", None, 400, "which was given with --models; remove it there"),
    ("DELETE", "/api/library/..%2F..%2Fhome", None, 404, "no model"),
]


async def test_what_makes_no_sense_is_refused_with_what_would(tmp_path: Path) -> None:
    models = tmp_path / "models"
    make_scripted_model(models, "m")
    (make_scripted_model(models, "broken") / "config.json").write_text("{")
    async with serve(tmp_path, models=models, scripted=True) as served:
        for method, path, body, status, message in REFUSALS:
            answer = await served.request(method, path, body)
            assert (answer.status, message in answer.body["error"]["message"]) == (status, True), answer.body


async def test_the_command_goes_through_a_running_server(hub: FakeHub, tmp_path: Path) -> None:
    async with serve(tmp_path, scripted=True, env={"HF_ENDPOINT": hub.url}) as served:
        pulled = await run(hub, served.home, "pull", "org/scripted")
        folder = served.home / "models" / "org" / "scripted"
        assert (pulled.returncode, pulled.stdout) == (0, f"org/scripted is ready: {folder}\n")
        (job,) = (await served.request("GET", "/api/jobs")).body["jobs"]
        assert (job["config"], job["status"]) == ({"name": "org/scripted"}, "done")
        failed = await run(hub, served.home, "pull", "org/missing")
        assert failed.returncode == 1
        assert failed.stderr.startswith("mlxpool: there is no model org/missing at ")

        await served.request("POST", "/api/models/org/scripted/load", {})
        await served.until_state("org/scripted", "ready")
        kept = await run(hub, served.home, "rm", "org/scripted", "--yes")
        assert (kept.returncode, kept.stderr) == (
            1,
            "mlxpool: org/scripted is ready; `mlxpool rm org/scripted --unload` unloads it first\n",
        )
        removed = await run(hub, served.home, "rm", "org/scripted", "--yes", "--unload")
        assert removed.returncode == 0, removed.stderr
        assert removed.stdout.startswith("org/scripted is removed: ")
        assert await names(served) == []


async def test_interrupting_the_command_ends_the_servers_job(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = Fault(hold_after=MEBIBYTE)
    async with serve(tmp_path, scripted=True, env={"HF_ENDPOINT": hub.url}) as served:
        process = subprocess.Popen(  # noqa: ASYNC220  # it is to run beside the test
            [*MLXPOOL, "pull", "org/big"], env=environment(hub, served.home), stderr=subprocess.PIPE
        )
        await until_held(hub)
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 10) == 130
        (job,) = (await served.request("GET", "/api/jobs")).body["jobs"]
        assert (await until_ended(served, job["id"]))["status"] == "cancelled"


def test_interrupting_the_command_without_a_server_ends_its_process(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = Fault(hold_after=MEBIBYTE)
    home = tmp_path / "home"
    process = subprocess.Popen(
        [*MLXPOOL, "pull", "org/big"], env=environment(hub, home), stderr=subprocess.PIPE, text=True
    )
    assert hub.holding.wait(20)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err.split()) == (130, ["download", "…", "mlxpool:", "interrupted"])
    assert not child.is_running()
    # The unfinished pull is no model, and can be thrown away as one.
    assert (
        command(hub, home, "models").stdout == "no models yet: `mlxpool pull starter` fetches a small one\n"
    )
    removed = command(hub, home, "rm", "org/big", "--yes", "--json")
    assert json.loads(removed.stdout)["path"] == str(home / "models" / ".staging-org--big")
    assert not (home / "models" / ".staging-org--big").exists()


def test_pull_and_rm_without_a_server(hub: FakeHub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = home / "models" / "org" / "big"
    pulled = command(hub, home, "pull", "org/big")
    assert (pulled.returncode, pulled.stdout, pulled.stderr) == (
        0,
        f"org/big is ready: {folder}\n",
        "download …\npublish …\n",
    )
    again = command(hub, home, "pull", "org/big", "--json")
    assert json.loads(again.stdout) == {"model": "org/big", "path": str(folder), "was_there": True}
    unasked = command(hub, home, "rm", "org/big")
    assert (unasked.returncode, unasked.stderr) == (
        1,
        "mlxpool: nobody is here to be asked; --yes removes without a question\n",
    )
    assert folder.exists()
    unknown = command(hub, home, "rm", "org/bigg", "--yes")
    assert (unknown.returncode, unknown.stderr) == (
        1,
        "mlxpool: no model 'org/bigg' here; did you mean org/big?\n",
    )
    assert answered(hub, home, "n\n") == 1
    assert folder.exists()
    assert answered(hub, home, "y\n") == 0
    assert not folder.parent.exists()


def answered(hub: FakeHub, home: Path, answer: str) -> int:
    """`mlxpool rm org/big` on a terminal, its question answered; its exit code."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*MLXPOOL, "rm", "org/big"], env=environment(hub, home), stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(master, 1024)
    assert shown.startswith(b"Remove org/big (4.2 MB)?")
    os.write(master, answer.encode())
    code = process.wait(20)
    os.close(master)
    return code
