"""The doctor: each lack is found, named and given a way out; and a whole look at this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxpool.parent.doctor import Facts, Finding, ModelFact, Rate, Running, findings
from mlxpool.parent.run_folder import Address, write_address
from mlxpool.parent.service.manager import Status
from mlxpool.shared.memory import Budget, MemoryPlan
from mlxpool.shared.probe import ProbeReport
from tests.tools.model_folders import write_model

GB = 10**9
HOME = Path("/home/ann/.mlxpool")


def plan(verdict: Any = "fits", **values: Any) -> MemoryPlan:
    return MemoryPlan(
        weights_bytes=4 * GB,
        overhead_bytes=GB,
        grammar_bytes=0,
        prefill_bytes=GB,
        allocator_bytes=0,
        kv_pool_bytes=2 * GB,
        kv_bytes_per_token=1000,
        context=4096,
        planned_bytes=8 * GB,
        verdict=verdict,
        **values,
    )


HEALTHY = Facts(
    python="3.12.1",
    system="Darwin",
    chip="arm64",
    versions={"mlx": "0.32.4", "mlx-metal": "0.32.4", "mlx-lm": "0.32.2"},
    backend="metal",
    openblas=None,
    probe=ProbeReport("Device(gpu, 0)", "Apple M3 Max", 48 * GB, 900.0),
    probe_fault="",
    home=HOME,
    home_option="",
    home_mode=0o700,
    home_writable=True,
    config=HOME / "config.toml",
    config_mode=0o600,
    has_keys=True,
    disk_free=200 * GB,
    disk_rate=Rate(write=2e9, read=5e9),
    memory_total=64 * GB,
    memory_available=50 * GB,
    budget=Budget(48 * GB),
    running=None,
    host="127.0.0.1",
    port=8420,
    port_state="free",
    port_fault="",
    manager="launchd",
    service=Status("running", 42),
    service_lack=None,
    models=[ModelFact("a", None, plan()), ModelFact("b", None, plan())],
    shadowed=[],
    open_files=8192,
    open_files_lack=None,
)
CPU = {
    "system": "Linux",
    "chip": "x86_64",
    "backend": "cpu",
    "openblas": "/lib/libopenblas.so.0",
    "probe": ProbeReport("Device(cpu, 0)", "Xeon", None, 120.0),
}


def judged(**changes: Any) -> list[Finding]:
    return findings(msgspec.structs.replace(HEALTHY, **changes))


def test_commands_are_about_the_home_that_was_looked_at() -> None:
    found = judged(home_option=" --home /x", home_mode=None, models=[], open_files=256)
    told = {finding.name: f"{finding.summary} {finding.advice}" for finding in found}
    assert "`mlxpool up --home /x` makes it" in told["home"]
    assert "`mlxpool pull starter --home /x` fetches" in told["models"]
    assert "before `mlxpool up --home /x`" in told["files"]


def test_a_healthy_machine_is_told_line_by_line() -> None:
    assert [(found.name, found.status, found.summary, found.advice) for found in judged()] == [
        ("python", "ok", "3.12.1, Darwin arm64", ""),
        ("backend", "ok", "metal on Apple M3 Max (mlx 0.32.4, mlx-metal 0.32.4, mlx-lm 0.32.2)", ""),
        ("memory", "ok", "48.0 GB for models, of 64.0 GB; 50.0 GB not used by other programs", ""),
        ("home", "ok", "/home/ann/.mlxpool (mode 0700)", ""),
        ("config", "ok", "/home/ann/.mlxpool/config.toml", ""),
        ("room", "ok", "200.0 GB free for /home/ann/.mlxpool", ""),
        ("disk", "ok", "reads 5.0 GB/s, writes 2.0 GB/s", ""),
        ("port", "ok", "127.0.0.1:8420 is free", ""),
        ("service", "ok", "running (launchd), pid 42", ""),
        ("files", "ok", "8192 at most in this shell", ""),
        ("models", "ok", "2 models, and each fits", ""),
    ]


@pytest.mark.parametrize(
    ("changes", "name", "status", "summary", "advice"),
    [
        ({"chip": "x86_64"}, "python", "fail", "3.12.1, Darwin x86_64", "an arm64 Python"),
        (
            {"backend": "none", "versions": {"mlx": "0.32.4"}, "probe": None},
            *("backend", "fail", "none (mlx 0.32.4)", "install mlxpool[cpu] or, with an NVIDIA GPU"),
        ),
        ({"versions": {"mlx": "1"}}, "backend", "fail", "metal (mlx 1)", "install mlx-lm"),
        (
            {"backend": "cuda", "probe": None, "probe_fault": "RuntimeError: no device"},
            *("backend", "fail", "cuda does not work: RuntimeError: no device", "nvidia-smi"),
        ),
        (CPU, "blas", "ok", "/lib/libopenblas.so.0, 120 GFLOP/s", ""),
        (
            {**CPU, "openblas": None, "probe": ProbeReport("cpu", "Xeon", None, 2.4)},
            *("blas", "warn", "the reference one of MLX, 2 GFLOP/s", "apt-get install libopenblas0-pthread"),
        ),
        (
            {**CPU, "probe": ProbeReport("cpu", "Xeon", None, 9.0)},
            *("blas", "warn", "/lib/libopenblas.so.0, 9 GFLOP/s", "busy, or a thread count set?"),
        ),
        (
            {"budget": Budget(65 * GB)},
            "memory",
            "fail",
            "65.0 GB for models, of 64.0 GB",
            "lower [pool] memory_budget",
        ),
        (
            {"budget": Budget(50 * GB)},
            *("memory", "warn", "the GPU recommends 48.0 GB at most", '[pool] memory_budget = "48GB"'),
        ),
        (
            {"budget": Budget(48 * GB, 8 * GB)},
            *("memory", "ok", "40.0 GB for models and 8.0 GB for their prompts, of 64.0 GB", ""),
        ),
        ({"memory_available": 20 * GB}, "memory", "warn", "20.0 GB not used", "end other programs"),
        (
            {"memory_available": 20 * GB, "running": Running(7, "http://127.0.0.1:8420", 40 * GB)},
            *("memory", "ok", "60.0 GB not used by other programs", ""),
        ),
        ({"home_writable": False}, "home", "fail", "/home/ann/.mlxpool can't be written", "--home"),
        ({"home_mode": 0o775}, "home", "warn", "(mode 0775)", "chmod go-w /home/ann/.mlxpool"),
        ({"home_mode": None}, "home", "ok", "not there yet: `mlxpool up` makes it", ""),
        ({"config_mode": 0o644}, "config", "warn", "others can read it (mode 0644)", "chmod 600 /home/ann/"),
        ({"config_mode": 0o644, "has_keys": False}, "config", "ok", "config.toml", ""),
        ({"config": None}, "config", "ok", "no config file: the defaults", ""),
        ({"disk_free": 10**8}, "room", "fail", "100.0 MB free", "make room"),
        ({"disk_free": 5 * GB}, "room", "warn", "5.0 GB free", "another disk with --home"),
        ({"disk_rate": Rate(2e9, 1e8)}, "disk", "warn", "reads 100.0 MB/s", "a faster disk"),
        ({"disk_rate": Rate(2e7, 5e9)}, "disk", "warn", "writes 20.0 MB/s", "a faster disk"),
        (
            {"port_state": "taken"},
            *("port", "fail", "127.0.0.1:8420 is taken by another program", "`lsof -i :8420` names it"),
        ),
        (
            {"port_state": "unusable", "port_fault": "Permission denied", "port": 80},
            *("port", "fail", "127.0.0.1:80: Permission denied", "set another [server] host or port"),
        ),
        (
            {"port_state": "ours", "running": Running(7, "http://127.0.0.1:8420", 0)},
            *("port", "ok", "served at http://127.0.0.1:8420 (pid 7)", ""),
        ),
        (
            {"port_state": "ours", "running": Running(7, "http://127.0.0.1:8420", 0, answers=False)},
            *("port", "fail", "http://127.0.0.1:8420 (pid 7) does not answer", "kill -9 7"),
        ),
        ({"service": Status("absent")}, "service", "ok", "not installed", ""),
        (
            {"service_lack": "its program /opt/x is gone"},
            *("service", "warn", "its program /opt/x is gone", "`mlxpool service install` again"),
        ),
        (
            {"service": Status("failed", None, 2)},
            *("service", "fail", "failed (launchd), exit code 2", "its settings are bad: mend them"),
        ),
        ({"service": Status("failed", None, 1)}, "service", "fail", "exit code 1", "shows its last words"),
        ({"service": Status("unknown", detail="no bus")}, "service", "warn", "no bus", "logged in?"),
        ({"service": Status("stopped")}, "service", "warn", "stopped", "`mlxpool service restart`"),
        ({"open_files": 256}, "files", "warn", "256 at most in this shell", "`ulimit -n 8192`"),
        ({"open_files": 64, "open_files_lack": "too few"}, "files", "fail", "64 at most", "too few"),
        ({"open_files": 2**63 - 1}, "files", "ok", "no limit", ""),
        ({"models": []}, "models", "warn", "none on this machine", "`mlxpool pull starter`"),
        (
            {"models": [ModelFact("a", "config.json: not JSON", None)]},
            *("models", "warn", "a is broken: config.json: not JSON", "fetch it again or remove it"),
        ),
        (
            {
                "models": [
                    ModelFact(
                        "a",
                        None,
                        plan("does_not_fit", limit_bytes=7 * GB, short_by_bytes=GB, fitting_context=512),
                    )
                ]
            },
            *("models", "warn", "a does not fit in 7.0 GB by 1.0 GB", '[models."a"] context = 512'),
        ),
        (
            {"models": [ModelFact("a", None, plan("does_not_fit", limit_bytes=GB, short_by_bytes=7 * GB))]},
            *("models", "warn", "a does not fit in 1.0 GB by 7.0 GB", "a smaller quantisation"),
        ),
        (
            {"models": [ModelFact("a", None, plan(asked_context=99999))]},
            *("models", "warn", "99999 was asked for", '[models."a"] context no higher'),
        ),
        ({"models": [ModelFact("a", None, plan())]}, "models", "ok", "1 model, and it fits", ""),
        ({"shadowed": [Path("/m/a")]}, "models", "warn", "/m/a is not served", "rename it"),
    ],
)
def test_each_fact_is_judged_by_itself(
    changes: dict[str, Any], name: str, status: str, summary: str, advice: str
) -> None:
    found = [finding for finding in judged(**changes) if finding.name == name]
    matching = [finding for finding in found if summary in finding.summary]
    assert [(finding.status, advice in finding.advice) for finding in matching] == [(status, True)], found
    assert all(finding.advice for finding in judged(**changes) if finding.status != "ok")
    assert advice or not matching[0].advice


def doctor(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLXPOOL_")}
    return subprocess.run(
        [sys.executable, "-m", "mlxpool.parent", "doctor", "--home", str(home), *arguments],
        env={**environment, "HOME": str(home.parent), "XDG_CONFIG_HOME": str(home.parent), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_whole_look_finds_what_is_wrong_here(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_model(home / "models" / "good")
    broken = write_model(home / "models" / "broken")
    (broken / "model.safetensors").write_bytes(b"short")
    config = home / "config.toml"
    config.write_text('[server]\napi_keys = ["sk-1"]\n')
    config.chmod(0o644)
    home.chmod(0o777)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ended = doctor(home, "--port", port, "--json")
    assert ended.stderr == ""
    told = json.loads(ended.stdout)
    assert (ended.returncode, told["ok"]) == (1, False)
    checks = {check["name"]: check for check in told["checks"]}
    assert [name for name, check in checks.items() if check["status"] == "fail"] == ["port"]
    assert checks["port"]["summary"] == f"127.0.0.1:{port} is taken by another program"
    assert checks["backend"]["status"] == "ok"
    assert checks["home"]["advice"] == f"chmod go-w {home}"
    assert checks["config"]["advice"] == f"chmod 600 {config}"
    assert "sk-1" not in ended.stdout
    assert checks["models"]["summary"].startswith("broken is broken: model.safetensors: ")
    assert checks["disk"]["summary"].startswith("reads ")
    assert sorted(path.name for path in home.iterdir()) == ["config.toml", "models"], "nothing is left behind"


def test_a_look_at_a_home_that_is_not_there_makes_none(tmp_path: Path) -> None:
    ended = doctor(tmp_path / "home", "--port", "0")
    assert ended.returncode == 0, ended.stdout
    lines = [line.split(maxsplit=2) for line in ended.stdout.splitlines()]
    assert [
        "ok",
        "home",
        f"{tmp_path}/home, not there yet: `mlxpool up --home {tmp_path}/home` makes it",
    ] in lines
    assert ["warn", "models", "none on this machine"] in lines
    assert ["→", "`mlxpool", f"pull starter --home {tmp_path}/home` fetches a small one"] in lines
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_hangs_is_found(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write_address(home, Address(os.getpid(), 1e12, "127.0.0.1", 1))
    told = json.loads(doctor(home, "--port", "1", "--json").stdout)
    port = next(check for check in told["checks"] if check["name"] == "port")
    assert port["status"] == "fail"
    assert port["summary"] == f"the server at http://127.0.0.1:1 (pid {os.getpid()}) does not answer"


def test_bad_settings_are_told_as_every_command_tells_them(tmp_path: Path) -> None:
    ended = doctor(tmp_path / "home", "--port", "x")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "mlxpool: command line: --port = 'x': use a whole number from 0 to 65535\n"
