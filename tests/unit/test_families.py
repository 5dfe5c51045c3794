"""The names that settings may use are those of the worker's tables."""

from __future__ import annotations

from mlxpool.shared.families import REASONING_FAMILY_NAMES, TOOL_FAMILY_NAMES
from mlxpool.shared.prompt.reasoning_families import HARMONY, REASONING_FAMILIES
from mlxpool.worker.text.tools.families import TOOL_FAMILY_NAMES as WORKERS


def test_settings_name_the_families_that_there_are() -> None:
    assert set(TOOL_FAMILY_NAMES) == set(WORKERS)
    assert set(REASONING_FAMILY_NAMES) == {*REASONING_FAMILIES, HARMONY}
