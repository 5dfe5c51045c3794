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

from mlxpool.worker.text.events import Finish, Reasoning, Text
from tests.tools.held import held
from tests.tools.scripted_events import told
from tests.tools.scripted_script import make_scripted_model
from tests.tools.served import Served

# Two runs on the same server begin with the same requests.
SEED = 20240229
# They add up to the minute that `make test` has for them.
ANSWERS_S, READS_S, STARTER_S = 25, 10, 25
LONG_S = 1200
# The last request may take as long as one does, and the coverage phase ends its operation first.
MARGIN_S = 90
REQUEST_TIMEOUT_S = 60
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

_ANSWERING = "^/v1/(chat|completions|messages|responses)"
ANSWERS = ("--include-path-regex", _ANSWERING, "--phases", "examples,coverage,fuzzing")
# No coverage here: it also tries the methods that a route does not have, which under /api are other routes.
READS = (
    "--exclude-path-regex", _ANSWERING, "--exclude-method", "POST", "--exclude-method", "DELETE",
    "--exclude-path", "/api/events", "--phases", "examples,fuzzing",
)  # fmt: skip


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A scripted model under every name: it answers at once, so that little time asks much. Its events make
    the product's own readers and writers answer for chat too."""
    models = tmp_path_factory.mktemp("models")
    make_scripted_model(models, "scripted", events=told(Reasoning("Hm."), Text("Hi"), Finish("stop")))
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
            "--warnings", "off",
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


@pytest.mark.parametrize(
    ("which", "seconds"), [(ANSWERS, ANSWERS_S), (READS, READS_S)], ids=["answers", "reads"]
)
def test_no_route_answers_what_it_does_not_document(
    scripted: Served, tmp_path: Path, which: tuple[str, ...], seconds: int
) -> None:
    ask_everything(scripted, tmp_path, seconds, which)


@pytest.mark.starter
def test_neither_does_a_real_model(starter: Served, tmp_path: Path) -> None:
    ask_everything(starter, tmp_path, STARTER_S, ANSWERS)


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 2 * MARGIN_S)
@pytest.mark.parametrize("which", [ANSWERS, READS], ids=["answers", "reads"])
def test_no_route_does_in_a_long_time(scripted: Served, tmp_path: Path, which: tuple[str, ...]) -> None:
    ask_everything(scripted, tmp_path, LONG_S, which)


@pytest.mark.long
@pytest.mark.starter
@pytest.mark.timeout(LONG_S + 2 * MARGIN_S)
def test_neither_does_a_real_model_in_a_long_time(starter: Served, tmp_path: Path) -> None:
    ask_everything(starter, tmp_path, LONG_S, ANSWERS)
