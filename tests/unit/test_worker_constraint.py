"""Rows under a grammar, with penalties or log-probabilities: what they say, and that others do not notice."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx_lm.models import gpt_bigcode

from mlxpool.shared.errors import error
from mlxpool.worker.engine import admission
from mlxpool.worker.engine.admission import KvCost, LayerKv
from mlxpool.worker.engine.terms import Limits
from mlxpool.worker.text.events import Failure, Finish, Usage
from mlxpool.worker.text.format import AnswerFormat
from tests.tools.engine_fixture import Start
from tests.tools.running_engine import Running, plan, until
from tests.tools.tiny_fixture import TinyModels


class Script:
    """A grammar of one text: letter after letter, then the eos. Every step of its life is noted."""

    def __init__(self, text: str, eos: int = 258, wide: bool = False) -> None:
        self.tokens = [*text.encode(), eos]
        self.accepted: list[int] = []
        self.fills = 0
        self.released = 0
        self.wide = wide  # any letter of a-z may come too
        self.over = False

    def fill(self, mask: Any) -> bool:
        assert not self.released
        self.fills += 1
        may_come = [self.tokens[len(self.accepted)], *(range(97, 123) if self.wide else ())]
        for token in may_come:
            mask[token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32))
        return True

    def accept(self, token: int) -> bool:
        assert not self.released
        self.accepted.append(token)
        return self.wide or token == self.tokens[len(self.accepted) - 1]

    def release(self) -> None:
        self.released += 1


async def test_a_row_says_what_its_grammar_allows_alone_and_beside_others(
    start: Start,
) -> None:
    running = await start(batch=8)
    free_alone = await running.ask(plan(range(30), max_tokens=40))
    alone = Script("only this")
    asked = await running.ask(plan(range(30), max_tokens=40, eos=[258]), alone)
    assert (asked.text, asked.events[-2:]) == ("only this", [Usage(30, 10), Finish("stop")])
    scripts = [Script("the first of them"), Script("the second", wide=False), Script("x" * 39)]
    rows = [
        running.submit(plan(range(10 + place), max_tokens=40, eos=[258], temperature=0.7 * place), script)
        for place, script in enumerate(scripts)
    ]
    free, _ = running.submit(plan(range(30), max_tokens=40))
    for client, _ in (*rows, (free, None)):
        await client.ended.wait()
    assert [client.text for client, _ in rows] == ["the first of them", "the second", "x" * 39]
    assert free.text == free_alone.text
    assert [script.released for script in (alone, *scripts)] == [1, 1, 1, 1]


async def test_every_token_is_accepted_once_and_none_is_looked_for_after_the_last(
    start: Start,
) -> None:
    running = await start()
    ended_by = {
        "eos": (plan(range(20), max_tokens=40, eos=[258]), "abc", 4),
        "length": (plan(range(20), max_tokens=2), "abc", 2),
        "stop string": (
            msgspec.structs.replace(plan(range(20), max_tokens=40), format=AnswerFormat(stops=("bc",))),
            "abcd",
            3,
        ),
    }
    for name, (of, text, count) in ended_by.items():
        script = Script(text)
        await running.ask(of, script)
        assert (script.accepted, script.fills) == (script.tokens[:count], count), name
        assert script.released == 1


async def test_a_token_that_the_grammar_has_no_place_for_fails_that_row_alone(start: Start) -> None:
    running = await start()
    other, _ = running.submit(plan(range(30), max_tokens=60))

    class Strict(Script):
        def accept(self, token: int) -> bool:
            return super().accept(token) and len(self.accepted) < 3

    script = Strict("abcdef")
    broken = await running.ask(plan(range(20), max_tokens=40), script)
    assert broken.text == "ab"
    assert isinstance(broken.events[-1], Failure)
    assert "no place for token" in broken.events[-1].error.message
    await other.ended.wait()
    assert other.events[-1] == Finish("length")
    assert (script.released, running.engine.pending) == (1, 0)


async def test_a_matcher_that_fails_ends_its_row_and_spares_those_that_share_its_pass(start: Start) -> None:
    running = await start()
    expected = await running.ask(plan(range(30), max_tokens=60))
    other, _ = running.submit(plan(range(30), max_tokens=60))

    class Broken(Script):
        def fill(self, mask: Any) -> bool:
            if len(self.accepted) == 4:
                raise LookupError("lost its state")
            return super().fill(mask)

    script = Broken("abcdefgh")
    broken = await running.ask(plan(range(20), max_tokens=40), script)
    assert "LookupError: lost its state" in broken.events[-1].error.message
    await other.ended.wait()
    assert other.text == expected.text
    assert script.released == 1


@pytest.mark.parametrize("call", ["fill", "accept"])
async def test_what_a_grammar_has_to_say_to_its_client_ends_its_row_in_those_words(
    start: Start, call: str
) -> None:
    running = await start()
    other, _ = running.submit(plan(range(30), max_tokens=60))

    class Slow(Script):
        def _look(self, now: str) -> None:
            if now == call and len(self.accepted) == 3:
                raise error("unsupported_schema", "guided_grammar became too slow", param="guided_grammar")

        def fill(self, mask: Any) -> bool:
            self._look("fill")
            return super().fill(mask)

        def accept(self, token: int) -> bool:
            self._look("accept")
            return super().accept(token)

    slow = await running.ask(plan(range(20), max_tokens=40), Slow("abcdef"))
    failure = slow.events[-1]
    assert isinstance(failure, Failure)
    assert (failure.error.code, failure.error.message) == (
        "unsupported_schema",
        "guided_grammar became too slow",
    )
    await other.ended.wait()
    assert other.events[-1] == Finish("length")


async def test_a_grammar_that_is_over_without_an_eos_stops_its_row(start: Start) -> None:
    running = await start()

    class NoEos(Script):
        def accept(self, token: int) -> bool:
            taken = super().accept(token)
            self.over = len(self.accepted) == 3
            return taken

    asked = await running.ask(plan(range(20), max_tokens=40), NoEos("abc"))
    assert (asked.text, asked.events[-1]) == ("abc", Finish("stop"))


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "decoding"])
async def test_a_cancelled_row_gives_its_matcher_back(start: Start, moment: str) -> None:
    running = await start(batch=1)
    _, ahead = running.submit(plan(range(30), max_tokens=3000 if moment == "waiting" else 1))
    prompt = list(range(250)) * (12 if moment == "prefilling" else 1)
    script = Script("z" * 3000)
    client, row = running.submit(plan(prompt, max_tokens=3000), script)
    if moment == "prefilling":
        await until(lambda: len(running.model.shapes) > 5)
    if moment == "decoding":
        await until(lambda: len(client.events) > 2)
    running.engine.cancel(row)
    await until(lambda: script.released == 1)
    running.engine.cancel(ahead)
    await until(lambda: running.engine.pending == 0)
    assert bool(script.accepted) == (moment == "decoding")
    assert row.cache == []


async def test_a_release_that_fails_hurts_nobody(start: Start) -> None:
    running = await start()

    class Sticky(Script):
        def release(self) -> None:
            raise OSError("won't")

    client = await running.ask(plan(range(20), max_tokens=40, eos=[258]), Sticky("abc"))
    assert client.events[-1] == Finish("stop")
    assert (await running.ask(plan(range(20)))).events[-1] == Finish("length")


SHAPED = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "frequency_context": 0,
}


async def test_rows_with_penalties_keep_their_tokens_whoever_runs_beside_them(start: Start) -> None:
    running = await start(batch=8)
    plans = [
        plan(range(30), max_tokens=50, **SHAPED),
        plan(range(30), max_tokens=50),
        plan(range(31), max_tokens=50, temperature=0.8, seed=5, **SHAPED),
        plan(range(32), max_tokens=50, logit_bias=((65, 100.0),)),
        plan(range(33), max_tokens=50, temperature=1.0, xtc_probability=0.5, xtc_threshold=0.05),
        plan(range(34), max_tokens=50, temperature=1.0, seed=9, top_logprobs=3, **SHAPED),
    ]
    alone = [await running.ask(of) for of in plans]
    assert alone[0].text != alone[1].text
    assert alone[3].text == "A" * 50
    rows = [running.submit(of) for of in plans]
    for client, _ in rows:
        await client.ended.wait()
    assert [client.text for client, _ in rows] == [client.text for client in alone]


async def test_each_token_but_the_eos_has_its_log_probability(start: Start) -> None:
    running = await start()
    asked = await running.ask(plan(range(30), max_tokens=25, top_logprobs=2))
    plain = await running.ask(plan(range(30), max_tokens=25))
    assert plain.logprobs == []
    assert asked.text == plain.text
    assert len(asked.logprobs) == 25
    for one in asked.logprobs:
        # Greedy: the chosen one is the likeliest.
        assert one.top[0] == one.chosen
        assert 0 >= one.top[0].logprob >= one.top[1].logprob
    last = asked.logprobs[-1].chosen.data[0]
    eos = next(place for place, one in enumerate(asked.logprobs) if one.chosen.data[0] == last)
    ended = await running.ask(plan(range(30), max_tokens=25, top_logprobs=2, eos=[last]))
    assert len(ended.logprobs) == eos


async def test_log_probabilities_are_of_what_the_grammar_leaves(start: Start) -> None:
    running = await start()
    client = await running.ask(plan(range(30), max_tokens=40, eos=[258], top_logprobs=2), Script("abc"))
    assert [(one.chosen.token, one.chosen.logprob) for one in client.logprobs] == [
        ("a", 0.0), ("b", 0.0), ("c", 0.0)
    ]  # fmt: skip
    assert [one.top[1].logprob for one in client.logprobs] == [-9999.0] * 3


async def test_rows_that_outgrow_the_pool_go_on_in_their_grammar_and_penalties(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "GROWTH_BLOCK_TOKENS", 64)
    running = await Running(tiny("llama"), batch=4, width=64).ready()
    cost = KvCost((LayerKv(2 * 2 * 16 * 2 * 4),))

    def plans() -> list[tuple[Any, Script | None]]:
        shaped = [plan(range(20 + n), seed=n, temperature=1.0, max_tokens=400, **SHAPED) for n in range(2)]
        ruled = [plan(range(20 + n), seed=n, temperature=1.0, max_tokens=400) for n in range(2)]
        made = [(of, None) for of in shaped] + [(of, Script("q" * 400, wide=True)) for of in ruled]
        return [(msgspec.structs.replace(of, limited=False), script) for of, script in made]

    alone = [await running.ask(of, script) for of, script in plans()]
    running.engine._limits = Limits(4, cost.row_bytes(1024))
    together = plans()
    before = len(running.model.shapes)
    rows = [running.submit(of, script) for of, script in together]
    for client, _ in rows:
        await client.ended.wait()
    assert [client.text for client, _ in rows] == [client.text for client in alone]
    assert sum(width > 1 for _, width in running.model.shapes[before:]) > 4, "nobody had to wait again"
    for _, script in together[2:]:
        assert script is not None
        assert (len(script.accepted), script.released) == (400, 1)


async def test_a_pass_that_fails_ends_the_rows_that_shared_it_and_no_others(start: Start) -> None:
    mx.random.seed(3)
    model = gpt_bigcode.Model(
        gpt_bigcode.ModelArgs(
            model_type="gpt_bigcode", n_embd=64, n_layer=2, n_inner=64, n_head=4, n_positions=512,
            layer_norm_epsilon=1e-5, vocab_size=256,
        )
    )  # fmt: skip
    mx.eval(model.parameters())
    # mlx-lm's GPT-BigCode can't share a pass: every row is a group of its own.
    running = await start(model=model)
    alone = await running.ask(plan(range(30), max_tokens=120))
    rows = [running.submit(plan(range(length), max_tokens=120)) for length in (30, 20, 10)]
    await until(lambda: all(client.events for client, _ in rows))
    running.model.fail_when = lambda shape: shape == (1, 1)
    for client, _ in rows:
        await client.ended.wait()
    ends = [client.events[-1] for client, _ in rows]
    assert sum(isinstance(end, Failure) for end in ends) == 1
    assert ends.count(Finish("length")) == 2
    assert not isinstance(ends[0], Failure) or ends[1] == Finish("length")
    assert ends[0] != Finish("length") or rows[0][0].text == alone.text
    assert all(
        client.events[-2].lane == "turns" for client, _ in rows if client.events[-1] == Finish("length")
    )


async def test_matchers_rows_and_caches_of_cancelled_rows_are_not_kept(start: Start) -> None:
    running = await start(batch=3)
    steady = [running.submit(plan(range(20 + n), max_tokens=400)) for n in range(2)]
    scripts: list[Script] = []
    rng = np.random.default_rng(4)
    for turn in range(40):
        script = Script("w" * 500, wide=True)
        prompt = rng.integers(0, 255, size=int(rng.integers(1, 80))).tolist()
        client, row = running.submit(plan(prompt, max_tokens=500, **(SHAPED if turn % 2 else {})), script)
        scripts.append(script)
        for _ in range(int(rng.integers(0, 60))):
            await asyncio.sleep(0)
        if turn % 3 == 0:
            await until(lambda heard=client: bool(heard.events) or steady[0][0].ended.is_set())
        running.engine.cancel(row)
    for client, _ in steady:
        await client.ended.wait()
    await until(lambda: running.engine.pending == 0)
    assert [script.released for script in scripts] == [1] * 40
    alone = [await running.ask(plan(range(20 + n), max_tokens=400)) for n in range(2)]
    assert [client.text for client, _ in steady] == [client.text for client in alone]
    del row
    gc.collect()
    assert running.engine.counters.kv_used_bytes == 0
