"""A kind of job that does as its configuration says: for tests of whatever shows, follows or ends jobs.

`scripted_up.py --scripted-job` knows it; run as a file it is the job's process. It takes `steps` steps and
tells of each a stage, figures and lines. Before step `hold_at` it waits until the file `gate` is there, which
is how a test has it stand still for as long as it looks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

if not __package__:
    # Started as a file: `tests` is imported from the folder that holds it.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import msgspec
from msgspec import Meta

from mlxpool.shared import tether
from mlxpool.shared.job_lines import Done, Failed, Log, Metric, Stage
from mlxpool.shared.job_teller import say

GATE_LOOK_S = 0.02
# A validation comes with every so manieth step.
VALID_EVERY = 5


class ScriptedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What it does."""

    name: Annotated[str, Meta(description="What it is called.")]
    steps: Annotated[int, Meta(description="Steps it takes.", ge=1, le=100_000)]
    model: Annotated[
        str | None, Meta(description="A model it works on."), Meta(extra_json_schema={"x-source": "model"})
    ] = None
    mode: Annotated[Literal["calm", "quick"], Meta(description="How it goes about it.")] = "calm"
    careful: Annotated[bool, Meta(description="Whether it takes care.")] = False
    hold_at: Annotated[int, Meta(description="The step before which it waits.", ge=0)] = 0
    gate: Annotated[
        str | None, Meta(description="The file it waits for."), Meta(extra_json_schema={"x-source": "file"})
    ] = None
    lines: Annotated[int, Meta(description="Lines it says in each step.", ge=0)] = 1
    end: Annotated[Literal["done", "failed", "crash"], Meta(description="How it ends.")] = "done"
    error: Annotated[str, Meta(description="Why it fails.")] = "it was told to fail"
    result: Annotated[dict[str, Any] | None, Meta(description="What it gives.")] = None
    rate: Annotated[float, Meta(description="A figure.", gt=0, le=1)] = 0.5
    words: Annotated[list[str] | None, Meta(description="Some words.")] = None


class ScriptedJob:
    """Kind "scripted"."""

    name = "scripted"
    summary = "Do as the test says."
    gpu = False
    positional = ("name",)
    config = ScriptedConfig

    def faults(self, config: ScriptedConfig, _here: Any) -> list[Any]:
        """A model that is named is one of the library's, and a name is not taken."""
        from mlxpool.parent.jobs.kinds.kind import Fault

        faults = []
        if config.model == "missing":
            faults.append(Fault("model", "there is no model 'missing' here"))
        if config.name == "taken":
            faults.append(Fault("name", "'taken' is taken; choose another"))
        return faults

    def needs(self, _config: ScriptedConfig, _here: Any) -> Any:
        from mlxpool.parent.jobs.kinds.kind import Needs

        return Needs()

    def argv(self, config: ScriptedConfig, _here: Any) -> list[str]:
        return [sys.executable, __file__, msgspec.json.encode(config).decode()]

    def env(self, _config: ScriptedConfig, _here: Any) -> Mapping[str, str]:
        return {}


def register() -> None:
    """Add it to the kinds there are. Before anything that runs jobs is imported."""
    from mlxpool.parent.jobs import kinds

    assert "mlxpool.parent.jobs.runner" not in sys.modules
    kinds.KINDS = (*kinds.KINDS, ScriptedJob())


def main(argv: list[str]) -> int:
    """argv: the configuration, --tether-fd, N."""
    tether.watch(int(argv[-1]))
    config = msgspec.json.decode(argv[0], type=ScriptedConfig)
    say(Stage("load", 0.0, "reading"))
    for step in range(1, config.steps + 1):
        while step == config.hold_at and config.gate and not Path(config.gate).exists():
            time.sleep(GATE_LOOK_S)
        say(Stage("work", step / config.steps, f"step {step} of {config.steps}"))
        figures = {"step": float(step), "train_loss": 3 / step, "speed": 100.0 + step}
        say(Metric(figures))
        if step % VALID_EVERY == 1:
            say(Metric({"step": float(step), "val_loss": 4 / step}))
        for line in range(config.lines):
            say(Log(f"said {(step - 1) * config.lines + line + 1}"))
    if config.end == "crash":
        raise RuntimeError(config.error)
    say(Failed(config.error) if config.end == "failed" else Done(config.result or {"steps": config.steps}))
    return int(config.end == "failed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
