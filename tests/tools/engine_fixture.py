"""An engine in the test's own process as a pytest fixture: `start` gives one over a tiny model.

MLX is imported with the first one, not with the tests. Every test can ask for it (tests/conftest.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.tools import tiny_models
from tests.tools.tiny_fixture import TinyModels

if TYPE_CHECKING:
    from tests.tools.running_engine import Running

Start = Callable[..., "Awaitable[Running]"]


@pytest.fixture
def start(tiny: TinyModels) -> Iterator[Start]:
    from tests.tools.running_engine import Running

    started: list[Running] = []

    async def running(kind: tiny_models.Kind = "llama", **settings: Any) -> Running:
        started.append(Running(tiny(kind), **settings))
        return await started[-1].ready()

    yield running
    for one in started:
        one.stop()
