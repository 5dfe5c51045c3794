"""Conversions of tiny checkpoints, done in the test's process or in one that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.records import Recipe
from mlxpool.worker.colibri.convert.work import Order, Result, convert
from mlxpool.worker.colibri.sources import open_source
from mlxpool.worker.jobs import output
from mlxpool.worker.jobs.colibri_convert import empty_model
from tests.tools.expert_fill import fill

FOUR = Recipe(4, 64, "affine")
KEPT = Recipe(None, 0, "affine")
PLENTY = 1 << 50


class Told:
    """A teller that remembers, and may act."""

    def __init__(self, act: Callable[[float, str], None] = lambda _share, _stage: None) -> None:
        self.shares: list[float] = []
        self.stages: list[str] = []
        self._act = act

    def progress(self, share: float, stage: str, _detail: str = "") -> None:
        self.shares.append(share)
        if stage not in self.stages:
            self.stages.append(stage)
        self._act(share, stage)


def run(
    source: Path,
    target: Path,
    recipe: Recipe = FOUR,
    *,
    given: bool = False,
    verify: bool = True,
    told: Told | None = None,
    free_bytes: int = PLENTY,
) -> Result:
    return convert(
        Order(source, target, recipe, given, verify),
        told or Told(),
        empty_model,
        output.copy_others,
        lambda _: free_bytes,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def experts(folder: Path) -> dict[tuple[int, int, str], bytes]:
    """Each part of each expert as a slot would hold it where nothing is widened: by layer, expert, name."""
    source = open_source(artifacts.read(folder), "metal", "buffered")
    found: dict[tuple[int, int, str], bytes] = {}
    for number, layout in source.artifact.layouts.items():
        for expert in range(layout.experts):
            rows = {
                (part.projection, part.part): np.zeros(part.size_bytes, np.uint8) for part in layout.parts
            }
            fill(source, number, expert, rows)
            for (projection, part), row in rows.items():
                found[number, expert, f"{projection}.{part}"] = row.tobytes()
    source.close()
    return found


def stage(target: Path) -> Path:
    return target.parent / f".staging-{target.name}"


def main(source: str, target: str, share: str) -> None:
    """Convert, and die of SIGKILL where progress has come to `share`."""

    def die(reached: float, stage: str) -> None:
        if reached >= float(share) and stage != "read":
            os.kill(os.getpid(), signal.SIGKILL)

    run(Path(source), Path(target), told=Told(die))
