"""Whether a model reasons first: who has the say, and what its template is told."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.shared.prompt.thinking import decide

SWITCHED = ("messages", "enable_thinking")


@pytest.mark.parametrize(
    ("asked", "effort", "server", "enabled"),
    [
        (None, None, None, None),
        (None, None, False, False),
        (None, None, True, True),
        (None, "none", True, False),
        (None, "low", False, True),
        (False, "high", True, False),
        (True, "none", False, True),
    ],
)
def test_the_requests_switch_beats_its_effort_beats_the_server_beats_the_model(
    asked: bool | None, effort: Any, server: bool | None, enabled: bool | None
) -> None:
    decided = decide(asked, effort, server, SWITCHED, "")
    assert decided.enabled is enabled
    assert decided.variables == ({} if enabled is None else {"enable_thinking": enabled})


def test_the_switch_has_the_name_that_the_template_reads() -> None:
    assert decide(True, None, None, ("thinking",), "").variables == {"thinking": True}
    assert decide(True, None, None, ("thinking", "enable_thinking"), "").variables == {
        "enable_thinking": True
    }
    assert decide(True, "high", None, ("messages",), "").variables == {}


@pytest.mark.parametrize(
    ("effort", "told"),
    [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "high")],
)
def test_a_depth_is_one_that_templates_know(effort: Any, told: str) -> None:
    assert decide(None, effort, None, ("reasoning_effort",), "").variables == {"reasoning_effort": told}


@pytest.mark.parametrize("effort", ["high", "xhigh"])
def test_the_deepest_depth_is_the_deepest_that_the_template_names(effort: Any) -> None:
    template = "{% if reasoning_effort == 'max' %}…{% elif reasoning_effort == 'high' %}…{% endif %}"
    assert decide(None, effort, None, ("reasoning_effort",), template).variables == {
        "reasoning_effort": "max"
    }


def test_no_effort_is_a_switch_where_there_is_one_and_else_the_least_depth() -> None:
    reads = ("reasoning_effort", "enable_thinking")
    assert decide(None, "none", None, reads, "").variables == {"enable_thinking": False}
    assert decide(None, "none", None, ("reasoning_effort",), "").variables == {"reasoning_effort": "low"}
