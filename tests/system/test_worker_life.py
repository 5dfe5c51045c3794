"""A worker process from its start to its end, over the real pipes and the real socket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpool.shared import control
from tests.tools.tiny_fixture import TinyModels
from tests.tools.worker_process import WorkerProcess

GONE_WITHIN_S = 5.0


def test_a_ready_worker_has_no_torch_even_where_it_is_installed(tiny: TinyModels, tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    marker = tmp_path / "imported"
    (package / "__init__.py").write_text(f"open({str(marker)!r}, 'w').close()\n__version__ = '2.13.0'\n")
    info = tmp_path / "torch-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    with WorkerProcess(tiny("llama"), env={"PYTHONPATH": str(tmp_path)}) as worker:
        worker.ready()
        assert worker.text("hello", max_tokens=4, temperature=0)
    assert not marker.exists()


def can_raise_its_limits() -> bool:
    """Whether a process like this one may open more files than its shell allowed."""
    code = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 128))"
    limited = ["/bin/sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-c", code]
    return subprocess.run(limited, stderr=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.skipif(can_raise_its_limits(), reason="this user's processes may raise every limit")
def test_too_low_a_limit_of_open_files_is_said_before_anything_is_imported(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama"), shell="ulimit -n 64") as worker:
        failed = worker.wait_for(control.Failed)
        assert worker.process.wait(60) == 3
        assert failed.reason == (
            "the limit of open files is 64, and mlx-lm needs 4096; "
            "start the server where `ulimit -Hn` says 4096 or more"
        )
        assert worker.statuses == [failed]
        assert worker.log.read_text() == ""


def test_nothing_is_loaded_before_the_launch_is_told(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama")) as worker:
        imported = worker.wait_for(control.Imported)
        assert imported.backend in ("cpu", "metal", "cuda")
        assert not any(isinstance(status, control.Loading) for status in worker.statuses)
        assert not os.path.exists(worker.socket)
        worker.ready()
        loading = [status for status in worker.statuses if isinstance(status, control.Loading)]
        assert loading[0].done_bytes == 0
        assert loading[-1].done_bytes == loading[-1].total_bytes == worker.stats()["weights_bytes"]


def test_the_socket_is_the_users_alone_and_ready_means_it_answers(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama")).ready() as worker:
        assert stat.S_IMODE(os.stat(worker.socket).st_mode) == 0o600
        status, body, headers = worker.request("GET", "/health")
        assert (status, body) == (200, {"status": "ok"})
        assert headers["Content-Type"].startswith("application/json")


def test_heartbeats_show_progress_and_nothing_pending_when_idle(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama")).ready() as worker:
        worker.chat("hello", max_tokens=20, temperature=0)
        beats: list[control.Heartbeat] = []
        deadline = time.monotonic() + 60
        while not (beats and beats[-1].progress > 0):
            assert time.monotonic() < deadline, beats
            time.sleep(0.05)
            beats = [status for status in worker.statuses if isinstance(status, control.Heartbeat)]
        assert beats[-1].pending == 0
        assert beats[-1].tokens == worker.stats()["tokens"]


def test_the_last_heartbeat_tells_all_that_was_done(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama")).ready() as worker:
        answer = worker.chat("hello", max_tokens=5, temperature=0)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(GONE_WITHIN_S) == 0

        def told() -> int:
            beats = [status for status in worker.statuses if isinstance(status, control.Heartbeat)]
            return beats[-1].tokens

        deadline = time.monotonic() + 60
        while told() != answer["usage"]["completion_tokens"]:
            assert time.monotonic() < deadline, f"it tells {told()} tokens"
            time.sleep(0.01)


@pytest.mark.parametrize("moment", ["starting", "imported", "serving"])
def test_a_closed_tether_ends_the_worker(tiny: TinyModels, moment: str) -> None:
    with WorkerProcess(tiny("llama")) as worker:
        if moment == "imported":
            worker.wait_for(control.Imported)
        elif moment == "serving":
            worker.ready()
        else:
            time.sleep(0.1)
        os.close(worker.tether)
        worker.tether = os.open(os.devnull, os.O_RDONLY)
        assert worker.process.wait(GONE_WITHIN_S) != 0


def test_sigterm_is_a_clean_quick_exit_also_in_the_middle_of_an_answer(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama")).ready() as worker:
        chunks = worker.stream("hello", max_tokens=2000, temperature=1, seed=1)
        next(chunks)
        began_s = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(GONE_WITHIN_S) == 0
        assert time.monotonic() - began_s < 2
        assert not os.path.exists(worker.socket)


def test_sigint_is_the_parents_business(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama")).ready() as worker:
        worker.process.send_signal(signal.SIGINT)
        assert worker.text("hello", max_tokens=4, temperature=0)


def copy(source: Path, out: Path) -> Path:
    return Path(shutil.copytree(source, out))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def reconfigured(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}")


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no weights": (without("model.safetensors"), ["model*.safetensors"]),
    "truncated weights": (truncated, ["model.safetensors", "1000 bytes shorter"]),
    "wrong shape": (reconfigured(intermediate_size=96), ["do not fit config.json", "mlp.", "(128, 64)"]),
    "missing tensors": (reconfigured(num_hidden_layers=3), ["layers.2."]),
    "unknown architecture": (
        reconfigured(model_type="nonesuch"),
        ["no architecture 'nonesuch'"],
    ),
    "code in the folder": (reconfigured(model_file="model.py"), ["model.py", "never"]),
    "no config": (without("config.json"), ["config.json"]),
    "missing geometry": (
        reconfigured(model_type="gemma3_text", head_dim=None),
        ["whole gemma3_text"],
    ),
    "no tokenizer": (no_tokenizer, ["no tokenizer"]),
    "no tokenizer.json": (without("tokenizer.json"), ["tokenizer.json"]),
    "broken template": (broken_template, ["template", "line 1"]),
}


@pytest.mark.parametrize("fault", BAD_FOLDERS)
def test_a_bad_folder_fails_with_a_reason_a_person_can_act_on(
    tiny: TinyModels, tmp_path: Path, fault: str
) -> None:
    spoil, named = BAD_FOLDERS[fault]
    folder = copy(tiny("llama"), tmp_path / "model")
    spoil(folder)
    with WorkerProcess(folder) as worker:
        worker.go()
        reason = worker.wait_for(control.Failed, 60).reason
        assert worker.process.wait(GONE_WITHIN_S) == 3
        assert not any(isinstance(status, control.Ready) for status in worker.statuses)
    assert "Traceback" not in reason
    assert "\n" not in reason
    assert len(reason) < 1000
    for part in named:
        assert part in reason


def test_a_launch_that_is_no_launch_fails(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama")) as worker:
        os.write(worker.tether, b'{"type":"launch","model":3}\n')
        assert "launch" in worker.wait_for(control.Failed).reason
        assert worker.process.wait(GONE_WITHIN_S) == 3
