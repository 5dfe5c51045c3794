"""What a service manager would do with the files: run the command as it is written, and stop it."""

from __future__ import annotations

import contextlib
import json
import os
import plistlib
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_service_files import read_unit, words

START_TIMEOUT_S = 60.0
MLXPOOL = [sys.executable, "-m", "mlxpool.parent"]


class Service:
    """The command of a service file and what the manager gives it: nearly no environment, another folder."""

    def __init__(self, kind: str, home: Path, port: int) -> None:
        self.home, self.port = home, port
        printed = subprocess.run(
            [*MLXPOOL, "service", "print", f"--{kind}", "--home", str(home), "--port", str(port)],
            env={**self.manager_environment(), "MLXPOOL_POOL_DRAIN_TIMEOUT": "5s"},
            capture_output=True,
            check=True,
        ).stdout
        if kind == "launchd":
            made = plistlib.loads(printed)
            self.argv, self.folder = made["ProgramArguments"], made["WorkingDirectory"]
            self.given, self.out = made["EnvironmentVariables"], Path(made["StandardErrorPath"])
        else:
            unit = read_unit(printed)["Service"]
            self.argv, self.folder = words(unit["ExecStart"]), unit["WorkingDirectory"][1:].replace("%%", "%")
            self.given = dict([words(unit["Environment"])[0].split("=", 1)])
            self.out = home.parent / "journal"
        self.log = home / "logs" / "parent.log"

    def manager_environment(self) -> dict[str, str]:
        return {"HOME": str(self.home.parent), "PATH": "/usr/bin:/bin"}

    def start(self) -> subprocess.Popen[bytes]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("ab") as out:
            return subprocess.Popen(
                self.argv,
                cwd=self.folder,
                env={**self.manager_environment(), **self.given},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                umask=0o077,
            )

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        process = self.start()
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def get(self, path: str) -> Any:
        """Ask until it answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                    return json.loads(answer.read())
            except OSError:
                assert time.monotonic() < deadline, self.out.read_text()
                time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("kind", ["launchd", "systemd"])
def test_the_command_as_written_serves_and_ends_with_0_on_sigterm(tmp_path: Path, kind: str) -> None:
    service = Service(kind, tmp_path / 'a "home" of $5%', free_port())
    assert service.given == {"MLXPOOL_POOL_DRAIN_TIMEOUT": "5s"}
    with service.running() as process:
        listing = service.get("/v1/models")
        assert (listing["object"], listing["data"]) == ("list", [])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    said = service.log.read_text()
    assert f"mlxpool serves on http://127.0.0.1:{service.port}\n" in said
    assert "SIGTERM: stopping\n" in said
    assert not (service.home / "up.json").exists()
    assert kind == "launchd" or service.out.read_bytes() == b""
    # The umask of both files: what the server makes is its user's alone.
    assert (service.home / "up.lock").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("kind", ["launchd", "systemd"])
def test_three_starts_with_a_bad_config_end_with_2_and_one_line_each(tmp_path: Path, kind: str) -> None:
    service = Service(kind, tmp_path / "home", free_port())
    service.home.mkdir()
    config = service.home / "config.toml"
    config.write_text("[server]\nprot = 1\n")
    for _ in range(3):
        with service.running() as process:
            assert process.wait(60) == 2
    line = f"mlxpool: {config}: unknown key server.prot; did you mean port?\n"
    assert service.log.read_text() == 3 * line
    assert kind == "launchd" or service.out.read_bytes() == b""


def test_an_installed_service_is_waited_for_until_it_serves(tmp_path: Path) -> None:
    """The stand-in of systemctl starts what the unit says, in its own session, as the manager would."""
    port = free_port()
    bin_folder, home = tmp_path / "bin", tmp_path / ".mlxpool"
    bin_folder.mkdir()
    service = Service("systemd", home, port)
    command = shlex.join(service.argv)
    (bin_folder / "systemctl").write_text(
        "#!/bin/sh\n"
        f'pid="{tmp_path}/pid"\n'
        'case "$*" in\n'
        f"  *\\ restart\\ *) {command} </dev/null >/dev/null 2>&1 & echo $! >$pid ;;\n"
        "  *disable*) kill $(cat $pid); while kill -0 $(cat $pid) 2>/dev/null; do sleep 0.05; done ;;\n"
        "  *show*) [ ! -f $pid ] || printf 'ActiveState=active\\nMainPID=%s\\n' $(cat $pid) ;;\n"
        "esac\n"
    )
    (bin_folder / "systemctl").chmod(0o755)
    env = {**service.manager_environment(), "PATH": f"{bin_folder}:{os.environ['PATH']}"}

    def mlxpool(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MLXPOOL, "service", *arguments, "--systemd"],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    try:
        installed = mlxpool("install", "--port", str(port))
        assert (installed.returncode, installed.stderr) == (0, "")
        assert installed.stdout.splitlines()[1] == (
            f"mlxpool serves on http://127.0.0.1:{port}; what it prints is in {service.log}"
        )
        status = mlxpool("status")
        assert status.returncode == 0
        assert status.stdout.startswith(f"service  running, pid {(tmp_path / 'pid').read_text().strip()}\n")
        assert service.get("/health")
    finally:
        removed = mlxpool("uninstall")
    assert removed.returncode == 0
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
    assert sorted(path.name for path in home.iterdir()) == ["logs", "run", "state.sqlite", "up.lock"]
    assert not (tmp_path / ".config").exists()
