"""Schemathesis asks every route of /openapi.json what it says it answers: no 500, no undocumented status.

It is run as a program of its own, for its engine brings its own threads, limits and reports. What changes
something under /api is not asked: those routes load, unload, pull and remove models. Neither is the stream
of events, which never ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.held import held
from tests.tools.scripted_script import make_scripted_model
from tests.tools.served import Served

# Two runs on the same server begin with the same requests.
SEED = 20240229
# Three runs of these make the minute that `make test` has for them.
QUICK_S, LONG_S = 20, 1200
# The last request may take as long as one does, and the coverage phase ends its operation first.
MARGIN_S = 90
REQUEST_TIMEOUT_S = 20
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

# Of a coverage phase are methods that a route does not have: under /api those would be the others' routes.
PROTOCOLS = ("--exclude-path-regex", "^/api/", "--phases", "examples,coverage,fuzzing")
READS = (
    "--include-path-regex", "^/api/", "--exclude-method", "POST", "--exclude-method", "DELETE",
    "--exclude-path", "/api/events", "--phases", "examples,fuzzing",
)  # fmt: skip


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A scripted model under every name: it answers at once, so that little time asks much."""
    models = tmp_path_factory.mktemp("models")
    make_scripted_model(models, "scripted", tokens=3)
    yield from held(
        tmp=tmp_path_factory.mktemp("openapi"),
        models=models,
        scripted=True,
        config='[defaults]\nmodel = "scripted"\n\n[aliases]\n"*" = "scripted"\n',
    )


def ask_everything(served: Served, folder: Path, seconds: int, which: tuple[str, ...]) -> None:
    """Fails with what schemathesis reports."""
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")), "run", f"{served.url}/openapi.json",
            *which,
            "--checks", CHECKS,
            "--generation-database", "none",
            "--seed", str(SEED),
            "--request-timeout", str(REQUEST_TIMEOUT_S),
            "--max-time", str(seconds),
            "--no-color",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + MARGIN_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
    assert "No issues found" in done.stdout
    assert served.process.poll() is None


@pytest.mark.parametrize("which", [PROTOCOLS, READS], ids=["protocols", "reads"])
def test_no_route_answers_what_it_does_not_document(
    scripted: Served, tmp_path: Path, which: tuple[str, ...]
) -> None:
    ask_everything(scripted, tmp_path, QUICK_S, which)


@pytest.mark.starter
def test_neither_does_a_real_model(starter: Served, tmp_path: Path) -> None:
    ask_everything(starter, tmp_path, QUICK_S, PROTOCOLS)


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 2 * MARGIN_S)
@pytest.mark.parametrize("which", [PROTOCOLS, READS], ids=["protocols", "reads"])
def test_no_route_does_in_a_long_time(scripted: Served, tmp_path: Path, which: tuple[str, ...]) -> None:
    ask_everything(scripted, tmp_path, LONG_S, which)


@pytest.mark.long
@pytest.mark.starter
@pytest.mark.timeout(LONG_S + 2 * MARGIN_S)
def test_neither_does_a_real_model_in_a_long_time(starter: Served, tmp_path: Path) -> None:
    ask_everything(starter, tmp_path, LONG_S, PROTOCOLS)
