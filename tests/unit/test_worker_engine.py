"""The engine with a real tiny model in this process: order, failures, and what each of them spares."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlxpool.worker.adapters.layers import Switch
from mlxpool.worker.engine import admission
from mlxpool.worker.engine.admission import KvCost, LayerKv
from mlxpool.worker.engine.batch import DEAR_TOKENS, DecodeBatch, shares_passes
from mlxpool.worker.engine.chunks import ChunkWidth
from mlxpool.worker.engine.engine import ENGINE_DIED_EXIT_CODE, Engine
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.terms import Limits, Loaded
from mlxpool.worker.load import LoadError, load
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser
from mlxpool.worker.text.events import Failure, Finish, Usage
from tests.tools import rowless_models, tiny_models
from tests.tools.engine_fixture import Start
from tests.tools.running_engine import Client, Running, plan, until
from tests.tools.tiny_fixture import TinyModels


async def test_a_row_ends_with_usage_and_finish(start: Start) -> None:
    running = await start()
    client = await running.ask(plan(range(40), max_tokens=5))
    assert client.events[-2:] == [Usage(40, 5), Finish("length")]
    assert running.engine.pending == 0
    assert (running.engine.counters.tokens, running.engine.counters.prompt_tokens) == (5, 40)


async def test_a_prompt_of_one_token_needs_no_prefill_alone_and_together(start: Start) -> None:
    running = await start()
    alone = [await running.ask(plan([token], max_tokens=30)) for token in (65, 66, 67)]
    rows = [running.submit(plan([token], max_tokens=30)) for token in (65, 66, 67)]
    for client, _ in rows:
        await client.ended.wait()
    assert [client.text for client, _ in rows] == [client.text for client in alone]


async def test_an_eos_at_the_length_limit_is_a_stop_and_gives_no_text(start: Start) -> None:
    running = await start()
    free = await running.ask(plan(range(40), max_tokens=6))
    sampled: list[int] = []
    probe = AnswerText(ByteDetokeniser(lambda token: sampled.append(token) or b""))  # type: ignore[func-returns-value]
    client = Client()
    running.engine.submit(Row(plan(range(40), max_tokens=6), probe, client.put))
    await client.ended.wait()
    last = sampled[-1]
    assert last not in sampled[:-1], "choose another prompt: this one repeats its last token"
    ended = await running.ask(plan(range(40), max_tokens=6, eos=[last]))
    assert ended.events[-2:] == [Usage(40, 6), Finish("stop")]
    assert ended.text == free.text[:-1]


def ids_of_mlx_lm(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy ids as mlx-lm's own single-row loop gives them, with its own prefill."""
    model, _ = load_model(folder)
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count)
    return [token for token, _ in steps]


@pytest.mark.parametrize("kind", ["llama", "sliding"])
@pytest.mark.parametrize("width", [16, 64, None])
async def test_greedy_ids_are_those_of_mlx_lms_own_loop(
    tiny: TinyModels, kind: tiny_models.Kind, width: int | None
) -> None:
    running = await Running(tiny(kind), width=width).ready()
    prompts = [[(place * 7 + length) % 256 for place in range(length)] for length in (1, 2, 31, 100, 301)]
    collected: list[list[int]] = [[] for _ in prompts]
    clients = []
    for prompt, ids in zip(prompts, collected, strict=True):

        def note(token: int, ids: list[int] = ids) -> bytes:
            ids.append(token)
            return b"."

        client = Client()
        text = AnswerText(ByteDetokeniser(note))
        running.engine.submit(Row(plan(prompt, max_tokens=50), text, client.put))
        clients.append(client)
    for client in clients:
        await client.ended.wait()
    assert collected == [ids_of_mlx_lm(tiny(kind), prompt, 50) for prompt in prompts]


async def test_a_failing_prefill_ends_that_row_alone(start: Start) -> None:
    running = await start()
    long, _ = running.submit(plan(range(30), max_tokens=400, temperature=1.0))
    await until(lambda: running.engine.counters.tokens > 3)
    running.model.fail_when = lambda shape: shape == (1, 16)
    broken = await running.ask(plan(range(40)))
    (failure,) = broken.events
    assert isinstance(failure, Failure)
    assert "RuntimeError: out of something" in failure.error.message
    assert failure.error.status == 500
    await long.ended.wait()
    assert long.events[-1] == Finish("length")
    assert running.engine.counters.errors == 1


async def test_a_failing_step_ends_its_rows_and_the_engine_goes_on(start: Start) -> None:
    running = await start()
    expected = await running.ask(plan(range(40)))
    rows = [running.submit(plan(range(20 + place), max_tokens=2000, temperature=1.0)) for place in range(3)]
    await until(lambda: running.engine.counters.rows == 3 and all(client.events for client, _ in rows))
    running.model.fail_when = lambda shape: shape == (3, 1)
    for client, _ in rows:
        await client.ended.wait()
        assert isinstance(client.events[-1], Failure)
    assert running.engine.pending == 0
    again = await running.ask(plan(range(40)))
    assert again.events == expected.events


async def test_a_row_that_had_its_last_token_is_spared_by_a_step_that_fails_after_it(start: Start) -> None:
    running = await start()
    longer, _ = running.submit(plan(range(30), max_tokens=2000, temperature=1.0))
    await until(lambda: len(longer.events) > 2)
    short, _ = running.submit(plan(range(20), max_tokens=12))
    await until(lambda: len(short.events) > 2)
    # With both, a step is two rows wide; the first one without the short row fails.
    running.model.fail_when = lambda shape: shape == (1, 1)
    await short.ended.wait()
    assert short.events[-2:] == [Usage(20, 12), Finish("length")]
    await longer.ended.wait()
    assert isinstance(longer.events[-1], Failure)
    assert running.engine.pending == 0


async def test_a_row_whose_text_fails_ends_alone(start: Start) -> None:
    running = await start()
    other, _ = running.submit(plan(range(30), max_tokens=50))

    def broken(_token: int) -> bytes:
        raise LookupError("no such token")

    client = Client()
    running.engine.submit(Row(plan(range(30)), AnswerText(ByteDetokeniser(broken)), client.put))
    await client.ended.wait()
    assert isinstance(client.events[-1], Failure)
    await other.ended.wait()
    assert other.events[-1] == Finish("length")


async def test_a_cancelled_row_says_nothing_more_and_is_not_owed(start: Start) -> None:
    running = await start(batch=1)
    first, first_row = running.submit(plan(range(30), max_tokens=100_000, temperature=1.0))
    queued, queued_row = running.submit(plan(range(30)))
    await until(lambda: len(first.events) > 3)
    running.engine.cancel(queued_row)
    running.engine.cancel(first_row)
    said = len(first.events)
    await until(lambda: running.engine.pending == 0)
    assert len(first.events) == said
    assert queued.events == []
    assert running.engine.counters.cancelled == 2
    await until(lambda: running.engine.counters.rows == running.engine.counters.kv_used_bytes == 0)
    assert (await running.ask(plan(range(30)))).events[-1] == Finish("length")


async def test_a_row_cancelled_while_the_engine_looks_for_such_rows_is_not_owed_for_ever(
    start: Start,
) -> None:
    class Marked(Row):
        """Its mark is set between one look and the next."""

        looks = -1

        @property
        def cancelled(self) -> bool:
            self.looks += self.looks >= 0
            return self.looks > 1

        @cancelled.setter
        def cancelled(self, value: bool) -> None:
            pass

    running = await start()
    client = Client()
    of = plan(range(30), max_tokens=100_000, temperature=1.0)
    row = Marked(of, AnswerText(ByteDetokeniser(lambda token: bytes([token % 256]))), client.put)
    running.engine.submit(row)
    await until(lambda: len(client.events) > 3)
    row.looks = 0
    await until(lambda: running.engine.pending == 0)
    assert running.engine.counters.cancelled == 1


async def test_rows_beyond_the_batch_wait_first_come_first_served(start: Start) -> None:
    running = await start(batch=2)
    ended: list[int] = []
    rows = [running.submit(plan(range(30), max_tokens=10)) for _ in range(6)]

    async def watch(place: int) -> None:
        await rows[place][0].ended.wait()
        ended.append(place)

    await asyncio.gather(*(watch(place) for place in range(6)))
    assert ended == sorted(ended)
    assert len({client.text for client, _ in rows}) == 1


@pytest.mark.parametrize(
    ("kind", "cost"),
    [
        # Layers x KV heads x head size x keys and values x float32.
        ("llama", KvCost((LayerKv(2 * 2 * 16 * 2 * 4),))),
        ("sliding", KvCost((LayerKv(2 * 2 * 16 * 2 * 4, tiny_models.WINDOW_TOKENS), LayerKv(512)))),
    ],
)
def test_a_rows_kv_cost_is_read_off_its_caches(
    tiny: TinyModels, kind: tiny_models.Kind, cost: KvCost
) -> None:
    seen: list[tuple[int, int]] = []
    loaded = load(tiny(kind), lambda done, total: seen.append((done, total)))
    assert loaded.kv == cost
    assert loaded.dtype == "float32"
    assert seen[0] == (0, loaded.weights_bytes)
    assert seen[-1] == (loaded.weights_bytes, loaded.weights_bytes)


async def test_a_long_row_and_short_ones_stay_inside_the_kv_pool(tiny: TinyModels) -> None:
    running = await Running(tiny("llama"), batch=8, width=256).ready()
    cost = KvCost((LayerKv(2 * 2 * 16 * 2 * 4),))
    prompts = [[place * 7 % 256 for place in range(length)] for length in (1900, 10, 20, 30, 40)]
    alone = [await running.ask(plan(prompt, max_tokens=60)) for prompt in prompts]
    # Room for every row, not for four that are padded to the length of the first.
    pool_bytes = cost.row_bytes(2048) + 4 * cost.row_bytes(256)
    running.engine._limits = Limits(8, pool_bytes)
    rows = [running.submit(plan(prompt, max_tokens=60)) for prompt in prompts]
    used: list[int] = []

    def all_ended() -> bool:
        used.append(running.engine.counters.kv_used_bytes)
        return all(client.ended.is_set() for client, _ in rows)

    await until(all_ended)
    assert [client.text for client, _ in rows] == [client.text for client in alone]
    assert cost.row_bytes(2048) < max(used) <= pool_bytes


async def test_rows_without_a_limit_that_outgrow_the_pool_take_turns_and_lose_nothing(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "GROWTH_BLOCK_TOKENS", 64)
    running = await Running(tiny("llama"), batch=4, width=64).ready()
    cost = KvCost((LayerKv(2 * 2 * 16 * 2 * 4),))
    settings = {"max_tokens": 400, "temperature": 1.0}
    plans = [
        msgspec.structs.replace(plan(range(20 + place), seed=place, **settings), limited=False)
        for place in range(4)
    ]
    alone = [await running.ask(of) for of in plans]
    pool_bytes = cost.row_bytes(1024)
    running.engine._limits = Limits(4, pool_bytes)
    rows = [running.submit(of) for of in plans]
    ended: list[int] = []
    used: list[int] = []

    def all_ended() -> bool:
        used.append(running.engine.counters.kv_used_bytes)
        ended.extend(n for n, (client, _) in enumerate(rows) if n not in ended and client.ended.is_set())
        return len(ended) == 4

    await until(all_ended)
    # The first block of each fits, the second of only two at a time.
    assert ended[0] in (0, 1)
    assert max(used) <= pool_bytes
    assert [client.text for client, _ in rows] == [client.text for client in alone]
    assert [client.events[-2:] for client, _ in rows] == [client.events[-2:] for client in alone]


# mlx-lm's Gemma 2 takes a batch's mask of rows for one of KV heads; its GPT-BigCode fails on a batch.
@pytest.mark.parametrize("make", rowless_models.MAKERS.values(), ids=rowless_models.MAKERS)
async def test_rows_that_mlx_lm_would_mix_in_a_batch_get_their_own_text_side_by_side(
    start: Start, make: Callable[[], Any]
) -> None:
    mx.random.seed(3)
    model = make()
    mx.eval(model.parameters())
    assert not shares_passes(model, lambda: make_prompt_cache(model))
    running = await start(model=model)
    prompts = [[(place * 7 + length) % 256 for place in range(length)] for length in (40, 7, 23)]
    alone = [await running.ask(plan(prompt, max_tokens=30)) for prompt in prompts]
    assert len({client.text for client in alone}) == 3
    rows = [running.submit(plan(prompt, max_tokens=30)) for prompt in prompts]
    await until(lambda: all(client.events for client, _ in rows))
    assert not any(client.ended.is_set() for client, _ in rows)
    for client, _ in rows:
        await client.ended.wait()
    assert [client.text for client, _ in rows] == [client.text for client in alone]


@pytest.mark.parametrize("kind", ["llama", "sliding", "quantised"])
def test_usual_models_share_a_forward_pass(tiny: TinyModels, kind: tiny_models.Kind) -> None:
    loaded = load(tiny(kind), lambda _done, _total: None)
    assert shares_passes(loaded.model, loaded.make_cache)


def test_caches_without_a_batch_version_share_nothing(tiny: TinyModels) -> None:
    class Lone(KVCache):  # type: ignore[misc]
        merge = None

    loaded = load(tiny("llama"), lambda _done, _total: None)
    assert not shares_passes(loaded.model, lambda: [Lone() for _ in loaded.make_cache()])


def test_layers_that_never_read_their_offset_gather_no_graph() -> None:
    def model(tokens: mx.array, cache: list[CacheList]) -> mx.array:
        keys, _ = cache[0][0].update_and_fetch(*(mx.ones((*tokens.shape, 1))[:, None],) * 2)
        return mx.zeros((*tokens.shape, 8)) + keys.sum(axis=(1, 2, 3))[:, None, None]

    def make_cache() -> list[CacheList]:
        return [CacheList(KVCache())]

    batch = DecodeBatch(Switch(model), make_cache, KvCost((LayerKv(8),)))
    for _ in range(2):
        row = Row(plan([1]), AnswerText(ByteDetokeniser(lambda _: b"")), lambda _: None)
        row.cache = make_cache()
        batch.join(row)
    for _ in range(50):
        batch.step(1 << 30)
    ((cache,),) = (group.caches for group in batch._groups)
    graph = io.StringIO()
    mx.export_to_dot(graph, cache[0].offset)
    assert cache[0].offset.tolist() == [50, 50]
    assert graph.getvalue().count("Add") == 0


async def test_a_load_that_fails_is_told_to_whoever_waits(tmp_path: Path) -> None:
    engine = Engine(lambda: load(tmp_path, lambda _d, _t: None), Limits(1, 1), ChunkWidth("cpu"))
    engine.start()
    with pytest.raises(LoadError, match=r"config\.json"):
        await engine.loaded


async def test_a_prompt_cache_that_cannot_be_made_is_told_like_a_load_that_fails(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_cache(_loaded: Loaded) -> None:
        raise LoadError("no layout")

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    engine = Engine(
        lambda: load(tiny("llama"), lambda _d, _t: None), Limits(1, 1), ChunkWidth("cpu"), open_cache
    )
    engine.start()
    with pytest.raises(LoadError, match="no layout"):
        await asyncio.wait_for(engine.loaded, 60)
    assert ended == []


async def test_an_engine_is_busy_while_rows_run_and_not_while_it_sleeps(start: Start) -> None:
    running = await start()
    for ends_by_itself in (True, False):
        assert not running.engine.busy
        client, row = running.submit(plan(range(30), 300 if ends_by_itself else 100_000))
        await until(lambda row=row: row.emitted > 3)  # type: ignore[misc]
        assert running.engine.busy
        if ends_by_itself:
            await client.ended.wait()
        else:
            running.engine.cancel(row)
        await until(lambda: not running.engine.busy)


async def test_a_call_finds_that_the_rows_cancelled_before_it_have_left(start: Start) -> None:
    running = await start()
    for _ in range(10):
        _, row = running.submit(plan(range(30), max_tokens=100_000, temperature=1.0))
        await until(lambda row=row: row.emitted > 3)  # type: ignore[misc]
        running.engine.cancel(row)
        assert await running.engine.call(lambda row=row: row.ended)  # type: ignore[misc]


async def test_a_call_that_the_engine_does_not_answer_is_owed(start: Start) -> None:
    running = await start()
    let_go = threading.Event()
    asked = asyncio.ensure_future(running.engine.call(let_go.wait))
    await until(lambda: running.engine.asked == 1)
    let_go.set()
    assert await asked
    assert running.engine.asked == 0


ENGINE_THAT_DIES = """
import asyncio, pathlib, sys
from mlxpool.worker.engine.admission import KvCost, LayerKv
from mlxpool.worker.engine.chunks import ChunkWidth
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.engine.terms import Limits
from mlxpool.worker.engine.row import Row
from mlxpool.worker.load import load
from mlxpool.worker.request.plan import Plan, Sampling

class Broken(ChunkWidth):
    def end(self, start, last, alone):
        raise AssertionError("a fault of the loop itself")

async def main():
    folder = pathlib.Path(sys.argv[1])
    engine = Engine(lambda: load(folder, lambda d, t: None), Limits(1, 1 << 30), Broken("cpu"))
    engine.start()
    await engine.loaded
    plan = Plan((1, 2, 3), 5, True, Sampling(0.0, 1.0, 0, 0.0, 1), frozenset())
    engine.submit(Row(plan, None, print))
    await asyncio.sleep(30)

asyncio.run(main())
"""


def test_a_process_whose_engine_thread_dies_ends_loudly(tiny: TinyModels) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ENGINE_THAT_DIES, str(tiny("llama"))],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == ENGINE_DIED_EXIT_CODE
    assert "a fault of the loop itself" in run.stderr
    assert "the engine thread died" in run.stderr


def test_an_engine_whose_loop_has_ended_ends_with_it(tiny: TinyModels) -> None:
    """In this process, which an engine that believes itself lost would end."""
    others = set(threading.enumerate())

    async def leave_a_row_running() -> None:
        running = await Running(tiny("llama")).ready()
        client, _ = running.submit(plan([1, 2, 3], 100_000))
        await until(lambda: bool(client.events))

    asyncio.run(leave_a_row_running())
    (engine,) = (thread for thread in set(threading.enumerate()) - others if thread.name == "engine")
    engine.join(30)
    assert not engine.is_alive()


async def test_a_long_prompts_only_token_is_not_worth_copying_its_caches(start: Start) -> None:
    running = await start(width=512)
    long, short = list(range(200)) * 8, list(range(40))
    assert len(long) > DEAR_TOKENS > 200
    alone = (await running.ask(plan(short, max_tokens=300))).text
    only = (await running.ask(plan(long, max_tokens=1))).text
    streaming, _ = running.submit(plan(short, max_tokens=300))
    await until(lambda: bool(streaming.events))
    for ids, count, rows in ((long, 1, 1), (short[:30], 1, 2), (long, 3, 2)):
        running.model.shapes.clear()
        client = await running.ask(plan(ids, max_tokens=count))
        steps = [shape for shape in running.model.shapes if shape[1] == 1]
        assert max(steps) == (rows, 1), (len(ids), count)
        assert not streaming.ended.is_set()
        assert (ids, count) != (long, 1) or client.text == only
    await streaming.ended.wait()
    assert streaming.text == alone
