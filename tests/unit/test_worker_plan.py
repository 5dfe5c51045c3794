"""Plans: precedence of sampling settings, clamping to the context, seeds."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.shared.api.chat import ChatRequest
from mlxpool.shared.api.messages import ChatMessage
from mlxpool.shared.control import Launch
from mlxpool.shared.errors import ApiError
from mlxpool.worker.request.plan import Plan, Prompt, ThinkingLimit, Vocabulary, defaults, make_plans
from mlxpool.worker.text.format import AnswerFormat

VOCABULARY = Vocabulary(500, frozenset({2}), (10,))


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
    return plans_of(request, prompt, config, of)[0]


def plans_of(
    request: ChatRequest,
    prompt: int = 10,
    config: dict[str, Any] | None = None,
    of: Launch | None = None,
    reasons: bool = True,
) -> tuple[Plan, ...]:
    asked = Prompt(tuple(range(prompt)), AnswerFormat(stops=request.stop), reasons)
    return make_plans(request, asked, defaults(of or launch(), config or {}), VOCABULARY)


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
    config = {
        "temperature": junk,
        "top_p": junk,
        "top_k": junk if junk != 1e9 else -5,
        "min_p": junk,
        "repetition_penalty": junk,
    }
    assert plan(config=config, seed=1) == plan(seed=1)


def test_max_tokens_is_clamped_to_the_room_left() -> None:
    assert plan(prompt=10, max_tokens=1000).max_tokens == 90
    assert plan(prompt=10, max_tokens=5).max_tokens == 5
    assert plan(prompt=10).max_tokens == 90
    assert plan(prompt=10, of=launch(max_tokens=7)).max_tokens == 7
    assert plan(prompt=99).max_tokens == 1


def test_a_protocols_usual_limit_is_for_those_that_set_none() -> None:
    assert plan(prompt=10, usual_max_tokens=20).max_tokens == 20
    assert plan(prompt=10, usual_max_tokens=20).limited
    assert plan(prompt=10, usual_max_tokens=20, of=launch(max_tokens=30)).max_tokens == 30
    assert plan(prompt=10, usual_max_tokens=20, max_tokens=40).max_tokens == 40
    assert plan(prompt=95, usual_max_tokens=20).max_tokens == 5


def test_a_limit_of_thinking_that_can_not_be_met_is_none() -> None:
    limit = ThinkingLimit(20, {"</think>": (1,)})
    prompt = Prompt((1, 2), AnswerFormat(), thinking=limit)

    def limit_of(max_tokens: int) -> ThinkingLimit | None:
        request = ChatRequest(messages=(), max_tokens=max_tokens)
        return make_plans(request, prompt, defaults(launch(), {}), VOCABULARY)[0].thinking

    assert limit_of(21) == limit
    assert limit_of(20) is None


@pytest.mark.parametrize("ids", [(1, 2, 99_999), (99_999, 2, 99_999)])
def test_an_id_that_is_no_token_is_named_by_its_place(ids: tuple[int, ...]) -> None:
    prompt = Prompt(ids, AnswerFormat(), field="prompt[3]")
    with pytest.raises(ApiError) as caught:
        make_plans(ChatRequest(messages=()), prompt, defaults(launch(), {}), VOCABULARY)
    assert caught.value.param == f"prompt[3][{ids.index(99_999)}]"
    assert "99999" in caught.value.message


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


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest(messages=(ChatMessage("user", "x"),), **fields)


def test_without_reasoning_a_folders_temperature_is_at_most_the_servers_default() -> None:
    hot = {"temperature": 1.0}
    assert plans_of(chat(), config=hot, reasons=False)[0].sampling.temperature == 0.7
    assert plans_of(chat(), config={"temperature": 0.2}, reasons=False)[0].sampling.temperature == 0.2
    assert plans_of(chat(temperature=1.5), config=hot, reasons=False)[0].sampling.temperature == 1.5
    told = launch(temperature=1.2)
    assert plans_of(chat(), config=hot, of=told, reasons=False)[0].sampling.temperature == 1.2
    assert plans_of(chat(), config=hot)[0].sampling.temperature == 1.0


def test_each_choice_has_a_seed_of_its_own_and_the_first_the_requests() -> None:
    plans = plans_of(chat(n=4, seed=7))
    seeds = [plan.sampling.seed for plan in plans]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert plans_of(chat(n=4, seed=7)) == plans
    assert plans_of(chat(n=2, seed=7)) == plans[:2]
    assert all(plan.ids == plans[0].ids for plan in plans)


@pytest.mark.parametrize("token", [-1, 500, 10**12])
def test_a_bias_on_a_token_that_there_is_not_is_refused_by_its_number(token: int) -> None:
    with pytest.raises(ApiError, match=f"{token}; this model's tokens are 0 to 499") as caught:
        plans_of(chat(logit_bias=((3, 1.0), (token, 1.0))))
    assert caught.value.param == "logit_bias"


def test_penalties_and_xtc_are_the_requests_or_off() -> None:
    sampling = plan(presence_penalty=0.5, frequency_context=0, xtc_probability=0.3).sampling
    assert (sampling.presence_penalty, sampling.presence_context) == (0.5, 20)
    assert (sampling.frequency_penalty, sampling.frequency_context) == (0.0, 0)
    assert (sampling.xtc_probability, sampling.xtc_threshold) == (0.3, 0.1)
    assert plan(config={"repetition_penalty": 1.05}).sampling.repetition_penalty == 1.05
    assert (
        plan(config={"repetition_penalty": 1.05}, repetition_penalty=1.0).sampling.repetition_penalty == 1.0
    )
    assert plan().xtc_keeps == (10,)
