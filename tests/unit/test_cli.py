"""The command line without a server: usage, exit codes, listings, and the line that says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxpool.parent.cli import COMMANDS, LATER_COMMANDS, main
from mlxpool.parent.cli.logs import _Tail
from mlxpool.parent.run_folder import Address, write_address
from tests.tools.model_folders import write_model


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


class Command:
    """Runs `mlxpool` in this process as its entry point does, with a home of its own."""

    def __init__(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        self.home = home
        self._monkeypatch, self._capfd = monkeypatch, capfd
        for name in [name for name in os.environ if name.startswith("MLXPOOL_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("MLXPOOL_HOME", str(home))

    def __call__(self, *arguments: str) -> Result:
        self._monkeypatch.setattr(sys, "argv", ["mlxpool", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, out, err)


@pytest.fixture
def mlxpool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    home = tmp_path / "home"
    home.mkdir()
    return Command(home, monkeypatch, capfd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats"], "no command 'stats'; did you mean status?"),
        (["zzz"], f"no command 'zzz'; known are {', '.join(COMMANDS)}"),
        (["up", "--prot", "1"], "No such option '--prot'. (Did you mean one of: '--host', '--port'?)"),
        (["up", "--port", "x"], "command line: --port = 'x': use a whole number from 0 to 65535"),
        (
            ["up", "--host", "0.0.0.0"],
            "command line: --host = '0.0.0.0': set server.api_keys too, or use a loopback address",
        ),
        (
            ["up", "--memory-budget", "much"],
            "command line: --memory-budget = 'much': not a size or a share: 'much'; "
            "use bytes, a size like 48GB or a share like 75%",
        ),
        (
            ["pull", "name"],
            "'name' is no model of the Hub; use org/name, like mlx-community/Qwen3-8B-4bit, or 'starter'",
        ),
        (["pull", "starter", "--revision", "x"], "the starter has no revisions; leave `revision` out"),
        (
            ["pull", "a/b", "--revision", "a..b"],
            "'a..b' is no revision; use a branch, a tag or a commit, like main",
        ),
        (["load"], "Missing argument 'MODEL'."),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(mlxpool: Command, arguments: list[str], message: str) -> None:
    result = mlxpool(*arguments)
    assert (result.code, result.out, result.err) == (2, "", f"mlxpool: {message}\n")


@pytest.mark.parametrize("name", sorted(LATER_COMMANDS))
def test_a_command_of_a_later_version_is_told_apart_from_a_typing_error(mlxpool: Command, name: str) -> None:
    result = mlxpool(name)
    assert (result.code, result.err) == (2, f"mlxpool: `mlxpool {name}` is not in this version yet\n")


# Not about one server by themselves: groups of commands, and text for a shell.
WITHOUT_A_HOME = {"cache", "colibri", "completion", "jobs", "service"}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself(mlxpool: Command, name: str) -> None:
    result = mlxpool(name, "--help")
    assert result.code == 0
    assert result.out.startswith(f"Usage: mlxpool {name} ")
    assert "--home" in result.out or name in WITHOUT_A_HOME


def test_help_lists_the_commands_and_the_exit_codes(mlxpool: Command) -> None:
    result = mlxpool("--help")
    assert result.code == 0
    assert all(f"\n  {name} " in result.out for name in COMMANDS)
    assert "0 done, 1 failed, 2 bad usage or settings, 130 interrupted" in result.out


def test_without_a_command_the_help_is_shown_as_bad_usage(mlxpool: Command) -> None:
    result = mlxpool()
    assert result.code == 2
    assert result.err.startswith("Usage: mlxpool ")


@pytest.mark.parametrize("command", ["up", "status", "models", "config", "run", "down"])
def test_a_bad_config_is_the_same_line_and_code_for_every_command(mlxpool: Command, command: str) -> None:
    (mlxpool.home / "config.toml").write_text("[pool]\nidle_tl = 3\n")
    result = mlxpool(command, *(["m", "hi"] if command == "run" else []))
    path = mlxpool.home / "config.toml"
    assert result.code == 2
    assert result.err == f"mlxpool: {path}: unknown key pool.idle_tl; did you mean idle_ttl?\n"


@pytest.mark.parametrize(
    "arguments",
    [["ps"], ["status"], ["load", "m"], ["unload", "m"], ["pin", "m"], ["unpin", "m"], ["run", "m", "hi"]],
)
def test_a_command_that_needs_a_server_says_that_there_is_none(
    mlxpool: Command, arguments: list[str]
) -> None:
    result = mlxpool(*arguments)
    assert result.code == 1
    assert result.out == ""
    assert result.err == f"mlxpool: no server is running for {mlxpool.home}; start one with `mlxpool up`\n"


def test_down_without_a_server_is_a_failure(mlxpool: Command) -> None:
    assert mlxpool("down").err == f"mlxpool: no server is running for {mlxpool.home}\n"


def test_status_as_json_says_so_without_an_error(mlxpool: Command) -> None:
    result = mlxpool("status", "--json")
    assert (result.code, json.loads(result.out)) == (1, {"running": False, "home": str(mlxpool.home)})


def test_an_address_whose_process_is_younger_is_not_believed(mlxpool: Command) -> None:
    # The pid is alive, it is ours; but the file was written long before this process began.
    write_address(mlxpool.home, Address(os.getpid(), 1000.0, "127.0.0.1", 1))
    assert mlxpool("ps").err.startswith("mlxpool: no server is running")
    assert mlxpool("down").code == 1


def test_a_process_that_does_not_answer_is_told_apart_from_none(mlxpool: Command) -> None:
    # Port 1 of loopback refuses; the process is this one.
    write_address(mlxpool.home, Address(os.getpid(), 1e12, "127.0.0.1", 1))
    result = mlxpool("ps")
    assert result.code == 1
    assert result.err.startswith("mlxpool: http://127.0.0.1:1 does not answer: ")


def test_models_tells_what_each_folder_needs_or_what_is_wrong_with_it(mlxpool: Command) -> None:
    write_model(mlxpool.home / "models" / "good")
    broken = write_model(mlxpool.home / "models" / "broken")
    (broken / "model.safetensors").write_bytes(b"short")
    result = mlxpool("models")
    assert result.code == 0
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0] == "MODEL STATE NEEDS CONTEXT VERDICT"
    assert lines[1] == (
        "broken absent - - broken: model.safetensors: no safetensors file, "
        "or cut short within its header: 5 bytes"
    )
    assert lines[2].startswith("good absent ")
    assert lines[2].endswith(" 2048 fits")
    listed = json.loads(mlxpool("models", "--json").out)["models"]
    assert [entry["name"] for entry in listed] == ["broken", "good"]
    assert listed[0]["plan"] is None
    assert listed[1]["plan"]["context"] == 2048
    assert listed[1]["plan"]["verdict"] == "fits"


def test_models_without_any_offers_the_starter(mlxpool: Command) -> None:
    result = mlxpool("models")
    assert (result.code, result.out) == (0, "no models yet: `mlxpool pull starter` fetches a small one\n")


@pytest.mark.parametrize(
    "arguments", [["up"], ["config"], ["config", "--json"], ["models"], ["doctor"], ["service", "print"]]
)
def test_no_command_shows_a_key_that_it_refuses(mlxpool: Command, arguments: list[str]) -> None:
    file = mlxpool.home / "config.toml"
    file.write_text('[server]\napi_keys = ["sk-secret key"]\n')
    said = "server.api_keys = (hidden): use a list of keys in visible ASCII, without spaces"
    result = mlxpool(*arguments)
    assert (result.code, result.out, result.err) == (2, "", f"mlxpool: {file}: {said}\n")


def test_a_hint_is_about_the_home_that_was_named(mlxpool: Command, tmp_path: Path) -> None:
    other = tmp_path / "my home"
    pull = f"`mlxpool pull starter --home '{other}'`"
    assert mlxpool("models", "--home", str(other)).out == f"no models yet: {pull} fetches a small one\n"
    refused = mlxpool("up", "--home", str(other), "--model", "x")
    assert refused.err.startswith(
        f"mlxpool: no model on this machine yet: {pull} fetches a small one (93 MB)\n"
    )
    missing = mlxpool("ps", "--home", str(other)).err
    assert (
        missing
        == f"mlxpool: no server is running for {other}; start one with `mlxpool up --home '{other}'`\n"
    )
    assert mlxpool("ps", "--home", str(mlxpool.home)).err.endswith("; start one with `mlxpool up`\n")


def test_a_models_name_with_brackets_is_shown_as_it_is(mlxpool: Command) -> None:
    write_model(mlxpool.home / "models" / "a[bold]b")
    assert "a[bold]b" in mlxpool("models").out


def test_config_shows_each_value_with_its_source_and_no_key(
    mlxpool: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = mlxpool.home / "config.toml"
    file.write_text(
        '[server]\napi_keys = ["sk-secret"]\n[pool]\nidle_ttl = "never"\n'
        '[aliases]\n"gpt-*" = "m"\n[models."m"]\npin = true\n'
    )
    monkeypatch.setenv("MLXPOOL_POOL_QUEUE_LIMIT", "5")
    rows = {row["key"]: (row["value"], row["from"]) for row in json.loads(mlxpool("config", "--json").out)}
    assert rows["server.api_keys"] == ("1, not shown", str(file))
    assert rows["pool.idle_ttl"] == ("never", str(file))
    assert rows["pool.queue_limit"] == (5, "MLXPOOL_POOL_QUEUE_LIMIT")
    assert rows["pool.stall_timeout"] == ("1m", "default")
    assert rows['aliases."gpt-*"'] == ("m", str(file))
    assert rows['models."m".pin'] == (True, str(file))
    shown = mlxpool("config")
    assert "sk-secret" not in shown.out
    assert "MLXPOOL_POOL_QUEUE_LIMIT" in shown.out


def test_config_prints_its_path_and_its_schema(mlxpool: Command) -> None:
    assert mlxpool("config", "--path").out == f"{mlxpool.home / 'config.toml'}\n"
    assert json.loads(mlxpool("config", "--schema").out)["title"] == "mlxpool config.toml"


def test_run_refuses_sampling_out_of_range(mlxpool: Command) -> None:
    for option, value in (("--temperature", "3"), ("--temperature", "inf"), ("--max-tokens", "0")):
        assert mlxpool("run", "m", "hi", option, value).code == 2


def test_a_number_that_is_none_is_refused(mlxpool: Command) -> None:
    result = mlxpool("run", "m", "hi", "--temperature", "nan")
    said = "mlxpool: Invalid value for '--temperature': 'nan' is not a finite number\n"
    assert (result.code, result.err) == (2, said)


@pytest.mark.parametrize(
    "arguments", [["run", "m", "\udcff"], ["load", "\udcff"], ["models", "--home", "\udcff"]]
)
def test_an_argument_that_is_not_text_is_bad_usage(mlxpool: Command, arguments: list[str]) -> None:
    result = mlxpool(*arguments)
    said = "mlxpool: '\\udcff' is not valid UTF-8; arguments are text\n"
    assert (result.code, result.out, result.err) == (2, "", said)


def output_to(
    home: Path, redirection: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`mlxpool` with its standard output redirected by a shell."""
    program = "from mlxpool.parent.cli import main; main()"
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", program, *arguments],
        env={**os.environ, "MLXPOOL_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments", [["models"], ["models", "--json"], ["--help"], ["config"], ["config", "--help"]]
)
def test_a_full_disk_under_the_output_is_one_line_and_exit_code_1(
    tmp_path: Path, arguments: list[str], unbuffered: str
) -> None:
    ended = output_to(tmp_path, ">/dev/full", *arguments, PYTHONUNBUFFERED=unbuffered)
    said = "mlxpool: standard output can't be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, said)


@pytest.mark.parametrize("arguments", [["models"], ["--help"], ["up", "--port", "0"]])
def test_a_closed_output_is_one_line_and_exit_code_1(tmp_path: Path, arguments: list[str]) -> None:
    ended = output_to(tmp_path, ">&-", *arguments)
    said = "mlxpool: standard output is closed; send it to a file, or to /dev/null\n"
    assert (ended.returncode, ended.stderr) == (1, said)


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json"], ["--help"]])
def test_a_reader_that_left_is_no_news(tmp_path: Path, arguments: list[str]) -> None:
    ended = output_to(tmp_path, "| true", *arguments)
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["completion"], "Missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish"),
        (["colibri", "plan", "--slots", "\x1b[31mred\x07"], "'\\x1b[31mred\\x07' is not a valid integer"),
        (["up", "--port", "größer als\xa0alle"], "--port = 'größer als\\xa0alle': use a whole number"),
    ],
)
def test_an_error_is_one_line_without_commands_for_the_terminal(
    mlxpool: Command, arguments: list[str], said: str
) -> None:
    result = mlxpool(*arguments)
    assert result.code == 2
    assert said in result.err
    assert result.err.count("\n") == 1
    assert result.err[:-1].isprintable()


def test_text_that_the_terminal_cannot_show_is_shown_as_escapes(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[aliases]\n"größer" = "m"\n', encoding="utf-8")
    ended = output_to(tmp_path, "", "config", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert 'aliases."gr\\xf6\\xdfer"' in ended.stdout


def test_logs_shows_the_last_lines_of_one_model_or_of_all(mlxpool: Command) -> None:
    for arguments in (["logs"], ["logs", "a"]):
        assert mlxpool(*arguments).err == f"mlxpool: no logs in {mlxpool.home / 'logs'} yet\n"
    logs = mlxpool.home / "logs"
    logs.mkdir()
    (logs / "a.log").write_text("one\ntwo\nthree\n")
    (logs / "org--b.log").write_text("other\n")
    assert mlxpool("logs", "a", "-n", "2").out == "two\nthree\n"
    assert mlxpool("logs", "org/b").out == "other\n"
    assert mlxpool("logs").out == "==> a <==\none\ntwo\nthree\n==> org--b <==\nother\n"
    missing = mlxpool("logs", "c")
    assert (missing.code, missing.err) == (1, f"mlxpool: no log of 'c' in {logs}; known are a, org--b\n")


def test_a_followed_log_goes_on_across_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\nhal")
    tail = _Tail(path)
    assert tail.lines() == ["one"]
    with path.open("a") as file:
        file.write("f\ntwo\n")
    assert tail.lines() == ["half", "two"]
    with path.open("a") as file:
        file.write("three\n")
    path.rename(tmp_path / "a.log.1")
    path.write_text("four\n")
    assert tail.lines() == ["three", "four"]
    path.write_text("5\n")
    assert tail.lines() == ["5"]


def test_up_imports_nothing_that_other_commands_need(tmp_path: Path) -> None:
    """What is imported before the server itself is; the 400 ms to /health have no room for these."""
    code = (
        "import sys\n"
        "import mlxpool.parent.cli, mlxpool.parent.cli.up, mlxpool.parent.library\n"
        "heavy = {'rich', 'http.client', 'asyncio', 'aiohttp', 'jinja2', 'tokenizers', 'email', 'mlx'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "[]\n"


def test_up_with_a_model_that_is_not_here_is_bad_usage(mlxpool: Command) -> None:
    write_model(mlxpool.home / "models" / "good")
    result = mlxpool("up", "--model", "god")
    assert result.code == 2
    assert result.err == "mlxpool: --model: no model 'god' on this server; did you mean good?\n"
