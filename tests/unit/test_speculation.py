"""Rows that are drafted: the same answers as without, what is counted, and what is left in the caches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlxpool.shared.control import CacheLaunch
from mlxpool.worker.engine.speculation import Draw, can_rewind
from mlxpool.worker.request.plan import Plan
from mlxpool.worker.text.events import Failure, Finish, Speculation, Usage
from mlxpool.worker.text.format import AnswerFormat
from mlxpool.worker.wire.messages import message_usage
from mlxpool.worker.wire.responses_usage import response_usage
from mlxpool.worker.wire.usage import usage_body
from tests.tools.engine_fixture import Start
from tests.tools.running_engine import Running, plan, until
from tests.unit.test_worker_constraint import Script

PROMPTS = [[(place * 7 + length) % 256 for place in range(length)] for length in (1, 2, 3, 20, 31, 64, 100)]


class Oracle:
    """Knows answers beforehand, and is wrong on purpose in one of `wrong` guesses. Notes all calls."""

    def __init__(self, ahead: int, answers: Sequence[Sequence[int]], wrong: int = 0) -> None:
        self.ahead = ahead
        self._answers = [list(answer) for answer in answers]
        self._wrong = wrong
        self._random = random.Random(5)
        self.calls: list[str] = []
        self.fail = False

    def open(self) -> None:
        self.calls.append("open")

    def propose(self, ids: Sequence[int], count: int, draw: Draw) -> list[int]:  # noqa: ARG002 - the protocol
        self.calls.append("propose")
        if self.fail:
            self.fail = False
            raise RuntimeError("no draft today")
        held = list(ids)
        known = next(
            (one for one in self._answers if one[: len(held)] == held and len(one) > len(held)), held
        )
        guesses = known[len(held) : len(held) + count]
        if self._wrong:
            guesses = [(one + (self._random.randrange(self._wrong) == 0)) % 256 for one in guesses]
        return guesses

    def close(self) -> None:
        self.calls.append("close")


class Chain:
    """The model itself as its own draft, with caches of its own: draws as the row will."""

    ahead = 3

    def __init__(self, model: Any, make_cache: Callable[[], list[Any]], blur: float) -> None:
        self._model, self._make_cache, self._blur = model, make_cache, blur

    def open(self) -> None: ...

    def close(self) -> None: ...

    def propose(self, ids: Sequence[int], count: int, draw: Draw) -> list[int]:
        held, caches = list(ids), self._make_cache()
        guesses: list[int] = []
        fed = held
        for ahead in range(count):
            logits = self._model(mx.array([fed]), cache=caches)[:, -1, :]
            guesses.append(int(draw(logits * self._blur, ahead).item()))
            fed = guesses[-1:]
        return guesses


async def answers_of(running: Running, plans: Sequence[Plan]) -> list[list[int]]:
    """All ids of each row, prompt and answer, asked one after the other."""
    ids: list[list[int]] = []
    for of in plans:
        client, row = running.submit(of)
        await asyncio.wait_for(client.ended.wait(), 60)
        assert isinstance(client.events[-1], Finish), client.events
        ids.append(row.ids)
    return ids


@pytest.mark.parametrize(("ahead", "wrong"), [(1, 2), (3, 0), (3, 1), (5, 2)])
async def test_a_greedy_answer_is_that_without_drafts_whatever_the_drafts_are(
    start: Start, ahead: int, wrong: int
) -> None:
    plans = [plan(prompt, max_tokens=30) for prompt in PROMPTS]
    expected = await answers_of(await start(), plans)
    oracle = Oracle(ahead, expected, wrong)
    drafted = await start(draft=lambda _: oracle)
    assert await answers_of(drafted, plans) == expected


async def test_drafts_that_come_save_passes_and_are_counted(start: Start) -> None:
    prompt = PROMPTS[4]
    (expected,) = await answers_of(await start(), [plan(prompt, max_tokens=21)])
    for ahead, calls in ((1, 11), (3, 6), (5, 4), (30, 1)):
        running = await start(draft=lambda _, ahead=ahead: Oracle(ahead, [expected]))  # type: ignore[misc]
        client = await running.ask(plan(prompt, max_tokens=21))
        told = Speculation(drafted=21 - calls, accepted=21 - calls, target_calls=calls)
        assert client.usage == Usage(31, 21, speculation=told)
        # The prompt's chunks, then the verified tokens.
        assert [shape[1] for shape in running.model.shapes[2:]][:1] == [min(ahead, 20) + 1]
        assert len(running.model.shapes) == 2 + calls
        assert running.engine.counters.tokens == 21


async def test_drafts_that_never_come_cost_passes_of_their_width_and_nothing_else(start: Start) -> None:
    prompt = PROMPTS[4]
    (expected,) = await answers_of(await start(), [plan(prompt, max_tokens=10)])
    running = await start(draft=lambda _: Oracle(3, [expected], wrong=1))
    client = await running.ask(plan(prompt, max_tokens=10))
    # Three, but near the end no more than could be told: 3 for seven rounds, then 2, 1 and 0.
    assert client.usage.speculation == Speculation(drafted=24, accepted=0, target_calls=10)


SAMPLED = {
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "xtc": {"temperature": 1.2, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "frequency_context": 7,
    },
    "bias": {"temperature": 0.0, "logit_bias": ((65, 3.0), (66, -5.0)), "presence_penalty": 1.0},
}


@pytest.mark.parametrize("settings", list(SAMPLED.values()), ids=list(SAMPLED))
async def test_a_sampled_answer_is_that_of_its_seed_without_drafts(
    start: Start, settings: dict[str, Any]
) -> None:
    plans = [
        plan(prompt, max_tokens=30, **{**settings, "seed": seed})
        for seed, prompt in enumerate(PROMPTS[2:5], start=11)
    ]
    expected = await answers_of(await start(), plans)
    for wrong in (0, 3):
        oracle = Oracle(4, expected, wrong)
        assert await answers_of(await start(draft=lambda _, one=oracle: one), plans) == expected  # type: ignore[misc]


async def test_a_draft_draws_with_the_rows_own_randomness(start: Start) -> None:
    plain = await start()
    plans = [plan(PROMPTS[4], max_tokens=24, temperature=1.0, seed=seed, top_k=40) for seed in range(4)]
    expected = await answers_of(plain, plans)
    caches = (await plain.engine.loaded).make_cache
    rates = []
    for blur in (1.0, 0.7):
        running = await start(draft=lambda model, blur=blur: Chain(model, caches, blur))  # type: ignore[misc]
        told = []
        for of, ids in zip(plans, expected, strict=True):
            client, row = running.submit(of)
            await asyncio.wait_for(client.ended.wait(), 60)
            assert row.ids == ids
            assert client.usage.speculation is not None
            told.append(client.usage.speculation)
        rates.append(sum(one.accepted for one in told) / sum(one.drafted for one in told))
    # The same logits and randomness are the same draw; others are accepted often, and not always.
    assert rates[0] == 1.0
    assert 0.2 < rates[1] < 1.0


async def test_second_tokens_of_drafted_answers_have_the_models_distribution(start: Start) -> None:
    plain = await start()
    loaded = await plain.engine.loaded
    prompt, count = PROMPTS[3], 1000

    def second() -> Any:
        """Probabilities of the second token, over those of the first."""
        first = mx.softmax(plain.model(mx.array([prompt]), cache=loaded.make_cache())[0, -1] / 1.5)
        each = mx.array([[*prompt, one] for one in range(first.size)])
        after = mx.softmax(plain.model(each, cache=loaded.make_cache())[:, -1] / 1.5, axis=-1)
        return np.array((first[:, None] * after).sum(axis=0))

    expected = await plain.engine.call(second)
    (greedy,) = await answers_of(plain, [plan(prompt, max_tokens=3)])
    running = await start(draft=lambda _: Oracle(2, [greedy]), batch=1)
    rows = [running.submit(plan(prompt, max_tokens=2, temperature=1.5, seed=seed)) for seed in range(count)]
    for client, _ in rows:
        await asyncio.wait_for(client.ended.wait(), 60)
    told = [client.usage.speculation for client, _ in rows]
    assert sum(one.accepted for one in told if one is not None) > 20
    found = np.bincount([row.ids[-1] for _, row in rows], minlength=len(expected)).astype(float)
    # Pearson's test, over bins of 20 and more.
    order = np.argsort(-expected)
    bins: list[tuple[float, float]] = []
    held = np.zeros(2)
    for token in order:
        held += expected[token] * count, found[token]
        if held[0] >= 20:
            bins.append((float(held[0]), float(held[1])))
            held[:] = 0
    statistic = sum((seen - due) ** 2 / due for due, seen in bins)
    # Mean and spread of the distribution with so many degrees of freedom; four spreads are 1 in 10,000.
    freedom = len(bins) - 1
    assert freedom > 6
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


async def test_an_answer_ends_inside_a_round_where_it_would_without(start: Start) -> None:
    prompt = PROMPTS[4]
    plain = await start()
    (ids,) = await answers_of(plain, [plan(prompt, max_tokens=30)])
    answer = ids[len(prompt) :]
    eos = next(token for place, token in enumerate(answer) if place > 4 and token not in answer[:place])
    text = bytes(token % 256 for token in answer).decode("utf-8", "replace")
    cases = {
        "eos": plan(prompt, max_tokens=30, eos=[eos]),
        "length": plan(prompt, max_tokens=7),
        "one token": plan(prompt, max_tokens=1),
        "stop": msgspec.structs.replace(
            plan(prompt, max_tokens=30), format=AnswerFormat(stops=(text[6:8], "zzz"))
        ),
    }
    for name, of in cases.items():
        expected, row = plain.submit(of)
        await asyncio.wait_for(expected.ended.wait(), 60)
        for ahead in (1, 3, 29):
            running = await start(draft=lambda _, ahead=ahead: Oracle(ahead, [ids]))  # type: ignore[misc]
            got, drafted = running.submit(of)
            await asyncio.wait_for(got.ended.wait(), 60)
            assert drafted.ids == row.ids, name
            assert got.events[-1] == expected.events[-1], name
            assert got.text == expected.text, name
            assert got.usage.completion_tokens == expected.usage.completion_tokens, name
            if name == "one token":
                assert running.model.shapes[-1] == (1, 1), "nothing is guessed for a last token"


async def test_log_probabilities_of_drafted_tokens_are_those_without(start: Start) -> None:
    of = plan(PROMPTS[4], max_tokens=16, top_logprobs=4)
    plain = await (await start()).ask(of)
    (ids,) = await answers_of(await start(), [of])
    drafted = await (await start(draft=lambda _: Oracle(3, [ids]))).ask(of)
    assert len(drafted.logprobs) == len(plain.logprobs) == 16
    for one, other in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert one.chosen.data == other.chosen.data
        assert [top.data for top in one.top] == [top.data for top in other.top]
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)


async def test_a_grammar_sees_each_token_of_a_round_once_and_in_order(start: Start) -> None:
    prompt = PROMPTS[4]
    ids = [*prompt, *b"only this", 258]
    for wrong in (0, 3):
        running = await start(draft=lambda _, wrong=wrong: Oracle(4, [ids], wrong))  # type: ignore[misc]
        script = Script("only this")
        client = await running.ask(plan(prompt, max_tokens=40, eos=[258]), script)
        assert (client.text, client.events[-1]) == ("only this", Finish("stop"))
        assert script.accepted == [*b"only this", 258]
        assert (script.fills, script.released) == (10, 1)
        assert client.usage.speculation is not None
        assert client.usage.speculation.accepted >= 3


async def test_a_grammar_that_fails_in_a_round_ends_that_row_and_the_next_one_is_answered(
    start: Start,
) -> None:
    prompt = PROMPTS[4]
    running = await start(draft=lambda _: Oracle(4, [[*prompt, *b"abcdef"]]))

    class Breaking(Script):
        def fill(self, mask: Any) -> bool:
            if len(self.accepted) == 2:
                raise RuntimeError("lost")
            return super().fill(mask)

    script = Breaking("abcdef")
    client = await running.ask(plan(prompt, max_tokens=40), script)
    assert client.text == "ab"
    assert isinstance(client.events[-1], Failure)
    assert script.released == 1
    after = await running.ask(plan(prompt, max_tokens=5))
    assert after.events[-1] == Finish("length")


async def test_a_second_row_ends_drafting_and_it_goes_on_when_alone_again(start: Start) -> None:
    plans = [plan(PROMPTS[4], max_tokens=400), plan(PROMPTS[5], max_tokens=8)]
    expected = await answers_of(await start(), plans)
    oracle = Oracle(2, expected)
    running = await start(draft=lambda _: oracle)
    (long, row), (short, other) = running.submit(plans[0]), running.row(plans[1])
    await until(lambda: row.emitted > 6)
    running.engine.submit(other)
    await asyncio.wait_for(short.ended.wait(), 60)
    before = row.accepted
    await asyncio.wait_for(long.ended.wait(), 60)
    assert [row.ids, other.ids] == expected
    assert row.accepted > before, "it is drafted once it is alone again"
    assert other.accepted == 0
    # Opened, left for steps, opened once more, done.
    assert [call for call in oracle.calls if call != "propose"] == ["open", "close", "open", "close"]


async def test_a_row_that_is_cancelled_leaves_nothing_behind(start: Start) -> None:
    of = plan(PROMPTS[4], max_tokens=2000)
    oracle = Oracle(3, [])
    running = await start(draft=lambda _: oracle)
    _, row = running.submit(of)
    await until(lambda: row.emitted > 3)
    running.engine.cancel(row)
    await until(lambda: running.engine.pending == 0)
    assert oracle.calls[-1] == "close"
    (expected,) = await answers_of(await start(), [plan(PROMPTS[3], max_tokens=9)])
    assert await answers_of(running, [plan(PROMPTS[3], max_tokens=9)]) == [expected]


@pytest.mark.parametrize("fault", ["draft", "pass"])
async def test_a_round_that_fails_ends_its_row_alone(start: Start, fault: str) -> None:
    oracle = Oracle(3, [[*PROMPTS[4], *range(60, 90)]])
    running = await start(draft=lambda _: oracle)
    oracle.fail = fault == "draft"
    if fault == "pass":
        running.model.fail_when = lambda shape: shape == (1, 4)
    broken = await running.ask(plan(PROMPTS[4]))
    assert isinstance(broken.events[-1], Failure)
    assert oracle.calls[-1] == "close"
    expected = await (await start()).ask(plan(PROMPTS[4]))
    assert (await running.ask(plan(PROMPTS[4]))).text == expected.text


async def test_the_next_turn_of_a_drafted_answer_is_that_of_an_undrafted_one(start: Start) -> None:
    """What the verified passes wrote is kept and gone on from, cut to what was told."""
    cache = CacheLaunch(ram_bytes=1 << 28)
    prompt = [token % 200 for token in range(300)]
    texts: list[tuple[str, int]] = []
    (ids,) = await answers_of(await start(), [plan(prompt, max_tokens=40)])
    for draft in (None, Oracle(3, [ids], wrong=4)):
        running = await start(cache=cache, draft=None if draft is None else lambda _, one=draft: one)  # type: ignore[misc]
        (first,) = await answers_of(running, [plan(prompt, max_tokens=40)])
        assert first == ids
        client, _ = running.submit(plan([*first, 7, 8, 9], max_tokens=20))
        await asyncio.wait_for(client.ended.wait(), 60)
        texts.append((client.text, client.usage.cached_tokens))
    assert texts[0] == texts[1]
    assert texts[0][1] > 300, "the answer's own keys and values were gone on from"


async def test_rows_whose_caches_cannot_be_cut_are_answered_without_drafts(start: Start) -> None:
    expected = await (await start("sliding")).ask(plan(PROMPTS[5], max_tokens=20))
    oracle = Oracle(3, [])
    running = await start("sliding", draft=lambda _: oracle)
    client = await running.ask(plan(PROMPTS[5], max_tokens=20))
    assert client.text == expected.text
    assert client.usage.speculation is None
    assert oracle.calls == []


def test_only_plain_caches_are_rewound() -> None:
    assert can_rewind([KVCache(), CacheList(KVCache(), KVCache()), CacheList(KVCache())])
    assert not can_rewind([KVCache(), RotatingKVCache(max_size=8)])
    assert not can_rewind([CacheList(KVCache(), ArraysCache(2))])


def test_every_protocol_tells_what_was_drafted_and_nothing_where_nothing_was() -> None:
    one = Usage(10, 20, speculation=Speculation(12, 9, 11))
    other = Usage(10, 5, speculation=Speculation(3, 0, 5))
    told = {"drafted": 12, "accepted": 9, "target_calls": 11}
    for body in (usage_body([one]), response_usage(one), message_usage(one)):
        assert msgspec.to_builtins(body)["speculation"] == told
    both = msgspec.to_builtins(usage_body([one, other], 2))
    assert both["speculation"] == {"drafted": 15, "accepted": 9, "target_calls": 16}
    for body in (usage_body([Usage(10, 20)]), response_usage(Usage(10, 20)), message_usage(Usage(10, 20))):
        assert "speculation" not in msgspec.to_builtins(body)
