"""The pool with scripted workers takes the settings that the real command takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tools import scripted_up


def test_flags_become_settings(tmp_path: Path) -> None:
    models = tmp_path / "m"
    models.mkdir()
    flags = ["--home", str(tmp_path), "--models", str(models), "--port", "0", "--memory-budget", "2GB"]
    settings = scripted_up.parse([*flags, "--set", "pool.stall_timeout=2s", "--set", "pool.queue_limit=3"])
    assert settings.server.port == 0
    assert settings.budget_bytes(10**12) == 2 * 10**9
    assert (settings.pool.stall_timeout, settings.pool.queue_limit) == (2.0, 3)
    assert settings.model_dirs == (models,)


def test_workers_look_where_the_library_looks(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[models.one]\npath = "elsewhere/one"\n')
    flags = ["--home", str(tmp_path), "--models", str(tmp_path), "--port", "0", "--config", str(config)]
    argv = scripted_up.worker_argv(scripted_up.parse(flags))
    folders = [tmp_path / "models", tmp_path, tmp_path / "elsewhere"]
    assert argv[:2] == [sys.executable, str(scripted_up.WORKER)]
    assert argv[2:] == [part for folder in folders for part in ("--models", str(folder))]


def test_a_bad_setting_is_one_line_and_exit_2(tmp_path: Path) -> None:
    argv = [sys.executable, scripted_up.__file__, "--home", str(tmp_path), "--port", "0", "--set", "pol.x=1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("scripted_up: --set pol.x=1: use SECTION.KEY=VALUE")
    assert done.stderr.count("\n") == 1
