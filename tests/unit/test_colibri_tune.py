"""`mlxpool colibri bench` and `tune` on a tiny model: real reads, real decoding, real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import psutil
import pytest

from mlxpool.parent.library import Library
from mlxpool.parent.run_folder import Address, write_address
from mlxpool.shared import config as configs
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri import tuned
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.tasks import ColibriTuneTask, StreamVariant
from mlxpool.worker.colibri import disk_rate, tune
from mlxpool.worker.colibri.prompts import prompt
from mlxpool.worker.colibri.rig import Rig
from tests import tiny_glm
from tests.unit import colibri_families

from .test_cli import Command, mlxpool  # noqa: F401  # the fixture

SMALL = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "dtype": "float32"}
LAUNCH = StreamLaunch(slots=5, working_slots=8, mtp_slots=5, mtp_working_slots=8, chunk=64)
# All but what a test wants tried.
SET = 'io = "direct"\nqueue_depth = 8\noverlap = true\n'
WAIT_S = 60


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_glm.config(**SMALL)
    folder = tmp_path_factory.mktemp("glm") / "glm"
    numbers = tiny_glm.weights(config)
    return tiny_glm.write_stacked(folder, config, numbers, bits=None, dtype="F32", mtp=True)


def quiet(*_: Any) -> None:
    pass


def letters(text: str) -> list[int]:
    return list(text.encode())


def settings(home: Path, text: str) -> None:
    (home / "config.toml").write_text(f'[models."glm"]\n{text}')


# The disk


def test_places_to_read_are_whole_apart_and_in_no_order() -> None:
    found = disk_rate.places({"a": 4096 * 9 + 5, "b": 4096 * 3}, 8192)
    assert sorted(found) == [("a", 0), ("a", 8192), ("a", 16384), ("a", 24576), ("b", 0)]
    assert found != sorted(found)


def test_every_place_is_read_once_where_there_is_time_for_all(glm: Path) -> None:
    artifact = artifacts.read(glm)
    rate = disk_rate.measure(artifact, depth=4, seconds=WAIT_S)
    sizes = [os.path.getsize(glm / name) for name in disk_rate.expert_files(artifact)]
    assert rate.read_bytes == artifact.layers[0].record_bytes
    assert rate.reads == sum(size // rate.read_bytes for size in sizes)
    assert rate.bytes_per_s == pytest.approx(rate.reads * rate.read_bytes / rate.seconds)


def test_a_file_that_is_gone_is_a_reason(glm: Path) -> None:
    gone = msgspec.structs.replace(artifacts.read(glm), folder=str(glm / "nowhere"))
    with pytest.raises(CheckpointError, match="the disk can't be measured: No such file"):
        disk_rate.measure(gone, depth=1)


# What is measured with


def test_prompts_are_as_long_as_asked_and_never_the_same() -> None:
    made = [prompt(letters, 500, number) for number in range(8)]
    assert {len(ids) for ids in made} == {500}
    assert len({tuple(ids[:30]) for ids in made}) == 8
    assert made == [prompt(letters, 500, number) for number in range(8)]


def test_the_same_is_said_in_every_way_of_streaming_and_slots_are_given_back(
    glm: Path, tmp_path: Path
) -> None:
    rig = Rig(glm, msgspec.structs.replace(LAUNCH, usage_folder=str(tmp_path / "usage")), quiet)
    read = rig.prefill(prompt(letters, 40, 0))
    record = rig.artifact.layers[0].record_bytes
    assert read.counts.tokens == 39
    assert read.counts.read_bytes == read.counts.misses * record > 0
    first = rig.decode(read, 3, 8)
    assert len(first.tokens) == 12
    assert first.counts.tokens == first.counts.passes == 8
    assert first.counts.misses > 0
    held: list[int] = []
    for change in (
        {"slots": 3},
        {"slots": 16, "working_slots": 0},
        {"io": "buffered", "prefetch": False, "overlap": False, "queue_depth": 2},
        {"drafts": 3},
        {"drafts": 2, "slots": 4},
        {"slots": 3},
    ):
        rig.use(msgspec.structs.replace(LAUNCH, **change))
        again = rig.decode(read, 3, 8)
        assert again.tokens == first.tokens, change
        assert (again.counts.drafted > 0) == ("drafts" in change)
        mx.clear_cache()
        held.append(mx.get_active_memory())
    # As much as the first time: neither slots nor the draft layer of another way are left.
    assert held[-1] == pytest.approx(held[0], rel=0.02)
    # 13 slots more in two layers, and no 8 working slots.
    assert held[1] == pytest.approx(held[0] + (2 * 13 - 8) * record, rel=0.02)
    rig.close()
    rig.close()
    assert not (tmp_path / "usage").exists()


def test_a_decoding_ends_when_its_time_is_over(glm: Path) -> None:
    rig = Rig(glm, LAUNCH, quiet)
    cut = rig.decode(rig.prefill(prompt(letters, 10, 1)), 8, 500, limit_s=0.0)
    assert cut.counts.tokens == 1
    assert cut.rate > 0
    rig.close()


def test_an_activation_of_its_own_outlives_another_way_of_streaming(tmp_path: Path) -> None:
    folder = colibri_families.write("gpt_oss", tmp_path / "oss")
    launch = StreamLaunch(slots=3, working_slots=4, chunk=16)
    rig = Rig(folder, launch, quiet)
    read = rig.prefill([5, 9, 33, 71])
    first = rig.decode(read, 0, 8).tokens
    rig.use(launch)
    rig.use(launch)
    assert rig.decode(read, 0, 8).tokens == first
    rig.close()


# A search


def test_a_search_leaves_tokens_alone_and_keeps_what_it_has_measured(
    glm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "MOST_TOKENS", 8)
    monkeypatch.setattr(tune, "warm_tokens", lambda *_: 2)
    monkeypatch.setattr(tune, "DEPTHS", (8, 16))
    fewer = msgspec.structs.replace(LAUNCH, slots=3)
    task = ColibriTuneTask(
        folder=str(glm),
        variants=(
            StreamVariant(5, False, LAUNCH),
            StreamVariant(3, False, fewer),
            StreamVariant(5, True, msgspec.structs.replace(LAUNCH, drafts=3)),
            StreamVariant(3, True, msgspec.structs.replace(fewer, drafts=3)),
        ),
        names=("slots", "queue_depth", "prefetch", "mtp"),
        limit_bytes=1 << 30,
        seconds=5.0,
    )
    told: list[tuple[float, str]] = []
    done = tune.tune(task, letters, lambda share, stage, _: told.append((share, stage)))
    assert [(trial.name, trial.value) for trial in done.trials] == [
        ("slots", 3),
        ("queue_depth", 16),
        ("prefetch", False),
        ("mtp", True),
    ]
    assert {trial.verdict for trial in done.trials} <= {"kept", "no gain", "unsteady", "slower"}
    assert done.left == ["io", "overlap"]
    kept = {trial.name: trial.value for trial in done.trials if trial.verdict == "kept"}
    assert done.found.mtp == kept.get("mtp", False)
    assert done.found.prefetch == kept.get("prefetch", True)
    assert done.found.queue_depth == kept.get("queue_depth", 8)
    assert done.found.slots == kept.get("slots")
    assert (done.found.io, done.found.overlap) == (None, None)
    assert done.found.disk_bytes_per_s == done.disk.bytes_per_s > 0
    assert [share for share, _ in told] == sorted(share for share, _ in told)
    assert list(dict.fromkeys(stage for _, stage in told)) == [
        "disk",
        "load",
        "begin",
        "slots",
        "queue_depth",
        "prefetch",
        "mtp",
    ]


def test_where_all_experts_are_held_only_drafts_are_tried(glm: Path) -> None:
    whole = msgspec.structs.replace(LAUNCH, slots=16, working_slots=0)
    drafting = msgspec.structs.replace(whole, drafts=3)
    task = ColibriTuneTask(
        folder=str(glm),
        variants=(StreamVariant(16, False, whole), StreamVariant(16, True, drafting)),
        names=("slots", "io", "queue_depth", "prefetch", "overlap", "mtp"),
        limit_bytes=1 << 30,
        seconds=1.0,
    )
    start = tune.Setup(16, "direct", True, True, 8, False)
    assert tune.choices(task, start, artifacts.read(glm), "cpu") == {"mtp": [False, True]}


# The commands


def test_bench_tells_what_was_read_and_found(mlxpool: Command, glm: Path) -> None:  # noqa: F811
    settings(mlxpool.home, "slots = 5\ncontext = 512\n")
    said = mlxpool("colibri", "bench", str(glm), "--tokens", "10", "--prompt-tokens", "30", "--json")
    assert said.code == 0, said.err
    told = json.loads(said.out)
    assert (told["form"], told["slots"], told["experts"], told["drafts"]) == ("stacked", 5, 16, 0)
    assert told["prefill"]["tokens"] == 2 * 29
    assert told["prefill"]["read_bytes"] == told["prefill"]["needed_bytes"] > 0
    assert told["decode"]["tokens"] == told["decode"]["passes"] == 20
    assert 0 < told["decode"]["hit_rate"] < 1
    assert told["decode"]["disk_share"] > 0
    assert told["disk"]["read_bytes"] == artifacts.read(glm).layers[0].record_bytes
    memory = told["memory"]
    plan = json.loads(mlxpool("colibri", "plan", str(glm), "--json").out)
    assert memory["planned_bytes"] == plan["planned_bytes"]
    assert 0 < memory["footprint_bytes"] < memory["planned_bytes"]
    assert memory["mlx_peak_bytes"] < memory["mlx_limit_bytes"] < memory["planned_bytes"]
    assert not (mlxpool.home / "colibri").exists()
    said = mlxpool("colibri", "bench", str(glm), "--tokens", "100", "--prompt-tokens", "400")
    assert said.code == 2
    assert "are more than 479, which is what the planned context of 512 has room for" in said.err


def test_what_was_tuned_is_what_plan_and_server_use(mlxpool: Command, glm: Path) -> None:  # noqa: F811
    settings(mlxpool.home, f'slots = 5\ncontext = 512\nmtp = "off"\n{SET}')
    said = mlxpool("colibri", "tune", str(glm), "--seconds", "0.1", "--json")
    assert said.code == 0, said.err
    told = json.loads(said.out)
    assert [(trial["name"], trial["value"]) for trial in told["trials"]] == [("prefetch", False)]
    assert told["left"] == ["slots", "io", "queue_depth", "overlap", "mtp"]
    found = msgspec.convert(told["found"], tuned.Tuned)
    read = artifacts.read(glm)
    assert tuned.read(mlxpool.home).of(tuned.fingerprint(read), "cpu") == found
    (forecast,) = json.loads(mlxpool("colibri", "plan", str(glm), "--json").out)["forecasts"]
    assert forecast["measured"] is True
    assert forecast["disk_bytes_per_s"] == found.disk_bytes_per_s
    (mlxpool.home / "models").mkdir()
    (mlxpool.home / "models" / "glm").symlink_to(glm)
    library = Library(configs.load(None, None, {"home": mlxpool.home}))
    fit = library.fit(library.resolve("glm"), "cpu", None, None)
    assert fit.launch is not None
    assert fit.launch.prefetch == found.prefetch


def test_what_does_not_fit_or_is_no_model_is_refused_in_one_line(mlxpool: Command, glm: Path) -> None:  # noqa: F811
    for command in ("bench", "tune"):
        said = mlxpool("colibri", command, "nowhere")
        assert said.code == 2
        assert "'nowhere' is no folder, and no model 'nowhere'" in said.err
        (mlxpool.home / "config.toml").write_text('[pool]\nmemory_budget = "600MB"\n')
        said = mlxpool("colibri", command, str(glm))
        assert said.code == 1
        assert said.err.startswith("mlxpool: does not fit in ")
        assert len(said.err.splitlines()) == 1
        (mlxpool.home / "config.toml").unlink()


class _Pool(BaseHTTPRequestHandler):
    workers: list[dict[str, Any]]

    def do_GET(self) -> None:
        body = json.dumps({"budget_bytes": 1, "reserved_bytes": 0, "workers": self.workers}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pool() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), _Pool)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_nothing_is_loaded_beside_what_a_server_holds(
    mlxpool: Command,  # noqa: F811
    glm: Path,
    pool: HTTPServer,
) -> None:
    _Pool.workers = [{"model": "qwen", "state": "ready", "pid": 1}]
    write_address(mlxpool.home, Address(os.getpid(), time.time(), "127.0.0.1", pool.server_port))
    for command in ("bench", "tune"):
        said = mlxpool("colibri", command, str(glm))
        assert said.code == 1
        assert said.err == (
            "mlxpool: the server holds qwen in the memory that this needs; `mlxpool unload qwen` for each, "
            "or `mlxpool down`, first\n"
        )


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_tuning_that_is_ended_has_kept_nothing_and_leaves_no_process(
    glm: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    settings(tmp_path, "slots = 5\n")
    started = subprocess.Popen(
        [sys.executable, "-m", "mlxpool.parent", "colibri", "tune", str(glm), "--home", str(tmp_path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stderr is not None
    assert any(line.startswith("begin") for line in started.stderr)
    (worker,) = psutil.Process(started.pid).children()
    started.send_signal(sent)
    started.communicate(timeout=WAIT_S)
    assert started.returncode == code
    psutil.wait_procs([worker], timeout=WAIT_S)
    assert not worker.is_running()
    assert not (tmp_path / "colibri").exists()
