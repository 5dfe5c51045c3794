"""A home with tiny models, and jobs' work done in the test's own process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxpool.parent.jobs.kinds.colibri_convert import ColibriConvert
from mlxpool.parent.jobs.kinds.evaluate import Evaluate
from mlxpool.parent.jobs.kinds.finetune import Finetune
from mlxpool.parent.jobs.kinds.fuse import Fuse
from mlxpool.parent.jobs.kinds.kind import Here
from mlxpool.parent.jobs.kinds.quantize import Quantize
from mlxpool.parent.library import Library
from mlxpool.shared.config import Settings

KINDS: dict[str, Any] = {
    kind.name: kind for kind in (Quantize(), Finetune(), Fuse(), Evaluate(), ColibriConvert())
}


class Told:
    """A teller that remembers."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.shares: list[float] = []

    def progress(self, share: float, _stage: str, _detail: str = "") -> None:
        self.shares.append(share)

    def bytes(self, share: float, _stage: str, _done: int, _total: int) -> None:
        self.shares.append(share)

    def metric(self, **values: float) -> None:
        self.metrics.append(values)

    def series(self, name: str) -> list[tuple[float, float]]:
        """(iteration, value) of each metric that has it."""
        return [(one["iteration"], one[name]) for one in self.metrics if name in one]


class Home:
    """A home, asked as the runner asks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "models").mkdir(parents=True)
        settings = Settings(home=root)
        self.here = Here(settings, Library(settings, root / "no-hub"), "cpu")
        self.told = Told()

    def add(self, folder: Path, name: str) -> Path:
        """A copy of a model's folder as a model of this home."""
        return Path(shutil.copytree(folder, self.root / "models" / name))

    def faults(self, kind: str, **config: Any) -> list[str]:
        """Each fault as `field: message`."""
        read = msgspec.convert(config, KINDS[kind].config)
        return [f"{fault.field}: {fault.message}" for fault in KINDS[kind].faults(read, self.here)]

    def task(self, kind: str, of: type[Any], **config: Any) -> Any:
        """What the kind would hand to its process; it must have no faults."""
        assert self.faults(kind, **config) == []
        read = msgspec.convert(config, KINDS[kind].config)
        argv = KINDS[kind].argv(read, self.here)
        return msgspec.json.decode(argv[argv.index("--task") + 1], type=of)

    def work(self, module: Any, kind: str, **config: Any) -> dict[str, Any]:
        """The result of the work, done here."""
        self.told = Told()
        result: dict[str, Any] = module.work(self.task(kind, module.TASK, **config), self.told)
        return result

    def hidden(self, folder: str = "models") -> list[str]:
        """What has been left that is no output."""
        return [path.name for path in (self.root / folder).iterdir() if path.name.startswith(".staging")]


MakeHome = Callable[[], Home]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")
