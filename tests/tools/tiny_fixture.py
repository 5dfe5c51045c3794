"""Tiny models as pytest fixtures: made once per session, in a process of their own.

`tiny` gives a function from a kind of tests/tools/tiny_models.py to its folder.
Every test can ask for it (tests/conftest.py).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools import tiny_models

TinyModels = Callable[[tiny_models.Kind], Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    made: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("tiny")

    def folder(kind: tiny_models.Kind) -> Path:
        if kind not in made:
            # Apart from the test's process: it need not hold MLX, nor torch where that is installed.
            subprocess.run(
                [sys.executable, tiny_models.__file__, kind, str(root / kind)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            made[kind] = root / kind
        return made[kind]

    return folder
