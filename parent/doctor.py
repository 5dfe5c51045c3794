"""What is wrong with this machine, and what to do about it: facts in, findings out. Pure.

A finding is `fail` where the server can't do its work, `warn` where it does it badly or not for long, and
each of those says what to do. A fact that is merely unusual is `ok`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from mlxpool.parent.service.manager import Status
from mlxpool.parent.service.spec import EXIT_BAD_CONFIG
from mlxpool.shared.backend import INSTALL_HINT, Backend
from mlxpool.shared.memory import Budget, MemoryPlan
from mlxpool.shared.probe import ProbeReport
from mlxpool.shared.units import format_size

Verdict = Literal["ok", "warn", "fail"]
Port = Literal["free", "ours", "taken", "unusable"]

# Reference BLAS does 2 to 3 GFLOP/s, OpenBLAS 60 and more; between them lies a very slow machine.
_SLOW_GFLOPS = 15.0
# A model of 5 GB then takes 25 s to load, and everything restored from disk as many times longer.
_SLOW_READ = 200e6
# The prompt cache writes behind the answers; below this it falls behind one stream of a small model.
_SLOW_WRITE = 50e6
# Logs and state fail before long; a model of 8 billion parameters at 4 bits takes 4.5 GB.
_NO_ROOM = 256 * 2**20
_LITTLE_ROOM = 10 * 10**9
# 64 waiting requests for each of a few models, two descriptors each, and the workers' pipes.
_FEW_OPEN_FILES = 1024
_OTHERS = 0o077


class Rate(msgspec.Struct, frozen=True):
    """Bytes a second of one large file, past the system's cache."""

    write: float
    read: float


class ModelFact(msgspec.Struct, frozen=True):
    """A model of the library: what is wrong with its folder, or its plan."""

    name: str
    fault: str | None
    plan: MemoryPlan | None


class Running(msgspec.Struct, frozen=True):
    """The running server of this home. answers: whether it did when it was asked."""

    pid: int
    url: str
    reserved_bytes: int
    answers: bool = True


class Facts(msgspec.Struct, frozen=True):
    """Everything the doctor judges. Sizes in bytes; modes are permission bits, None where nothing is.

    home_option: see `hints.home_option`.
    """

    python: str
    system: str
    chip: str
    versions: dict[str, str]
    backend: Backend
    openblas: str | None
    probe: ProbeReport | None
    probe_fault: str
    home: Path
    home_option: str
    home_mode: int | None
    home_writable: bool
    config: Path | None
    config_mode: int | None
    has_keys: bool
    disk_free: int
    disk_rate: Rate | None
    memory_total: int
    memory_available: int
    budget: Budget
    running: Running | None
    host: str
    port: int
    port_state: Port
    port_fault: str
    manager: str
    service: Status
    service_lack: str | None
    models: list[ModelFact]
    shadowed: list[Path]
    open_files: int
    open_files_lack: str | None


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. advice: what to do; empty where nothing is to be done."""

    name: str
    status: Verdict
    summary: str
    advice: str = ""


def findings(facts: Facts) -> list[Finding]:
    """The whole report, in the order of `mlxpool doctor`."""
    return [
        _python(facts),
        _backend(facts),
        *_blas(facts),
        _memory(facts),
        _home(facts),
        *_config(facts),
        _room(facts),
        *_disk(facts),
        _port(facts),
        _service(facts),
        _open_files(facts),
        *_models(facts),
    ]


def _command(facts: Facts, words: str) -> str:
    """As `hints.command`."""
    return f"`mlxpool {words}{facts.home_option}`"


def _python(facts: Facts) -> Finding:
    summary = f"{facts.python}, {facts.system} {facts.chip}"
    if facts.system == "Darwin" and facts.chip != "arm64":
        return Finding(
            "python",
            "fail",
            summary,
            "MLX needs Apple silicon and an arm64 Python: install one",
        )
    return Finding("python", "ok", summary)


def _backend(facts: Facts) -> Finding:
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    if facts.backend == "none":
        return Finding("backend", "fail", f"none ({versions or 'no mlx'})", INSTALL_HINT)
    if "mlx-lm" not in facts.versions:
        return Finding("backend", "fail", f"{facts.backend} ({versions})", "install mlx-lm")
    if facts.probe is None:
        advice = {
            "cuda": "see that nvidia-smi shows the GPU and that its driver is new enough for CUDA 13",
            "metal": "see that macOS is new enough for this mlx, and that a GPU is there (not in every VM)",
        }.get(facts.backend, "install mlx again: pip install --force-reinstall mlx")
        return Finding("backend", "fail", f"{facts.backend} does not work: {facts.probe_fault}", advice)
    return Finding("backend", "ok", f"{facts.backend} on {facts.probe.name} ({versions})")


def _blas(facts: Facts) -> Iterator[Finding]:
    """On the CPU backend alone: elsewhere products are the GPU's business."""
    if facts.backend != "cpu" or facts.probe is None:
        return
    rate = facts.probe.float32_gflops
    summary = f"{facts.openblas or 'the reference one of MLX'}, {rate:.0f} GFLOP/s"
    if facts.openblas is None:
        yield Finding(
            "blas",
            "warn",
            summary,
            "install OpenBLAS, prompts are read about fifteen times as fast with it; "
            "on Debian: apt-get install libopenblas0-pthread",
        )
    elif rate < _SLOW_GFLOPS:
        yield Finding("blas", "warn", summary, "slow for OpenBLAS: busy, or a thread count set?")
    else:
        yield Finding("blas", "ok", summary)


def _memory(facts: Facts) -> Finding:
    held = facts.running.reserved_bytes if facts.running is not None else 0
    usable = facts.memory_available + held
    budget = facts.budget.total_bytes
    prompts = facts.budget.prompt_cache_bytes
    summary = (
        f"{format_size(facts.budget.models_bytes)} for models"
        f"{f' and {format_size(prompts)} for their prompts' if prompts else ''},"
        f" of {format_size(facts.memory_total)}; "
        f"{format_size(usable)} not used by other programs"
    )
    if budget > facts.memory_total:
        return Finding("memory", "fail", summary, "lower [pool] memory_budget: this is more than there is")
    working_set = facts.probe.working_set_bytes if facts.probe is not None else None
    if working_set is not None and budget > working_set:
        return Finding(
            "memory",
            "warn",
            f"{summary}; the GPU recommends {format_size(working_set)} at most",
            f'set [pool] memory_budget = "{working_set // 10**9}GB"',
        )
    if budget > usable:
        return Finding(
            "memory",
            "warn",
            summary,
            "end other programs, or lower [pool] memory_budget",
        )
    return Finding("memory", "ok", summary)


def _home(facts: Facts) -> Finding:
    if not facts.home_writable:
        return Finding(
            "home", "fail", f"{facts.home} can't be written", "change its owner, or take another with --home"
        )
    if facts.home_mode is None:
        return Finding("home", "ok", f"{facts.home}, not there yet: {_command(facts, 'up')} makes it")
    if facts.home_mode & 0o022:
        return Finding(
            "home",
            "warn",
            f"{facts.home} can be changed by other users (mode {facts.home_mode:04o})",
            f"chmod go-w {facts.home}",
        )
    return Finding("home", "ok", f"{facts.home} (mode {facts.home_mode:04o})")


def _config(facts: Facts) -> Iterator[Finding]:
    """The settings were read, or there would be no facts: what is left is who else can read them."""
    if facts.config is None:
        yield Finding("config", "ok", "no config file: the defaults")
    elif facts.has_keys and facts.config_mode is not None and facts.config_mode & _OTHERS:
        yield Finding(
            "config",
            "warn",
            f"{facts.config} holds API keys and others can read it (mode {facts.config_mode:04o})",
            f"chmod 600 {facts.config}",
        )
    else:
        yield Finding("config", "ok", str(facts.config))


def _room(facts: Facts) -> Finding:
    summary = f"{format_size(facts.disk_free)} free for {facts.home}"
    if facts.disk_free < _NO_ROOM:
        return Finding("room", "fail", summary, "make room: logs and state can't be written before long")
    if facts.disk_free < _LITTLE_ROOM:
        return Finding(
            "room", "warn", summary, "make room, or take another disk with --home: models are several GB each"
        )
    return Finding("room", "ok", summary)


def _disk(facts: Facts) -> Iterator[Finding]:
    rate = facts.disk_rate
    if rate is None:
        return
    summary = f"reads {format_size(rate.read)}/s, writes {format_size(rate.write)}/s"
    if rate.read < _SLOW_READ or rate.write < _SLOW_WRITE:
        yield Finding(
            "disk",
            "warn",
            summary,
            "models load at this rate: put the home on a faster disk",
        )
    else:
        yield Finding("disk", "ok", summary)


def _port(facts: Facts) -> Finding:
    where = f"{facts.host}:{facts.port}"
    if facts.running is not None:
        if not facts.running.answers:
            return Finding(
                "port",
                "fail",
                f"the server at {facts.running.url} (pid {facts.running.pid}) does not answer",
                f"{_command(facts, 'down')} stops it; if that fails, kill -9 {facts.running.pid}",
            )
        said = f"served at {facts.running.url} (pid {facts.running.pid})"
        if facts.port_state in ("ours", "free"):
            return Finding("port", "ok", said)
    if facts.port_state == "taken":
        return Finding(
            "port",
            "fail",
            f"{where} is taken by another program",
            f"`lsof -i :{facts.port}` names it; end it, or take another with [server] port",
        )
    if facts.port_state == "unusable":
        return Finding("port", "fail", f"{where}: {facts.port_fault}", "set another [server] host or port")
    return Finding("port", "ok", f"{where} is free")


def _service(facts: Facts) -> Finding:
    status = facts.service
    summary = f"{status.state} ({facts.manager})"
    if status.state == "absent":
        return Finding("service", "ok", "not installed; `mlxpool service install` serves from login on")
    if facts.service_lack is not None:
        return Finding(
            "service", "warn", f"{summary}: {facts.service_lack}", "`mlxpool service install` again"
        )
    if status.state == "failed":
        code = f", exit code {status.exit_code}" if status.exit_code is not None else ""
        advice = "`mlxpool service status` shows its last words"
        if status.exit_code == EXIT_BAD_CONFIG:
            advice += "; its settings are bad: mend them, then `mlxpool service restart`"
        return Finding("service", "fail", f"{summary}{code}", advice)
    if status.state == "unknown":
        return Finding("service", "warn", f"{summary}: {status.detail}", "is this user logged in?")
    if status.state == "stopped":
        return Finding("service", "warn", summary, "`mlxpool service restart` starts it")
    return Finding("service", "ok", f"{summary}, pid {status.pid}")


def _open_files(facts: Facts) -> Finding:
    # getrlimit's "no limit" is the largest number, or -1.
    unlimited = facts.open_files < 0 or facts.open_files > 2**40
    summary = "no limit" if unlimited else f"{facts.open_files} at most in this shell"
    if facts.open_files_lack is not None:
        return Finding("files", "fail", summary, facts.open_files_lack)
    if not unlimited and facts.open_files < _FEW_OPEN_FILES:
        return Finding(
            "files",
            "warn",
            summary,
            f"`ulimit -n 8192` before {_command(facts, 'up')}; the service sets its own limit",
        )
    return Finding("files", "ok", summary)


def _models(facts: Facts) -> Iterator[Finding]:
    if not facts.models:
        pull = _command(facts, "pull starter")
        yield Finding("models", "warn", "none on this machine", f"{pull} fetches a small one")
    bad = 0
    for model in facts.models:
        if model.fault is not None:
            bad += 1
            yield Finding(
                "models",
                "warn",
                f"{model.name} is broken: {model.fault}",
                "fetch it again or remove it",
            )
        elif model.plan is not None and model.plan.verdict == "does_not_fit":
            bad += 1
            context = model.plan.fitting_context
            advice = (
                f'set [models."{model.name}"] context = {context}, or a larger [pool] memory_budget'
                if context
                else "it needs a larger [pool] memory_budget, or a smaller quantisation"
            )
            yield Finding("models", "warn", f"{model.name} {model.plan.explanation}", advice)
        elif model.plan is not None and model.plan.asked_context:
            bad += 1
            yield Finding(
                "models",
                "warn",
                f"{model.name} {model.plan.explanation}",
                f'set [models."{model.name}"] context no higher than the model\'s own, or leave it out',
            )
    if facts.models and not bad:
        count = len(facts.models)
        summary = "1 model, and it fits" if count == 1 else f"{count} models, and each fits"
        yield Finding("models", "ok", summary)
    for path in facts.shadowed:
        yield Finding("models", "warn", f"{path} is not served: another model has its name", "rename it")
