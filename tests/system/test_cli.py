"""The command line against a running server: the real parent, with scripted workers."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.scripted_script import expected_text, make_scripted_model

ROOT = Path(__file__).parents[2]
MLXPOOL = [sys.executable, "-c", "from mlxpool.parent.cli import main; main()"]
# The terminal becomes the process's own, so that a typed Ctrl-C is the signal that a person's is.
CONTROLLED = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {MLXPOOL[-1]}"
KEY = "test-key"


class Served:
    """A home with a server."""

    def __init__(self, home: Path, process: subprocess.Popen[str], url: str) -> None:
        self.home, self.process, self.url = home, process, url

    def __call__(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MLXPOOL, *arguments],
            env=environment(self.home),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def out(self, *arguments: str) -> str:
        result = self(*arguments)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    def workers(self) -> dict[str, str]:
        listed = json.loads(self.out("ps", "--json"))["workers"]
        return {worker["model"]: worker["state"] for worker in listed}


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXPOOL_")}
    return {**kept, "MLXPOOL_HOME": str(home)}


@contextlib.contextmanager
def serving(home: Path, *arguments: str) -> Iterator[Served]:
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "config.toml").exists():
        (home / "config.toml").write_text(f'[server]\napi_keys = ["{KEY}"]\n[aliases]\n"gpt-*" = "m"\n')
    process = subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "tests/tools/scripted_up.py")),
            *("--home", str(home), "--port", "0", *arguments),
        ],
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line
        yield Served(home, process, line.split()[-1])
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def mlxpool(tmp_path: Path) -> Iterator[Served]:
    models = tmp_path / "home" / "models"
    make_scripted_model(models, "m")
    make_scripted_model(models, "slow", tokens=2000, tokens_per_s=20)
    make_scripted_model(models, "bad", fail_load="no such architecture: xyz")
    with serving(tmp_path / "home") as served:
        yield served


def test_status_says_where_the_server_is(mlxpool: Served) -> None:
    assert mlxpool.out("status").startswith(f"running at {mlxpool.url} (pid {mlxpool.process.pid}) for ")
    told = json.loads(mlxpool.out("status", "--json"))
    assert (told["running"], told["pid"], told["url"]) == (True, mlxpool.process.pid, mlxpool.url)
    assert told["pool"]["workers"] == []


def test_load_waits_until_ready_and_unload_until_gone(mlxpool: Served) -> None:
    assert mlxpool.out("load", "m") == "m: ready\n"
    assert mlxpool.workers()["m"] == "ready"
    assert mlxpool.out("ps").splitlines()[1].split()[:2] == ["m", "ready"]
    models = {
        entry["name"]: entry["state"] for entry in json.loads(mlxpool.out("models", "--json"))["models"]
    }
    assert models == {"m": "ready", "slow": "absent", "bad": "absent"}
    assert mlxpool.out("unload", "m") == "m: absent\n"
    assert mlxpool.workers().get("m", "absent") == "absent"


def test_models_lists_what_the_server_alone_knows_of(tmp_path: Path) -> None:
    for name in ("b", "d"):
        make_scripted_model(tmp_path / "more", name)
    make_scripted_model(tmp_path / "home" / "models", "c")
    with serving(tmp_path / "home", "--models", str(tmp_path / "more")) as served:
        served.out("load", "d")
        lines = [line.split()[:2] for line in served.out("models").splitlines()[1:]]
        assert lines == [["b", "absent"], ["c", "absent"], ["d", "ready"]]
        models = {entry["name"]: entry for entry in json.loads(served.out("models", "--json"))["models"]}
        assert models["d"]["path"] == str(tmp_path / "more" / "d")
        assert models["d"]["source"] == str(tmp_path / "more")
        assert models["d"]["plan"]["verdict"] == "fits"
        assert models["b"].keys() == models["c"].keys()


def test_status_counts_one_of_each_in_the_singular(mlxpool: Served) -> None:
    assert mlxpool.out("status").endswith(
        "waiting  0 requests\nsince start: 0 loads, 0 evictions, 0 crashes\n"
    )
    mlxpool.out("load", "m")
    assert mlxpool.out("status").endswith("since start: 1 load, 0 evictions, 0 crashes\n")


def test_pin_and_unpin_show_in_the_listing(mlxpool: Served) -> None:
    mlxpool.out("load", "m")
    assert mlxpool.out("pin", "m") == "m: pinned\n"
    assert json.loads(mlxpool.out("ps", "--json"))["workers"][0]["pinned"] is True
    assert mlxpool.out("unpin", "m", "--json") == '{\n  "model": "m",\n  "state": "unpinned"\n}\n'
    assert json.loads(mlxpool.out("ps", "--json"))["workers"][0]["pinned"] is False


def test_a_load_that_fails_says_why(mlxpool: Served) -> None:
    result = mlxpool("load", "bad")
    assert result.returncode == 1
    assert result.stderr.startswith("mlxpool: bad failed to load: ")
    assert "no such architecture: xyz" in result.stderr


def test_an_unknown_model_is_answered_with_the_nearest(mlxpool: Served) -> None:
    for arguments in (["load", "slo"], ["run", "slo", "hi"], ["pin", "slo"]):
        result = mlxpool(*arguments)
        assert result.returncode == 1
        assert result.stderr == "mlxpool: no model 'slo' on this server; did you mean slow?\n"


def test_run_prints_the_answer_to_an_argument_or_to_standard_input(mlxpool: Served) -> None:
    assert mlxpool.out("run", "m", "who?") == expected_text("m", "who?") + "\n"
    piped = mlxpool("run", "gpt-5", stdin="who?")
    assert (piped.returncode, piped.stdout) == (0, expected_text("m", "who?") + "\n")
    empty = mlxpool("run", "m", stdin=" \n")
    assert empty.returncode == 2
    assert empty.stderr == "mlxpool: nothing to ask: give a PROMPT, or text on standard input\n"


def test_run_refuses_input_that_is_not_text(mlxpool: Served) -> None:
    ended = subprocess.run(
        [*MLXPOOL, "run", "m"],
        env=environment(mlxpool.home),
        input=b"who?\xff",
        capture_output=True,
        timeout=60,
        check=False,
    )
    said = b"mlxpool: standard input is not valid utf-8 text: byte 0xff\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", said)


@pytest.mark.parametrize("redirection", ["<&-", "</dev/null"])
def test_run_without_any_input_has_nothing_to_ask(mlxpool: Served, redirection: str) -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *MLXPOOL, "run", "m"],
        env=environment(mlxpool.home),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = "mlxpool: nothing to ask: give a PROMPT, or text on standard input\n"
    assert (ended.returncode, ended.stderr) == (2, said)


def test_run_of_a_model_that_cannot_load_fails_with_its_reason(mlxpool: Served) -> None:
    result = mlxpool("run", "bad", "hi")
    assert result.returncode == 1
    assert "no such architecture: xyz" in result.stderr
    assert result.stdout == ""


@contextlib.contextmanager
def on_a_terminal(home: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int, Terminal]]:
    """The process, the descriptor that types, and what is shown. Ctrl-C reaches it as a person's does."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLED, *arguments],
        env=environment(home),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield process, master, Terminal(master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_run_on_a_terminal_is_a_conversation(mlxpool: Served) -> None:
    with on_a_terminal(mlxpool.home, "run", "m") as (process, master, terminal):
        terminal.expect("> ")
        for question in ("first", "second"):
            os.write(master, question.encode() + b"\n")
            terminal.expect(expected_text("m", question).strip())
            terminal.expect("> ")
        os.write(master, b"\x04")
        assert process.wait(60) == 0


def test_a_conversation_survives_typed_bytes_that_are_no_text(mlxpool: Served) -> None:
    with on_a_terminal(mlxpool.home, "run", "m") as (process, master, terminal):
        terminal.expect("> ")
        os.write(master, b"a\xffb\n")
        terminal.expect("mlxpool: not asked: what was typed is not valid UTF-8")
        terminal.expect("> ")
        os.write(master, b"first\n")
        terminal.expect(expected_text("m", "first").strip())
        terminal.expect("> ")
        os.write(master, b"\x04")
        assert process.wait(60) == 0


def test_ctrl_c_cuts_an_answer_of_a_conversation_and_ends_a_single_one(mlxpool: Served) -> None:
    with on_a_terminal(mlxpool.home, "run", "slow") as (process, master, terminal):
        terminal.expect("> ")
        os.write(master, b"count\n")
        terminal.expect(expected_text("slow", "count")[:3])
        os.write(master, b"\x03")
        terminal.expect("> ")
        os.write(master, b"\x04")
        assert process.wait(60) == 0
    with on_a_terminal(mlxpool.home, "run", "slow", "count") as (process, master, terminal):
        terminal.expect(expected_text("slow", "count")[:3])
        os.write(master, b"\x03")
        terminal.expect("mlxpool: interrupted")
        assert process.wait(60) == 130


class Terminal:
    """What a program shows on a terminal, read up to each text that is expected."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._shown = ""

    def expect(self, text: str) -> None:
        """Wait until `text` is shown, and take everything up to it as seen."""
        deadline = time.monotonic() + 60
        while text not in self._shown:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} was never shown, but {self._shown!r}"
            self._shown += os.read(self._descriptor, 4096).decode(errors="replace")
        self._shown = self._shown.partition(text)[2]


def test_interrupting_run_ends_the_generation(mlxpool: Served) -> None:
    process = subprocess.Popen(
        [*MLXPOOL, "run", "slow", "count"],
        env=environment(mlxpool.home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().endswith("mlxpool: interrupted\n")
    deadline = time.monotonic() + 60
    while json.loads(mlxpool.out("ps", "--json"))["workers"][0]["active"]:
        assert time.monotonic() < deadline


def test_unload_drains_a_stream_and_force_cuts_it(mlxpool: Served) -> None:
    process = subprocess.Popen(
        [*MLXPOOL, "run", "slow", "count"],
        env=environment(mlxpool.home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    # Whatever the state is called while its last request runs, the model is still there.
    assert mlxpool.out("unload", "slow", "--no-wait") in ("slow: ready\n", "slow: draining\n")
    assert process.poll() is None
    assert mlxpool.out("unload", "slow", "--force") == "slow: absent\n"
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("mlxpool: ")


def test_logs_hold_what_the_workers_wrote(mlxpool: Served) -> None:
    mlxpool("load", "bad")
    assert "worker" in mlxpool.out("logs", "bad")


def test_down_stops_the_server_and_says_so(mlxpool: Served) -> None:
    mlxpool.out("load", "m")
    # The test is the server's parent: reaped here, or it would stay a zombie.
    result = mlxpool("down")
    assert result.returncode == 0
    assert result.stdout.startswith(f"stopped (pid {mlxpool.process.pid}, after ")
    assert mlxpool.process.wait(60) == 0
    again = mlxpool("down")
    assert (again.returncode, again.stderr) == (1, f"mlxpool: no server is running for {mlxpool.home}\n")


def test_up_twice_for_one_home_is_refused_with_the_address(mlxpool: Served) -> None:
    result = mlxpool("up", "--port", "0")
    assert result.returncode == 1
    assert mlxpool.url in result.stderr


def test_up_without_models_serves_and_offers_the_starter(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*MLXPOOL, "up", "--port", "0"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("mlxpool serves on http://127.0.0.1:")
    finally:
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err.startswith(
        "mlxpool: no model on this machine yet: `mlxpool pull starter` fetches a small one (93 MB)\n"
    )
