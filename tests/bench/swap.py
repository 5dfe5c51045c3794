"""A switch between two models that do not fit together: from the request to the first token.

Ours: a parent with a memory budget for one, two copies of the starter, requests to them in turn; each
one evicts, starts a process, loads and answers. Theirs: mlx_lm.server's own switch, which swaps the weights
inside a process that has imported everything, plus the time of `python -c 'import mlx_lm'`, which a process
of its own has to pay. Same folders, same environment (OpenBLAS preloaded on the CPU backend), same prompt;
one of each in turn. Each round asks something new, so that no prompt cache answers.

Twice ours: without a spare worker, against theirs plus the import; and with one, which has imported before
the request comes, against theirs alone. And once more with a model of a few kilobytes, where a cold start is
nothing but our own machinery.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.shared import backend
from tests.bench import common, streams
from tests.tools import tiny_models

RATIO_LIMIT = 1.2
SPARE_RATIO_LIMIT = 1.1
TINY_LIMIT_S = 0.6
# A spare has imported everything by then; nobody swaps models more often than this for long.
SPARE_REST_S = 3.0
# Of the bytes one copy plans: room for one, and for nothing like two.
BUDGET_OF_ONE = 1.5
MAX_TOKENS = 8
# A switch that takes longer has failed.
SWITCH_TIMEOUT_S = 120.0
# After an answer both servers are given the time to be idle.
REST_S = 0.3


def first_delta_s(port: int, model: str, prompt: str) -> float:
    """Seconds from the request to the first delta with text. Raises RuntimeError for any other answer."""
    request = streams.chat_request(str(port), model, prompt, temperature=0, max_tokens=MAX_TOKENS)
    request = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    start = time.monotonic()
    took = None
    raw = b""
    with socket.create_connection(("127.0.0.1", port), SWITCH_TIMEOUT_S) as client:
        client.sendall(request)
        while data := client.recv(streams.READ_BYTES):
            raw += data
            if took is None and has_text(raw):
                took = time.monotonic() - start
            if b"data: [DONE]" in raw:
                break
    if took is None or b"data: [DONE]" not in raw:
        raise RuntimeError(f"{model}: {raw[:1000].decode(errors='replace')}")
    return took


def has_text(raw: bytes) -> bool:
    """Whether a complete event with a non-empty content delta has come."""
    for line in raw.split(b"\n")[:-1]:
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:]).get("choices") or [{}]
            if choices[0].get("delta", {}).get("content"):
                return True
    return False


def planned_bytes(models: Path, scratch: Path) -> int:
    """What the parent reserves for one copy, asked of a parent; it warms the page cache as well."""
    port = common.free_port()
    argv = [common.console_script(), "up", "--home", str(scratch / "plan"), "--models", str(models)]
    with common.serving([*argv, "--port", str(port)], port, scratch / "plan.log") as server:
        first_delta_s(port, "starter-a", "Hello.")
        (worker,) = server.json("/api/pool")["workers"]
        return int(worker["planned_bytes"])


def copy_by_link(starter: Path, models: Path) -> None:
    """Two model folders that share their files' bytes, and so the page cache."""
    for name in ("starter-a", "starter-b"):
        (models / name).mkdir(parents=True)
        for file in starter.iterdir():
            if file.is_file():
                os.link(file, models / name / file.name)


IMPORT, THEIRS = "python -c 'import mlx_lm'", "mlx_lm.server's switch"
OURS, OURS_SPARE = "mlxpool's swap, no spare", "mlxpool's swap, with a spare"
TINY = "mlxpool's cold start of a tiny model, with a spare"

# A contender: model and prompt → seconds.
Contender = Callable[[str, str], float]


def measure(report: common.Report, starter: Path, rounds: int, *, theirs_only: bool) -> None:
    """Rounds of one switch of theirs, one of ours and one import, in turn."""
    env = backend.worker_environment(backend.detect(), common.clean_environment())
    report.settings["LD_PRELOAD"] = env.get("LD_PRELOAD", "")
    # Beside the starter, because hard links stay on one file system.
    with (
        tempfile.TemporaryDirectory(prefix=".mlxpool-bench-", dir=starter.parent) as name,
        contextlib.ExitStack() as servers,
    ):
        scratch = Path(name)
        models = scratch / "models"
        copy_by_link(starter, models)
        their_port = common.free_port()
        argv = [sys.executable, "-m", "mlx_lm", "server", "--port", str(their_port)]
        argv += ["--model", str(models / "starter-a")]
        servers.enter_context(common.serving(argv, their_port, scratch / "theirs.log", env=env))
        contenders: dict[str, Contender] = {
            THEIRS: lambda model, prompt: first_delta_s(their_port, str(models / model), prompt),
            IMPORT: lambda _model, _prompt: common.timed_run([sys.executable, "-c", "import mlx_lm"], env),
        }
        if not theirs_only:
            budget = int(planned_bytes(models, scratch) * BUDGET_OF_ONE)
            report.settings["memory_budget_bytes"] = budget
            plain = servers.enter_context(our_server(scratch, "plain", models, budget, spare=False))
            spared = servers.enter_context(our_server(scratch, "spared", models, budget, spare=True))
            tiny_models.make("llama", scratch / "tiny" / "tiny")
            tiny = servers.enter_context(our_server(scratch, "cold", scratch / "tiny", budget, spare=True))
            contenders = {
                OURS: lambda model, prompt: our_swap_s(plain, model, prompt),
                OURS_SPARE: lambda model, prompt: rested(lambda: our_swap_s(spared, model, prompt)),
                TINY: lambda _model, prompt: rested(lambda: cold_start_s(tiny, prompt)),
                **contenders,
            }
        for contender in contenders.values():
            contender("starter-a", "Hello.")
        taken = take_rounds(report, rounds, contenders)
    if theirs_only:
        return
    whole = [took for took in taken if len(took) == len(contenders)]
    plain_ratios = report.row("no spare / (theirs + import), per round", "1")
    plain_ratios.samples = [took[OURS] / (took[THEIRS] + took[IMPORT]) for took in whole]
    spare_ratios = report.row("with a spare / theirs, per round", "1")
    spare_ratios.samples = [took[OURS_SPARE] / took[THEIRS] for took in whole]
    cold = next(row for row in report.rows if row.name == TINY)
    report.targets = [
        common.Target(plain_ratios.name, plain_ratios.settle().median, RATIO_LIMIT, "1"),
        common.Target(spare_ratios.name, spare_ratios.settle().median, SPARE_RATIO_LIMIT, "1"),
        common.Target(cold.name, cold.settle().median, TINY_LIMIT_S, "s"),
    ]


def our_server(
    scratch: Path, name: str, models: Path, budget: int, *, spare: bool
) -> contextlib.AbstractContextManager[common.Server]:
    """A parent of its own home over these models."""
    port = common.free_port()
    argv = [common.console_script(), "up", "--home", str(scratch / name), "--models", str(models)]
    argv += ["--port", str(port), "--memory-budget", str(budget)]
    env = {**common.clean_environment(), "MLXPOOL_POOL_SPARE_WORKER": str(spare).lower()}
    return common.serving(argv, port, scratch / f"{name}.log", env=env)


def rested(contender: Callable[[], float]) -> float:
    """After a rest in which a spare comes up."""
    time.sleep(SPARE_REST_S)
    return contender()


def cold_start_s(server: common.Server, prompt: str) -> float:
    """From the request to the first token of a model that is not loaded; it is unloaded afterwards."""
    took = first_delta_s(server.port, "tiny", prompt)
    server.json("/api/models/tiny/unload", {"force": False})
    deadline = time.monotonic() + SWITCH_TIMEOUT_S
    while server.json("/v1/models/tiny")["state"] != "absent":
        if time.monotonic() > deadline:
            raise RuntimeError("the tiny model does not leave")
        time.sleep(REST_S)
    return took


def our_swap_s(server: common.Server, model: str, prompt: str) -> float:
    """A swap of ours. Raises RuntimeError when two models hold weights after it."""
    took = first_delta_s(server.port, model, prompt)
    weightless = ("absent", "starting", "failed")
    holding = [w for w in server.json("/api/pool")["workers"] if w["state"] not in weightless]
    if len(holding) > 1:
        raise RuntimeError(f"two models hold weights: {[(w['model'], w['state']) for w in holding]}")
    return took


def take_rounds(
    report: common.Report, rounds: int, contenders: dict[str, Contender]
) -> list[dict[str, float]]:
    """Seconds by contender, per round; all have starter-a loaded before the first."""
    rows = {name: report.row(name, "s") for name in contenders}
    taken: list[dict[str, float]] = []
    for n in range(rounds):
        model = ("starter-b", "starter-a")[n % 2]
        prompt = f"Round {n}. What is the capital of France? Answer in one sentence."
        taken.append({})
        for name, contender in contenders.items():
            time.sleep(REST_S)
            try:
                taken[-1][name] = contender(model, prompt)
                rows[name].samples.append(taken[-1][name])
            except (OSError, RuntimeError) as err:
                rows[name].failed.append(f"round {n}: {err}")
    return taken


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--starter", type=Path, required=True, help="the starter's folder, in float32 on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--theirs-only", action="store_true", help="the baselines alone")
    args = parser.parse_args()
    if importlib.util.find_spec("torch") is not None:
        print(
            "swap: torch is installed here, and would slow the baseline's import: use an environment without"
        )
        return 2
    config = json.loads((args.starter / "config.json").read_text())
    report = common.report(
        "swap",
        rounds=args.rounds,
        max_tokens=MAX_TOKENS,
        backend=backend.detect(),
        weights_bytes=sum(file.stat().st_size for file in args.starter.glob("*.safetensors")),
        dtype=config.get("torch_dtype") or config.get("dtype"),
    )
    measure(report, args.starter.resolve(), args.rounds, theirs_only=args.theirs_only)
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
