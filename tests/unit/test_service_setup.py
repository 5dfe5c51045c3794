"""`mlxpool service` against stand-ins of launchctl and systemctl that record what they are asked.

The stand-ins are shell scripts found on PATH, as the real ones are; that of launchctl remembers whether the
service is loaded, because what is asked of it depends on that.
"""

from __future__ import annotations

import json
import os
import plistlib
import sys
from pathlib import Path

import pytest

from mlxpool.parent.cli import main
from mlxpool.parent.run_folder import Address, write_address

SYSTEMCTL = """#!/bin/sh
echo "systemctl $*" >>"$FAKE/calls"
for word; do
  [ ! -f "$FAKE/$word.says" ] || cat "$FAKE/$word.says"
  [ ! -f "$FAKE/$word.fails" ] || { cat "$FAKE/$word.fails" >&2; exit 1; }
done
"""
LAUNCHCTL = """#!/bin/sh
[ "$1" = print ] || echo "launchctl $*" >>"$FAKE/calls"
[ ! -f "$FAKE/$1.fails" ] || { cat "$FAKE/$1.fails" >&2; exit 5; }
case "$1" in
  print) cat "$FAKE/loaded" 2>/dev/null || exit 113 ;;
  bootstrap | kickstart) printf '\\tstate = running\\n\\tpid = 42\\n' >"$FAKE/loaded" ;;
  kill) printf '\\tstate = not running\\n\\tlast exit code = 0\\n' >"$FAKE/loaded" ;;
  bootout) rm "$FAKE/loaded"; exit 36 ;;
esac
"""


class Machine:
    """A user's HOME with a service manager, and the `mlxpool` command in it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
        self.home, self.fake = root / "user", root / "fake"
        self.data = self.home / ".mlxpool"
        self.plist = self.home / "Library/LaunchAgents/local.mlxpool.plist"
        self.unit = self.home / ".config/systemd/user/mlxpool.service"
        self._monkeypatch, self._capfd = monkeypatch, capfd
        for folder in (self.home, self.fake):
            folder.mkdir()
        for name, script in (("systemctl", SYSTEMCTL), ("launchctl", LAUNCHCTL)):
            (self.fake / name).write_text(script)
            (self.fake / name).chmod(0o755)
        for name in [name for name in os.environ if name.startswith(("MLXPOOL_", "XDG_", "HF_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(self.home))
        monkeypatch.setenv("FAKE", str(self.fake))
        monkeypatch.setenv("PATH", f"{self.fake}:/usr/bin:/bin")

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `mlxpool service …`."""
        self._monkeypatch.setattr(sys, "argv", ["mlxpool", "service", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return (ended.value.code, *self._capfd.readouterr())

    def calls(self) -> list[str]:
        """What the managers were asked since the last look, questions about state aside."""
        path = self.fake / "calls"
        asked = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in asked if " show " not in line]

    def left(self) -> list[str]:
        """Everything below HOME."""
        return sorted(str(path.relative_to(self.home)) for path in self.home.rglob("*"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Machine:
    return Machine(tmp_path, monkeypatch, capfd)


AGENT = f"gui/{os.getuid()}/local.mlxpool"


def test_a_unit_is_installed_exactly_and_uninstalled_without_a_trace(machine: Machine) -> None:
    code, out, err = machine("install", "--systemd", "--no-wait", "--port", "9000")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"installed {machine.unit}"
    assert machine.calls() == [
        "systemctl --user daemon-reload",
        "systemctl --user enable mlxpool.service",
        "systemctl --user reset-failed mlxpool.service",
        "systemctl --user restart mlxpool.service",
    ]
    assert machine.left() == [
        *[".config", ".config/systemd", ".config/systemd/user", ".config/systemd/user/mlxpool.service"],
        *[".mlxpool", ".mlxpool/logs"],
    ]
    assert machine("print", "--systemd", "--port", "9000") == (0, machine.unit.read_text(), "")
    assert f'"--home" "{machine.data}" "--port" "9000" "--log-file"' in machine.unit.read_text()
    assert machine("uninstall", "--systemd") == (0, f"removed {machine.unit}\n", "")
    assert machine.calls() == [
        "systemctl --user disable --now mlxpool.service",
        "systemctl --user daemon-reload",
        "systemctl --user reset-failed mlxpool.service",
    ]
    assert machine.left() == []


def test_an_agent_is_installed_exactly_and_uninstalled_without_a_trace(machine: Machine) -> None:
    (machine.home / "Library/LaunchAgents").mkdir(parents=True)
    (machine.home / "Library/LaunchAgents/other.plist").touch()
    before = machine.left()
    assert machine("install", "--launchd", "--no-wait", "--port", "9000") == (
        0,
        f"installed {machine.plist}\n",
        "",
    )
    assert machine.calls() == [f"launchctl enable {AGENT}", f"launchctl bootstrap {domain()} {machine.plist}"]
    assert sorted(set(machine.left()) - set(before)) == [
        *[".mlxpool", ".mlxpool/logs", "Library/LaunchAgents/local.mlxpool.plist"],
    ]
    assert machine("print", "--launchd", "--port", "9000")[1] == machine.plist.read_text()
    argv = plistlib.loads(machine.plist.read_bytes())["ProgramArguments"]
    assert argv[-7:] == [
        *["up", "--home", str(machine.data), "--port", "9000"],
        *["--log-file", str(machine.data / "logs/parent.log")],
    ]
    assert machine("uninstall", "--launchd") == (0, f"removed {machine.plist}\n", "")
    assert machine.calls() == [f"launchctl bootout {AGENT}"]
    assert machine.left() == before


def domain() -> str:
    return AGENT.rpartition("/")[0]


def test_options_of_up_are_baked_in_with_absolute_paths(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("models", "data"):
        (machine.home / folder).mkdir()
    (machine.home / "my.toml").write_text('[server]\napi_keys = ["sk-secret"]\n')
    monkeypatch.chdir(machine.home)
    given = ["--config", "my.toml", "--home", "data", "--models", "models", "--host", "0.0.0.0"]
    code, out, _ = machine("print", "--launchd", *given, "--memory-budget", "50%", "--model", "m")
    assert code == 0
    assert "sk-secret" not in out
    made = plistlib.loads(out.encode())
    assert made["ProgramArguments"][-15:] == [
        *["up", "--home", str(machine.home / "data"), "--config", str(machine.home / "my.toml")],
        *["--host", "0.0.0.0", "--memory-budget", "50%", "--model", "m"],
        *["--models", str(machine.home / "models")],
        *["--log-file", str(machine.home / "data/logs/parent.log")],
    ]


@pytest.mark.parametrize("manager", ["--launchd", "--systemd"])
def test_an_install_that_the_manager_refuses_leaves_nothing(machine: Machine, manager: str) -> None:
    for verb in ("bootstrap", "daemon-reload"):
        (machine.fake / f"{verb}.fails").write_text("no session\n")
    code, out, err = machine("install", manager)
    assert (code, out) == (1, "")
    assert err.startswith("mlxpool: nothing was installed: ")
    assert "no session" in err
    assert err.count("\n") == 1
    assert machine.left() == []


def test_a_second_install_replaces_and_a_refused_one_puts_the_first_back(machine: Machine) -> None:
    machine("install", "--systemd", "--no-wait", "--port", "9000")
    first = machine.unit.read_bytes()
    (machine.fake / "restart.fails").write_text("no such port\n")
    assert machine("install", "--systemd", "--no-wait", "--port", "9001")[0] == 1
    assert machine.unit.read_bytes() == first
    (machine.fake / "restart.fails").unlink()
    assert machine("install", "--systemd", "--no-wait", "--port", "9001")[0] == 0
    assert '"--port" "9001"' in machine.unit.read_text()


def test_a_loaded_agent_is_ended_before_the_new_one_begins(machine: Machine) -> None:
    machine("install", "--launchd", "--no-wait")
    machine.calls()
    machine("install", "--launchd", "--no-wait")
    assert machine.calls() == [
        f"launchctl bootout {AGENT}",
        f"launchctl enable {AGENT}",
        f"launchctl bootstrap {domain()} {machine.plist}",
    ]


def test_restart_lets_requests_end_under_launchd(machine: Machine) -> None:
    machine("install", "--launchd", "--no-wait")
    machine.calls()
    assert machine("restart", "--launchd", "--no-wait") == (0, "", "")
    assert machine.calls() == [f"launchctl kill SIGTERM {AGENT}", f"launchctl kickstart {AGENT}"]


def test_restart_forgets_used_up_tries_under_systemd(machine: Machine) -> None:
    machine("install", "--systemd", "--no-wait")
    machine.calls()
    assert machine("restart", "--systemd", "--no-wait") == (0, "", "")
    assert machine.calls() == [
        "systemctl --user reset-failed mlxpool.service",
        "systemctl --user restart mlxpool.service",
    ]


def test_a_running_service_is_left_alone_when_its_settings_are_bad(machine: Machine) -> None:
    machine("install", "--systemd", "--no-wait")
    machine.calls()
    (machine.data / "config.toml").write_text("[server]\nprot = 1\n")
    code, _, err = machine("restart", "--systemd")
    assert (code, err) == (
        2,
        f"mlxpool: {machine.data}/config.toml: unknown key server.prot; did you mean port?\n",
    )
    assert machine.calls() == []


def test_status_tells_state_file_and_log(machine: Machine) -> None:
    assert machine("status", "--systemd") == (1, f"no service is installed ({machine.unit})\n", "")
    machine("install", "--systemd", "--no-wait")
    (machine.fake / "show.says").write_text("ActiveState=active\nMainPID=42\n")
    code, out, _ = machine("status", "--systemd")
    assert (code, out) == (
        0,
        f"service  running, pid 42\nmanager  systemd, {machine.unit}\n"
        f"home     {machine.data}\nlog      {machine.data}/logs/parent.log\n",
    )
    (machine.fake / "show.says").write_text("ActiveState=failed\nExecMainCode=1\nExecMainStatus=2\n")
    (machine.data / "logs/parent.log").write_text("mlxpool: unknown key server.prot\n\n")
    code, out, _ = machine("status", "--systemd")
    assert code == 1
    assert out.startswith("service  failed, exit code 2\n")
    assert out.endswith("\n         mlxpool: unknown key server.prot\n")
    code, out, _ = machine("status", "--systemd", "--json")
    assert code == 1
    assert json.loads(out) == {
        "manager": "systemd",
        "state": "failed",
        "pid": None,
        "exit_code": 2,
        "detail": "",
        "file": str(machine.unit),
        "home": str(machine.data),
        "log": str(machine.data / "logs/parent.log"),
    }


def test_an_install_that_comes_up_failing_says_its_last_words(machine: Machine) -> None:
    (machine.fake / "show.says").write_text("ActiveState=failed\nExecMainCode=1\nExecMainStatus=1\n")
    (machine.data / "logs").mkdir(parents=True)
    (machine.data / "logs/parent.log").write_text("mlxpool: can't listen on 127.0.0.1:8420\n")
    code, out, err = machine("install", "--systemd")
    assert (code, out) == (1, f"installed {machine.unit}\n")
    assert err == (
        "mlxpool: the service is installed and fails (failed, exit code 1): "
        "mlxpool: can't listen on 127.0.0.1:8420\n"
    )


def test_a_server_in_the_foreground_is_in_the_way(machine: Machine) -> None:
    machine.data.mkdir()
    write_address(machine.data, Address(os.getpid(), 1e12, "127.0.0.1", 1))
    code, _, err = machine("install", "--systemd")
    assert (code, err) == (
        1,
        f"mlxpool: a server that is not the service runs for {machine.data} (pid {os.getpid()}); "
        "`mlxpool down` stops it\n",
    )
    assert machine.calls() == []


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--port", "0"], {}, "port 0 would give the service another port at each start"),
        (["--port", "x"], {}, "command line: --port = 'x': use a whole number from 0 to 65535"),
        ([], {"MLXPOOL_SERVER_API_KEYS": "sk-1"}, "a secret is not written into a service file"),
    ],
)
def test_what_could_not_serve_is_not_installed(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variables: dict[str, str],
    said: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, err = machine("install", "--systemd", *arguments)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert (machine.left(), machine.calls()) == ([], [])


def test_without_the_managers_program_the_way_out_is_said(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(machine.home))
    code, _, err = machine("install", "--launchd")
    assert code == 1
    assert "launchctl is not on this machine; `mlxpool service print` shows" in err
    assert machine.left() == []


def test_uninstall_and_restart_without_a_service_say_so(machine: Machine) -> None:
    assert machine("uninstall", "--systemd") == (0, f"no service is installed ({machine.unit})\n", "")
    code, _, err = machine("restart", "--systemd")
    assert code == 1
    assert err == (
        f"mlxpool: no service is installed ({machine.unit}); `mlxpool service install` installs one\n"
    )
