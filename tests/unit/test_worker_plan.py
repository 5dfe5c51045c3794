"""Plans: precedence of sampling settings, clamping to the context, seeds."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.shared.api.chat import ChatMessage, ChatRequest
from mlxpool.shared.control import Launch
from mlxpool.shared.errors import ApiError
from mlxpool.worker.request.plan import Plan, defaults, make_plan

EOS = frozenset({2})


def launch(**fields: Any) -> Launch:
    base: dict[str, Any] = {
        "model": "m", "path": "p", "socket": "s", "context": 100, "batch": 8, "kv_pool_bytes": 1,
        "memory_limit_bytes": 1,
    }  # fmt: skip
    return Launch(**{**base, **fields})


def plan(
    prompt: int = 10, config: dict[str, Any] | None = None, of: Launch | None = None, **fields: Any
) -> Plan:
    request = ChatRequest(messages=(ChatMessage("user", "x"),), **fields)
    return make_plan(request, list(range(prompt)), defaults(of or launch(), config or {}), EOS)


def test_a_request_beats_the_launch_beats_the_folder_beats_the_default() -> None:
    folder = {"temperature": 0.3, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    assert plan().sampling.temperature == 0.7
    assert plan().sampling.top_p == 1.0
    assert plan(config=folder).sampling.temperature == 0.3
    assert plan(config=folder, of=launch(temperature=0.4)).sampling.temperature == 0.4
    assert plan(config=folder, of=launch(temperature=0.4), temperature=0.0).sampling.temperature == 0.0
    assert plan(config=folder).sampling.top_p == 0.9
    assert plan(config=folder).sampling.top_k == 40
    assert plan(config=folder, top_k=0).sampling.top_k == 0
    assert plan(config=folder).sampling.min_p == 0.05
    assert plan(config=folder, of=launch(top_p=0.8, top_k=5)).sampling.top_k == 5


@pytest.mark.parametrize("junk", ["hot", None, True, -1, 1e9, [1]])
def test_nonsense_in_the_folder_is_ignored(junk: object) -> None:
    config = {"temperature": junk, "top_p": junk, "top_k": junk if junk != 1e9 else -5, "min_p": junk}
    assert plan(config=config, seed=1) == plan(seed=1)


def test_max_tokens_is_clamped_to_the_room_left() -> None:
    assert plan(prompt=10, max_tokens=1000).max_tokens == 90
    assert plan(prompt=10, max_tokens=5).max_tokens == 5
    assert plan(prompt=10).max_tokens == 90
    assert plan(prompt=10, of=launch(max_tokens=7)).max_tokens == 7
    assert plan(prompt=99).max_tokens == 1


def test_only_somebodys_limit_counts_as_one() -> None:
    assert plan(max_tokens=5).limited
    assert plan(of=launch(max_tokens=5)).limited
    assert not plan().limited


@pytest.mark.parametrize("prompt", [100, 101, 5000])
def test_a_prompt_without_room_for_one_token_is_refused_with_both_numbers(prompt: int) -> None:
    with pytest.raises(ApiError) as caught:
        plan(prompt=prompt)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert str(prompt) in caught.value.message
    assert "100" in caught.value.message


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ApiError, match="empty prompt"):
        plan(prompt=0)


def test_seeds_are_kept_or_drawn_fresh() -> None:
    assert plan(seed=5).sampling.seed == 5
    assert plan(seed=-1).sampling.seed == 2**64 - 1
    assert len({plan().sampling.seed for _ in range(100)}) == 100
