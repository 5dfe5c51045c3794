"""Completion as a shell asks for it, each time in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxpool.parent.cli import COMMANDS
from tests.tools.model_folders import write_model

MLXPOOL = [sys.executable, "-c", "from mlxpool.parent.cli import main; main()"]


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXPOOL_")}
    return {**kept, "MLXPOOL_HOME": str(home)}


def completed(home: Path, *words: str) -> list[str]:
    """What the last of the words may become."""
    asked = {
        "_MLXPOOL_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("mlxpool", *words)),
        "COMP_CWORD": str(len(words)),
    }
    ended = subprocess.run(
        MLXPOOL, env={**environment(home), **asked}, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.stderr == ""
    return [line.partition(",")[2] for line in ended.stdout.splitlines() if line]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("small", "smaller", "large"):
        write_model(tmp_path / "models" / name)
    (tmp_path / "config.toml").write_text('[aliases]\n"smart" = "large"\n"gpt-*" = "large"\n')
    return tmp_path


def test_commands_subcommands_and_options(home: Path) -> None:
    assert completed(home, "") == list(COMMANDS)
    assert completed(home, "un") == ["unload", "unpin"]
    assert completed(home, "cache", "") == ["prune", "status", "verify"]
    assert completed(home, "service", "") == ["install", "print", "restart", "status", "uninstall"]
    assert completed(home, "unload", "--f") == ["--force"]
    assert completed(home, "completion", "") == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("command", ["load", "unload", "pin", "unpin", "run", "logs"])
def test_names_of_models_and_aliases_but_no_patterns(home: Path, command: str) -> None:
    assert completed(home, command, "sma") == ["small", "smaller", "smart"]


def test_the_home_that_was_named_is_looked_into(home: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other" / "models" / "only")
    assert completed(home, "load", "--home", str(tmp_path / "other"), "") == ["only"]


def test_what_is_unknown_is_no_complaint_at_a_key_press(home: Path) -> None:
    assert completed(home, "load", "zzz") == []
    assert completed(home, "nope", "sta") == ["status"]


def test_bad_settings_complete_no_model_and_say_nothing(home: Path) -> None:
    (home / "config.toml").write_text("[nope]\n")
    assert completed(home, "load", "") == []


def test_completing_commands_imports_none_of_them() -> None:
    code = (
        "import os, sys\n"
        "os.environ |= {'_MLXPOOL_COMPLETE': 'bash_complete', 'COMP_WORDS': 'mlxpool ', 'COMP_CWORD': '1'}\n"
        "from mlxpool.parent.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if name.startswith('mlxpool.')), file=sys.stderr)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert said == "['mlxpool.parent', 'mlxpool.parent.cli']\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(home: Path, shell: str) -> None:
    ended = subprocess.run(
        [*MLXPOOL, "completion", shell], env=environment(home), capture_output=True, text=True, check=True
    )
    assert f"_MLXPOOL_COMPLETE={shell}_complete" in ended.stdout
    if shutil.which(shell):
        check = "--no-execute" if shell == "fish" else "-n"
        subprocess.run([shell, check], input=ended.stdout, text=True, check=True)


def test_bash_itself_completes_a_model(home: Path, tmp_path: Path) -> None:
    command = tmp_path / "bin" / "mlxpool"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom mlxpool.parent.cli import main\nmain()\n")
    command.chmod(0o755)
    script = (
        'eval "$(mlxpool completion bash)"; COMP_WORDS=(mlxpool load sma); COMP_CWORD=2\n'
        '_mlxpool_completion mlxpool; echo "${COMPREPLY[@]}"'
    )
    path = f"{command.parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", script],
        env={**environment(home), "PATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ended.stdout == "small smaller smart\n"
