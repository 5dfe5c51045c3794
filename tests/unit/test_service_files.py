"""The two service files: every key, every promise, and names that would break a careless writer."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlxpool.parent.service import launchd, systemd
from mlxpool.parent.service.launchctl import read_print
from mlxpool.parent.service.manager import Status
from mlxpool.parent.service.spec import Installed, ServiceError, Spec, make_spec, program
from mlxpool.parent.service.systemctl import read_show

HOME = Path("/home/ann/.mlxpool")
# What a path or a model's name may hold, each of it special to a unit file, a shell or XML.
AWKWARD = r"""a b%h $HOME ${X} "q" 'q' \n;#<&>é*"""


def spec(*options: str, drain_timeout_s: float = 120.0, home: Path = HOME, **environment: str) -> Spec:
    return make_spec(
        ["/opt/bin/mlxpool"],
        options,
        home=home,
        environment=environment,
        drain_timeout_s=drain_timeout_s,
    )


ARGV = [
    *["/opt/bin/mlxpool", "up", "--home", "/home/ann/.mlxpool", "--port", "9000"],
    *["--log-file", "/home/ann/.mlxpool/logs/parent.log"],
]


def test_the_launch_agent_has_these_keys_and_no_others() -> None:
    made = plistlib.loads(launchd.render(spec("--port", "9000", MLXPOOL_POOL_IDLE_TTL="5m", PATH="/bin")))
    log = "/home/ann/.mlxpool/logs/parent.log"
    assert made == {
        "Label": "local.mlxpool",
        "ProgramArguments": ARGV,
        "EnvironmentVariables": {"MLXPOOL_POOL_IDLE_TTL": "5m"},
        "WorkingDirectory": "/home/ann/.mlxpool",
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 30,
        "ExitTimeOut": 150,
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
        "SoftResourceLimits": {"NumberOfFiles": 8192},
        "Umask": 0o077,
    }


def test_the_unit_has_these_keys_and_no_others() -> None:
    made = read_unit(systemd.render(spec("--port", "9000", MLXPOOL_POOL_IDLE_TTL="5m", PATH="/bin")))
    assert words(made["Service"].pop("ExecStart")) == ARGV
    assert made == {
        "Unit": {
            "Description": "mlxpool, language models behind one port",
            "StartLimitIntervalSec": "600",
            "StartLimitBurst": "20",
        },
        "Service": {
            "Type": "exec",
            "ExecReload": "/bin/kill -HUP $MAINPID",
            "Environment": '"MLXPOOL_POOL_IDLE_TTL=5m"',
            "WorkingDirectory": "-/home/ann/.mlxpool",
            "UMask": "0077",
            "LimitNOFILE": "8192",
            "Restart": "on-failure",
            "RestartSec": "5",
            "RestartPreventExitStatus": "2",
            "KillMode": "mixed",
            "TimeoutStopSec": "150",
            "OOMPolicy": "continue",
            "NoNewPrivileges": "yes",
            "LockPersonality": "yes",
            "RestrictNamespaces": "yes",
            "RestrictSUIDSGID": "yes",
        },
        "Install": {"WantedBy": "default.target"},
    }


@pytest.mark.parametrize(("drain_s", "stop_s"), [(0.0, 30), (120.0, 150), (599.2, 630)])
def test_a_manager_kills_only_after_the_drain(drain_s: float, stop_s: int) -> None:
    made = spec(drain_timeout_s=drain_s)
    assert plistlib.loads(launchd.render(made))["ExitTimeOut"] == stop_s
    assert read_unit(systemd.render(made))["Service"]["TimeoutStopSec"] == str(stop_s)


@pytest.mark.parametrize("writer", [launchd, systemd])
def test_awkward_names_arrive_as_they_are(writer: object) -> None:
    made = spec("--model", AWKWARD, home=Path("/tmp") / AWKWARD, MLXPOOL_DEFAULTS_MODEL=AWKWARD)
    if writer is launchd:
        read = plistlib.loads(launchd.render(made))
        argv, environment = read["ProgramArguments"], read["EnvironmentVariables"]
        assert launchd.read(launchd.render(made)) == Installed(made.argv, 150)
    else:
        service = read_unit(systemd.render(made))["Service"]
        argv = words(service["ExecStart"])
        environment = dict([words(service["Environment"])[0].split("=", 1)])
        assert systemd.read(systemd.render(made)) == Installed(made.argv, 150)
    assert argv[argv.index("--model") + 1] == AWKWARD
    assert argv[argv.index("--home") + 1] == f"/tmp/{AWKWARD}"
    assert environment == {"MLXPOOL_DEFAULTS_MODEL": AWKWARD}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not on this machine")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    folder = tmp_path / "a b%h $HOME"
    folder.mkdir()
    script = folder / "mlxpool"
    script.symlink_to("/bin/true")
    home = tmp_path / AWKWARD
    made = make_spec(
        [str(script)],
        ["--model", AWKWARD],
        home=home,
        environment={"MLXPOOL_DEFAULTS_MODEL": AWKWARD},
        drain_timeout_s=120,
    )
    assert verify(tmp_path, systemd.render(made)) == (0, "")
    # It does look: at the program, and at each key.
    script.unlink()
    assert "is not executable" in verify(tmp_path, systemd.render(made))[1]
    assert (
        "Failed to parse OOM policy"
        in verify(tmp_path, systemd.render(made).replace(b"=continue", b"=perhaps"))[1]
    )


def verify(folder: Path, unit: bytes) -> tuple[int, str]:
    path = folder / "mlxpool.service"
    path.write_bytes(unit)
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(path)],
        env={"XDG_RUNTIME_DIR": str(folder), "HOME": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def read_unit(content: bytes) -> dict[str, dict[str, str]]:
    """A unit file, read strictly: known line forms alone, no key twice."""
    sections: dict[str, dict[str, str]] = {}
    for line in content.decode().splitlines():
        if not line or line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = sections.setdefault(header[1], {})
            continue
        key = re.fullmatch(r"([A-Za-z]+)=(.+)", line)
        assert key is not None, line
        assert key[1] not in section, f"{key[1]} twice"
        section[key[1]] = key[2]
    return sections


def words(value: str) -> list[str]:
    """The words of a unit file's line, as systemd.syntax(7) says: double quotes, backslashes, %%."""
    found, word, quoted, at = [], "", False, 0
    value = value.removeprefix(":")
    while at < len(value):
        mark = value[at]
        if mark == '"':
            quoted = not quoted
        elif mark == "\\":
            at += 1
            assert value[at] in '\\"', "another escape would mean another character"
            word += value[at]
        elif mark == "%":
            at += 1
            assert value[at] == "%", "a specifier"
            word += "%"
        elif mark == " " and not quoted:
            found.append(word)
            word = ""
        else:
            word += mark
        at += 1
    assert not quoted
    return [*found, word]


def test_only_what_the_server_reads_is_carried_and_a_secret_is_refused() -> None:
    made = spec(
        MLXPOOL_HOME="/elsewhere",
        MLXPOOL_POOL_IDLE_TTL="5m",
        HF_HOME="/models/hub",
        HF_TOKEN="hf_secret",
        HTTPS_PROXY="http://me:secret@proxy",
        MLXPOOL_SERVER_API_KEYS="",
    )
    assert made.environment == {"HF_HOME": "/models/hub", "MLXPOOL_POOL_IDLE_TTL": "5m"}
    with pytest.raises(ServiceError) as refused:
        spec(MLXPOOL_SERVER_API_KEYS="sk-secret")
    assert str(refused.value) == (
        "MLXPOOL_SERVER_API_KEYS is set, and a secret is not written into a service file; "
        "move the keys to [server] api_keys of config.toml and unset it"
    )


@pytest.mark.parametrize("text", ["a\nb", "a\x1bb", "a\udcffb"])
def test_text_that_no_file_can_hold_is_refused(text: str) -> None:
    with pytest.raises(ServiceError, match="no service file can hold "):
        spec("--model", text)
    with pytest.raises(ServiceError, match="no service file can hold "):
        spec(MLXPOOL_DEFAULTS_MODEL=text)


def test_a_program_that_systemd_would_refuse_is_refused_before() -> None:
    made = make_spec(["/opt/it's/mlxpool"], [], home=HOME, environment={}, drain_timeout_s=1)
    with pytest.raises(ServiceError, match="install mlxpool in another folder"):
        systemd.render(made)
    assert plistlib.loads(launchd.render(made))["ProgramArguments"][0] == "/opt/it's/mlxpool"


def test_the_program_is_the_path_that_survives_an_upgrade(tmp_path: Path) -> None:
    cellar = tmp_path / "Cellar/mlxpool/0.1.0/libexec/bin"
    cellar.mkdir(parents=True)
    python = str(cellar / "python3")
    assert program(python, None) == (python, "-m", "mlxpool.parent")
    (cellar / "mlxpool").touch()
    assert program(python, None) == (str(cellar / "mlxpool"),)
    stable = tmp_path / "bin/mlxpool"
    stable.parent.mkdir()
    stable.symlink_to(cellar / "mlxpool")
    assert program(python, str(stable)) == (str(stable),)
    other = tmp_path / "mlxpool"
    other.touch()
    assert program(python, str(other)) == (str(cellar / "mlxpool"),), "another installation's script"


def test_an_installed_file_tells_when_it_is_out_of_date(tmp_path: Path) -> None:
    script = tmp_path / "mlxpool"
    script.touch()
    found = Installed((str(script), "up", "--home", "/h", "--log-file", "/h/l", "--config", "/c.toml"), 150)
    assert (found.home, found.log, found.config) == (Path("/h"), Path("/h/l"), Path("/c.toml"))
    assert found.lack(120.0) is None
    assert found.lack(600.0) == "it is killed 150 s after a stop, and drain_timeout is 10m now"
    script.unlink()
    assert found.lack(120.0) == f"its program {script} is gone"


@pytest.mark.parametrize("read", [launchd.read, systemd.read])
@pytest.mark.parametrize("content", [b"", b"[Service]\nExecStart=/bin/true\n", b"<plist><dict/></plist>"])
def test_a_file_that_is_not_ours_is_said_to_be_none(read: object, content: bytes) -> None:
    assert callable(read)
    with pytest.raises(ServiceError, match="write it anew with `mlxpool service install`"):
        read(content)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (
            "ActiveState=active\nMainPID=42\nExecMainCode=0\nExecMainStatus=0\nResult=success\n",
            Status("running", 42),
        ),
        (
            "ActiveState=deactivating\nMainPID=42\nExecMainCode=0\nExecMainStatus=0\nResult=success\n",
            Status("running", 42, detail="deactivating"),
        ),
        (
            "ActiveState=failed\nMainPID=0\nExecMainCode=1\nExecMainStatus=2\nResult=exit-code\n",
            Status("failed", None, 2),
        ),
        (
            "ActiveState=failed\nMainPID=0\nExecMainCode=1\nExecMainStatus=1\nResult=start-limit-hit\n",
            Status("failed", None, 1, "failed too often to be tried again"),
        ),
        (
            "ActiveState=activating\nMainPID=0\nExecMainCode=2\nExecMainStatus=9\nResult=signal\n",
            Status("failed", None, None, "ended by signal 9"),
        ),
        (
            "ActiveState=activating\nMainPID=42\nExecMainCode=0\nExecMainStatus=0\nResult=success\n",
            Status("stopped", 42, None, "starting"),
        ),
        (
            "ActiveState=inactive\nMainPID=0\nExecMainCode=1\nExecMainStatus=0\nResult=success\n",
            Status("stopped", None, 0),
        ),
        ("", Status("unknown", detail="systemd says ''")),
    ],
)
def test_what_systemctl_shows_becomes_a_status(said: str, status: Status) -> None:
    assert read_show(said) == status


def printed(*lines: str) -> str:
    """As launchctl prints: the service's own lines one tab deep, those of what belongs to it deeper."""
    inner = "\tenvironment = {\n\t\tpid = 7\n\t}\n"
    return "gui/501/local.mlxpool = {\n" + "".join(f"\t{line}\n" for line in lines) + inner + "}\n"


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (
            printed("state = running", "runs = 1", "pid = 42", "last exit code = (never exited)"),
            Status("running", 42),
        ),
        (printed("state = not running", "last exit code = 0"), Status("stopped", None, 0)),
        (printed("state = spawn scheduled", "last exit code = 2"), Status("failed", None, 2)),
        (
            printed("state = spawn scheduled", "last terminating signal = Killed: 9"),
            Status("failed", None, None, "ended by signal Killed: 9"),
        ),
        (printed("state = not running", "last exit code = (never exited)"), Status("stopped")),
    ],
)
def test_what_launchctl_prints_becomes_a_status(said: str, status: Status) -> None:
    assert read_print(said) == status
