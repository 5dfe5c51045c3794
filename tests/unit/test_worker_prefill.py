"""Equal prompts are prefilled once, and what shares a prefill shares nothing afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlxpool.worker.adapters.layers import Switch
from mlxpool.worker.engine import prefill
from mlxpool.worker.engine.admission import KvCost, LayerKv
from mlxpool.worker.engine.chunks import ChunkWidth
from mlxpool.worker.engine.prefill import Prefills, copy_caches
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.terms import Limits
from mlxpool.worker.text.events import Failure, Finish
from tests.tools import tiny_models
from tests.tools.engine_fixture import Start
from tests.tools.running_engine import Running, plan, until
from tests.tools.tiny_fixture import TinyModels

PROMPT = [(place * 7) % 250 for place in range(100)]


def chunks(running: Running, since: int = 0) -> list[int]:
    """Widths of the prefill's forward passes."""
    return [width for _, width in running.model.shapes[since:] if width > 1]


@pytest.mark.parametrize("kind", ["llama", "sliding"])
async def test_choices_of_one_request_share_a_prefill_and_each_draws_its_own(
    start: Start, kind: tiny_models.Kind
) -> None:
    running = await start(kind, batch=8, width=64)
    plans = [plan(PROMPT, max_tokens=40, temperature=1.0, seed=seed) for seed in range(5)]
    alone = [await running.ask(of) for of in plans]
    before = len(running.model.shapes)
    rows = [running.row(of) for of in plans]
    running.engine.submit_all([row for _, row in rows])
    for client, _ in rows:
        await client.ended.wait()
    assert [client.text for client, _ in rows] == [client.text for client in alone]
    assert len({client.text for client, _ in rows}) == 5
    # The check whether rows can share a pass has a prefill of its own, of 11 tokens at most.
    assert [width for width in chunks(running, before) if width > 12] == [64, 35]


async def test_a_row_whose_prompt_is_being_prefilled_joins_that_prefill(start: Start) -> None:
    running = await start(width=16)
    first, _ = running.submit(plan(PROMPT * 20, max_tokens=30))
    await until(lambda: len(running.model.shapes) > 5)
    second, _ = running.submit(plan(PROMPT * 20, max_tokens=30))
    await first.ended.wait()
    await second.ended.wait()
    assert first.text == second.text
    assert sum(chunks(running)) < 2000 + 30


async def test_rows_that_wait_for_a_place_take_the_finished_prefill_over(start: Start) -> None:
    running = await start(batch=2, width=64)
    plans = [plan(PROMPT, max_tokens=30, temperature=1.0, seed=seed) for seed in range(6)]
    rows = [running.row(of) for of in plans]
    running.engine.submit_all([row for _, row in rows])
    for client, _ in rows:
        await client.ended.wait()
    assert [width for width in chunks(running) if width > 12] == [64, 35]
    await until(lambda: running.engine.counters.kv_used_bytes == 0)
    assert [client.text for client, _ in rows] == [(await running.ask(of)).text for of in plans]


async def test_a_prefill_kept_for_waiting_rows_gives_way_to_rows_that_run(tiny: TinyModels) -> None:
    running = await Running(tiny("llama"), batch=3, width=64).ready()
    cost = KvCost((LayerKv(2 * 2 * 16 * 2 * 4),))
    # Two rows fill the pool: there is no room beside them for a prompt that nobody decodes.
    running.engine._limits = Limits(3, 2 * cost.row_bytes(200))
    plans = [plan(PROMPT, max_tokens=100, temperature=1.0, seed=seed) for seed in range(4)]
    rows = [running.row(of) for of in plans]
    running.engine.submit_all([row for _, row in rows])
    used: list[int] = []

    def all_ended() -> bool:
        used.append(running.engine.counters.kv_used_bytes)
        return all(client.ended.is_set() for client, _ in rows)

    await until(all_ended)
    assert max(used) <= 2 * cost.row_bytes(200)
    assert all(client.events[-1] == Finish("length") for client, _ in rows)
    # Those that waited were prefilled when their turn came.
    assert len([width for width in chunks(running) if width == 35]) > 1


async def test_cancelling_one_leaves_the_others_and_the_last_takes_the_prefill_along(start: Start) -> None:
    running = await start(width=16)
    rows = [running.row(plan(PROMPT * 10, max_tokens=20)) for _ in range(3)]
    running.engine.submit_all([row for _, row in rows])
    await until(lambda: len(running.model.shapes) > 3)
    running.engine.cancel(rows[0][1])
    await until(lambda: running.engine.counters.cancelled == 1)
    # Counted at the end of the engine's turn.
    await until(lambda: running.engine.counters.rows == 2)
    for client, _ in rows[1:]:
        await client.ended.wait()
    assert sum(chunks(running)) < 1000 + 30
    rows = [running.row(plan(PROMPT * 30, max_tokens=20)) for _ in range(2)]
    running.engine.submit_all([row for _, row in rows])
    before = len(running.model.shapes)
    await until(lambda: len(running.model.shapes) > before + 3)
    for _, row in rows:
        running.engine.cancel(row)
    await until(lambda: running.engine.pending == 0)
    ran = len(running.model.shapes)
    await running.ask(plan([1], max_tokens=3))
    assert chunks(running, ran) == []
    assert running.engine.counters.kv_used_bytes == 0


async def test_a_chunk_that_fails_ends_all_rows_that_share_it(start: Start) -> None:
    running = await start(width=16)
    running.model.fail_when = lambda shape: shape == (1, 16)
    rows = [running.row(plan(PROMPT)) for _ in range(3)]
    running.engine.submit_all([row for _, row in rows])
    for client, _ in rows:
        await client.ended.wait()
        assert isinstance(client.events[-1], Failure)
    assert (running.engine.pending, running.engine.counters.errors) == (0, 3)
    assert (await running.ask(plan(PROMPT))).events[-1] == Finish("length")


def lines(seed: int, count: int) -> mx.array:
    """Keys or values [1, heads, count, size]."""
    return mx.random.normal((1, 2, count, 64), key=mx.random.key(seed))


def kv(cache: Any, seed: int, count: int) -> Any:
    cache.update_and_fetch(lines(seed, count), lines(seed + 1, count))
    return cache


def state(cache: Any) -> str:
    """All that a cache holds, as text."""
    return repr(cache.state) + repr({k: v for k, v in vars(cache).items() if isinstance(v, int)})


CACHES: dict[str, Callable[[], Any]] = {
    "plain": lambda: kv(KVCache(), 1, 10),
    "plain, full to its step": lambda: kv(KVCache(), 1, 256),
    "rotating": lambda: kv(RotatingKVCache(max_size=32), 1, 10),
    "rotating, wrapped": lambda: kv(kv(RotatingKVCache(max_size=32, keep=4), 1, 40), 3, 1),
    "quantised": lambda: kv(QuantizedKVCache(group_size=32), 1, 10),
    "chunked": lambda: kv(ChunkedKVCache(16), 1, 10),
    "concatenating": lambda: kv(ConcatenateKVCache(), 1, 10),
    "list": lambda: CacheList(kv(KVCache(), 1, 10), kv(RotatingKVCache(max_size=32), 3, 10)),
}


@pytest.mark.parametrize("make", CACHES.values(), ids=list(CACHES))
def test_copies_of_a_cache_go_their_own_ways(make: Callable[[], Any]) -> None:
    def grow(cache: Any, seed: int) -> None:
        for part in cache.caches if isinstance(cache, CacheList) else [cache]:
            kv(part, seed, 1)

    original = make()
    one, two = copy_caches([original])[0], copy_caches([original])[0]
    before = state(original)
    assert state(one) == before
    grow(one, 50)
    assert state(one) != before
    assert (state(original), state(two)) == (before, before)
    grow(two, 60)
    fresh = make()
    grow(fresh, 50)
    assert state(one) == state(fresh)
    assert state(original) == before
    grow(original, 70)
    assert state(one) == state(fresh)


def test_copies_of_states_that_are_replaced_go_their_own_ways() -> None:
    cache = ArraysCache(2)
    cache[0], cache[1] = mx.zeros((1, 3)), mx.ones((1, 2, 2))
    (copied,) = copy_caches([cache])
    copied[0] = mx.full((1, 3), 5.0)
    copied[1][:, 0] = 7.0
    assert cache[0].tolist() == [[0, 0, 0]]
    assert cache[1].tolist() == [[[1, 1], [1, 1]]]
    assert copied[1].tolist() == [[[7, 7], [1, 1]]]


def test_a_prompt_of_one_token_is_complete_from_the_start() -> None:
    prefills = Prefills(Switch(None), lambda: [KVCache()], ChunkWidth("cpu", 16))
    rows = [Row(plan([5]), None, lambda _: None) for _ in range(2)]  # type: ignore[arg-type]
    for row in rows:
        prefills.attach(row)
    prompt = prefills.next()
    assert prompt is not None
    assert prompt.complete
    assert prefills.hand_over(prompt, keep=False) == rows
    assert rows[0].cache[0] is not rows[1].cache[0]
    assert prefills.next() is None


@pytest.mark.parametrize("gives_back", [True, False])
def test_what_a_chunk_leaves_is_given_back_where_that_is_asked_for(
    gives_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_LEFT_BYTES", 1 << 20)
    left: list[int] = []

    def model(ids: mx.array, cache: list[Any]) -> None:
        left.append(mx.get_cache_memory())
        kv(cache[0], 1, ids.shape[1])
        # What the pass needed on its way.
        mx.eval(mx.zeros(1 << 20))

    prefills = Prefills(Switch(model), lambda: [KVCache()], ChunkWidth("cpu", 16), gives_back=gives_back)
    prefills.attach(Row(plan(PROMPT[:40]), None, lambda _: None))  # type: ignore[arg-type]
    prompt = prefills.next()
    assert prompt is not None
    mx.clear_cache()
    while not prompt.complete:
        prefills.run(prompt, prefills.cut(prompt, alone=True), alone=True)
    left.append(mx.get_cache_memory())
    assert len(left) == 4
    assert (left[0], left[-1]) == (0, 0)
    assert all((one == 0) == gives_back for one in left[1:-1])
