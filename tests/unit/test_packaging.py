"""What is installed is what lies in the folders, at the versions that are pinned."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_folder_with_modules_is_a_listed_package() -> None:
    found = set()
    for top in ("parent", "shared", "worker"):
        for folder, _, files in os.walk(ROOT / top):
            if any(name.endswith(".py") for name in files):
                assert "__init__.py" in files, f"{folder} has modules but no __init__.py"
                found.add("mlxpool." + str(Path(folder).relative_to(ROOT)).replace(os.sep, "."))
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_requirement_is_pinned_in_the_constraints() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    wanted += project["optional-dependencies"]["cpu"]
    names = {plain(re.split(r"[\[<>=~!; ]", requirement)[0]) for requirement in wanted}
    assert names <= {plain(name) for name in CONSTRAINTS}


@pytest.mark.parametrize("name", ["mlx", "mlx-lm", "aiohttp", "msgspec", "tokenizers"])
def test_the_tests_run_with_the_pinned_versions(name: str) -> None:
    assert metadata.version(name) == CONSTRAINTS[name]


def test_each_backend_has_its_extra_and_macos_needs_none() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["cpu"] == ["mlx[cpu]>=0.32.4"]
    assert extras["cuda"] == ["mlx[cuda13]>=0.32.4"]
    assert set(extras) == {"cpu", "cuda", "dev"}


def test_typed_markers_are_in_every_top_package() -> None:
    assert all((ROOT / top / "py.typed").exists() for top in ("parent", "shared", "worker"))


def test_make_knows_the_targets_that_the_documents_name() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("up", "test", "check", "bench", "long", "clean"):
        assert re.search(rf"^{target}:", makefile, re.M), target


def dry_run(*arguments: str) -> str:
    env = {**os.environ, "MAKEFLAGS": ""}
    return subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_make_up_pulls_the_starter_and_serves() -> None:
    said = dry_run("up", "ARGS=--port 9000")
    assert said.index("mlxpool pull starter") < said.index("mlxpool up --port 9000")


@pytest.mark.parametrize(
    ("arguments", "pulled"),
    [
        ("", "pull starter"),
        ("--port 9000", "pull starter"),
        ("--port 9000 --home /x --host h", "pull starter --home /x"),
        ("--home=/x", "pull starter --home /x"),
        ("--home '/a b'", "pull starter --home /a b"),
        ("--home /x --home=/y", "pull starter --home /y"),
    ],
)
def test_make_up_pulls_into_the_home_that_it_serves(tmp_path: Path, arguments: str, pulled: str) -> None:
    program = tmp_path / "mlxpool"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    made = subprocess.run(
        ["make", "-s", "-o", ".venv/installed-user", "up", f"BIN={tmp_path}", f"ARGS={arguments}"],
        cwd=ROOT,
        env={**os.environ, "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.splitlines() == [pulled, " ".join(["up", *shlex.split(arguments)])]


def test_ci_is_a_strict_bash_script_that_may_be_run() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)
