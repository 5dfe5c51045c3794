"""What the engine does with prefixes: in the prompt cache, on disk, and shared by prompts on their way."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import mlx.core as mx

from mlxpool.shared.control import CacheLaunch
from mlxpool.worker.cache import durability
from tests.tools.engine_fixture import Start
from tests.tools.running_engine import Client, Running, plan, until

IN_MEMORY = CacheLaunch(ram_bytes=1 << 28)


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(5, 250), k=count)


def prefilled(running: Running, since: int = 0) -> int:
    """Tokens that went through the model in prefill: chunks are wider than one token here."""
    return sum(rows * width for rows, width in running.model.shapes[since:] if width > 1)


def said(client: Client) -> list[int]:
    """An answer, and how many tokens of its prompt were not prefilled for it."""
    return [client.usage.completion_tokens, client.usage.cached_tokens]


async def test_the_same_prompt_again_needs_no_prefill_and_gets_the_same_answer(start: Start) -> None:
    running = await start(cache=IN_MEMORY)
    first = await running.ask(plan(ids(1, 700)))
    seen = len(running.model.shapes)
    second = await running.ask(plan(ids(1, 700)))
    assert second.text == first.text
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 699)
    assert prefilled(running, seen) == 0
    stats = running.engine.cache.stats() if running.engine.cache else None
    assert stats is not None
    assert (stats.hits, stats.misses, stats.cached_tokens) == (1, 1, 699)


async def test_the_next_turn_goes_on_behind_the_answer(start: Start) -> None:
    running = await start(cache=IN_MEMORY)
    prompt = ids(1, 300)
    client, row = running.submit(plan(prompt, 40))
    await asyncio.wait_for(client.ended.wait(), 60)
    turn = [*row.ids, *ids(2, 30)]
    second = await running.ask(plan(turn))
    # The last token of an answer that reached its limit never went through the model.
    assert second.usage.cached_tokens == 300 + 40 - 1
    alone = await (await start()).ask(plan(turn))
    assert second.text == alone.text


async def test_a_prompt_that_parts_in_the_middle_of_a_record_reuses_all_before(start: Start) -> None:
    running = await start(cache=IN_MEMORY)
    await running.ask(plan([*ids(1, 400), *ids(2, 100)]))
    other = await running.ask(plan([*ids(1, 400), *ids(3, 100)]))
    assert other.usage.cached_tokens == 400


async def test_another_namespace_shares_nothing(start: Start) -> None:
    running = await start(cache=IN_MEMORY)
    await running.ask(plan(ids(1, 400), namespace="one"))
    assert (await running.ask(plan(ids(1, 400), namespace="two"))).usage.cached_tokens == 0
    assert (await running.ask(plan(ids(1, 400), namespace="one"))).usage.cached_tokens == 399


async def test_prompts_that_begin_alike_and_come_together_prefill_what_they_share_once(start: Start) -> None:
    for cache in (None, IN_MEMORY):
        running = await start(cache=cache)
        shared = ids(1, 600)
        prompts = [[*shared, *ids(2, 50)], [*shared, *ids(3, 70)], [*shared[:300], *ids(4, 40)]]
        alone = await start()
        lone = [(await alone.ask(plan(prompt))).text for prompt in prompts]
        # Whether rows of a model may share passes is tried when the first two could.
        await asyncio.gather(running.ask(plan(ids(5, 40))), running.ask(plan(ids(6, 40))))
        seen = len(running.model.shapes)
        rows = [running.row(plan(prompt)) for prompt in prompts]
        running.engine.submit_all([row for _, row in rows])
        for client, _ in rows:
            await asyncio.wait_for(client.ended.wait(), 60)
        assert [client.text for client, _ in rows] == lone
        assert prefilled(running, seen) == (600 + 49) + 69 + 39
        assert [client.usage.cached_tokens for client, _ in rows] == [0, 600, 300]


async def test_a_client_that_left_in_prefill_and_comes_again_goes_on_where_it_was(start: Start) -> None:
    running = await start(cache=IN_MEMORY)
    prompt = ids(1, 1500)
    _, row = running.submit(plan(prompt))
    await until(lambda: prefilled(running) > 900)
    running.engine.cancel(row)
    again = await running.ask(plan(prompt))
    assert again.usage.cached_tokens >= 768
    assert again.usage.cached_tokens % 256 == 0


async def test_a_cache_that_cannot_be_cut_is_kept_at_the_boundary_and_at_the_end(start: Start) -> None:
    running = await start("sliding", cache=IN_MEMORY)
    prompt = ids(1, 500)
    client, row = running.submit(plan(prompt, 30, boundaries=(490,)))
    await asyncio.wait_for(client.ended.wait(), 60)
    # No state lies at the prompt's own end.
    again = await running.ask(plan(prompt, 30, boundaries=(490,)))
    assert again.usage.cached_tokens == 490
    assert again.text == client.text
    longer = await running.ask(plan([*row.ids[:-1], *ids(2, 20)]))
    assert longer.usage.cached_tokens == 500 + 29
    alone = await (await start("sliding")).ask(plan([*row.ids[:-1], *ids(2, 20)]))
    assert longer.text == alone.text


async def test_rows_that_leave_a_shared_batch_are_kept_like_those_that_were_alone(start: Start) -> None:
    for kind in ("llama", "sliding"):
        running = await start(kind, cache=IN_MEMORY)
        prompts = [ids(seed, 260 + 40 * seed) for seed in range(4)]
        rows = [running.submit(plan(prompt, 12 + 5 * seed)) for seed, prompt in enumerate(prompts)]
        for client, _ in rows:
            await asyncio.wait_for(client.ended.wait(), 60)
        alone = await start(kind)
        for _, row in rows:
            turn = [*row.ids[:-1], *ids(9, 25)]
            longer = await running.ask(plan(turn))
            assert longer.usage.cached_tokens == len(row.ids) - 1
            assert longer.text == (await alone.ask(plan(turn))).text


async def test_memory_that_is_full_makes_misses_and_no_wrong_answer(start: Start) -> None:
    running = await start(cache=CacheLaunch(ram_bytes=300_000))
    alone = await start()
    for seed in (1, 2, 3, 1, 2, 3):
        prompt = ids(seed, 600)
        assert (await running.ask(plan(prompt))).text == (await alone.ask(plan(prompt))).text
        assert running.engine.cache is not None
        assert running.engine.cache.ram.bytes <= 300_000


async def test_several_answers_of_one_prompt_report_what_was_not_prefilled_for_each(start: Start) -> None:
    running = await start("sliding", cache=IN_MEMORY)
    await running.ask(plan(ids(1, 300), boundaries=(280,)))
    rows = [
        running.row(plan(ids(1, 300), boundaries=(280,), seed=seed, temperature=1.0)) for seed in range(3)
    ]
    running.engine.submit_all([row for _, row in rows])
    for client, _ in rows:
        await asyncio.wait_for(client.ended.wait(), 60)
    # The first is the one that an API shows for all choices of a request.
    assert [client.usage.cached_tokens for client, _ in rows] == [280, 299, 299]


async def test_a_flush_right_after_a_client_left_brings_what_its_row_held_to_disk(
    start: Start, tmp_path: Path
) -> None:
    on_disk = CacheLaunch(1 << 28, str(tmp_path / "kv"), 1 << 30, None, True, 1 << 28)
    running = await start(cache=on_disk)
    left: list[list[int]] = []
    for seed in range(4):
        _, row = running.submit(plan(ids(seed, 300), 2000))
        await until(lambda row=row: row.emitted > 20)  # type: ignore[misc]
        running.engine.cancel(row)
        assert (await durability.flush(running.engine, 10.0)).durable
        left.append(list(row.ids))
    again = await start(cache=on_disk)
    for gone in left:
        assert (await again.ask(plan([*gone, 7]))).usage.cached_tokens >= len(gone) - 1


async def test_a_restarted_worker_goes_on_from_disk(start: Start, tmp_path: Path) -> None:
    on_disk = CacheLaunch(1 << 28, str(tmp_path / "kv"), 1 << 30, None, True, 1 << 28)
    for kind in ("llama", "sliding"):
        running = await start(kind, cache=on_disk)
        client, row = running.submit(plan(ids(1, 700), 30, boundaries=(650,)))
        await asyncio.wait_for(client.ended.wait(), 60)
        report = await durability.flush(running.engine, 10.0)
        assert report.durable
        assert report.missing == 0
        again = await start(kind, cache=on_disk)
        repeated = await again.ask(plan(ids(1, 700), 30, boundaries=(650,)))
        assert repeated.text == client.text
        assert repeated.usage.cached_tokens == (699 if kind == "llama" else 650)
        turn = [*row.ids[:-1], *ids(2, 20)]
        assert (await again.ask(plan(turn))).usage.cached_tokens == 729
        nothing_new = await durability.flush(again.engine, 10.0)
        assert nothing_new.durable


async def test_a_smaller_share_of_memory_is_reached_before_it_is_answered(
    start: Start, tmp_path: Path
) -> None:

    running = await start(cache=CacheLaunch(1 << 28, str(tmp_path / "kv"), 1 << 30, None, True, 1 << 28))
    cache = running.engine.cache
    assert cache is not None
    assert cache.writer is not None
    for seed in range(6):
        await running.ask(plan(ids(seed, 600)))
    assert cache.ram.bytes > 1_500_000
    await durability.set_ram_bytes(running.engine, 400_000, 1 << 30)
    assert cache.ram.bytes <= 400_000
    assert cache.writer.pending_bytes == 0
    # What had to go is on disk.
    assert (await running.ask(plan(ids(0, 600)))).usage.cached_tokens == 599
    # What a plan lets MLX keep of freed buffers stays as it was, with a share that shrinks or grows.
    for share in (300_000, 500_000):
        await durability.set_ram_bytes(running.engine, share, 1 << 30, reserve_bytes=1 << 26)
        assert mx.set_cache_limit(1 << 27) == 1 << 26
