"""Prompts that begin alike and come together: what they share is prefilled once, whoever leaves or fails."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from mlx_lm.models.cache import KVCache

from mlxpool.shared.control import CacheLaunch
from mlxpool.worker.adapters.layers import Switch
from mlxpool.worker.cache import durability
from mlxpool.worker.cache.layers import layout_of
from mlxpool.worker.cache.prompt_cache import PromptCache
from mlxpool.worker.cache.ram import RamTier
from mlxpool.worker.cache.restore import Restore
from mlxpool.worker.engine import following, prefill
from mlxpool.worker.engine.admission import KvCost, LayerKv
from mlxpool.worker.engine.chunks import ChunkWidth
from mlxpool.worker.engine.prefill import Prefills
from mlxpool.worker.engine.prompt import Prompt
from mlxpool.worker.engine.row import Row
from mlxpool.worker.text.events import Failure, Finish
from tests.tools import tiny_models
from tests.tools.engine_fixture import Start
from tests.tools.running_engine import Client, Running, plan, until

IN_MEMORY = CacheLaunch(ram_bytes=1 << 28)
WIDTH = 16


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(5, 250), k=count)


async def ready(start: Start, kind: tiny_models.Kind = "llama", cache: CacheLaunch | None = None) -> Running:
    """An engine that has tried already whether rows of its model may share passes, and notes what it runs."""
    running = await start(kind, batch=8, width=WIDTH, cache=cache)
    await asyncio.gather(running.ask(plan(ids(95, 40))), running.ask(plan(ids(96, 40))))
    running.model.shapes.clear()
    return running


def prefilled(running: Running) -> int:
    """Tokens that went through the model in prefill: chunks are wider than one token here."""
    return sum(rows * width for rows, width in running.model.shapes if width > 1)


def at_chunk(running: Running, number: int, do: Callable[[], bool]) -> None:
    """Have something done while the engine's thread runs its chunk of that number, from 1; True: it fails."""

    def look(_shape: tuple[int, int]) -> bool:
        return len(running.model.shapes) == number and do()

    running.model.fail_when = look


def cancel(running: Running, rows: Sequence[Row]) -> Callable[[], bool]:
    def leave() -> bool:
        for row in rows:
            running.engine.cancel(row)
        return False

    return leave


async def lone(start: Start, kind: tiny_models.Kind, prompts: Sequence[Sequence[int]]) -> list[str]:
    alone = await start(kind, width=128)
    return [(await alone.ask(plan(prompt))).text for prompt in prompts]


async def all_ended(clients: Sequence[Client]) -> None:
    for client in clients:
        await asyncio.wait_for(client.ended.wait(), 60)


def told(clients: Sequence[Client]) -> list[int]:
    """Of their prompts, the tokens that they say were not prefilled for them."""
    return [client.usage.cached_tokens for client in clients]


BOTH = pytest.mark.parametrize("cache", [None, IN_MEMORY], ids=["no cache", "cache"])
KINDS = pytest.mark.parametrize("kind", ["llama", "sliding"])


@BOTH
@KINDS
async def test_what_a_leader_that_left_had_read_is_not_read_again_by_any_follower(
    start: Start, kind: tiny_models.Kind, cache: CacheLaunch | None
) -> None:
    running = await ready(start, kind, cache)
    shared = ids(1, 800)
    leader = running.row(plan([*shared, *ids(2, 50)]))
    # The second parts from all others earlier, and is in nobody's way.
    prompts = [[*shared[:520], *ids(3, 31)], *([*shared, seed, *ids(seed, 39)] for seed in (4, 5, 6, 7))]
    followers = [running.row(plan(prompt)) for prompt in prompts]
    at_chunk(running, 20, cancel(running, [leader[1]]))
    running.engine.submit_all([leader[1], *(row for _, row in followers)])
    clients = [client for client, _ in followers]
    await all_ended(clients)
    assert [client.text for client in clients] == await lone(start, kind, prompts)
    assert prefilled(running) == 800 + 30 + 4 * 39
    # One of them went on where the leader was.
    assert told(clients) == [520, 20 * WIDTH, 800, 800, 800]


@BOTH
@KINDS
async def test_followers_of_a_leader_that_failed_begin_anew_and_share_that(
    start: Start, kind: tiny_models.Kind, cache: CacheLaunch | None
) -> None:
    running = await ready(start, kind, cache)
    shared = ids(1, 800)
    leader = running.row(plan([*shared, *ids(2, 50)]))
    prompts = [[*shared, seed, *ids(seed, 39)] for seed in (4, 5, 6)]
    followers = [running.row(plan(prompt)) for prompt in prompts]
    at_chunk(running, 20, lambda: True)
    running.engine.submit_all([leader[1], *(row for _, row in followers)])
    clients = [client for client, _ in followers]
    await all_ended([leader[0], *clients])
    assert isinstance(leader[0].events[-1], Failure)
    assert [client.text for client in clients] == await lone(start, kind, prompts)
    # Of what the leader had read, whole records are in the prompt cache; a window is in none of them.
    kept = 256 if cache is not None and kind == "llama" else 0
    assert prefilled(running) == 20 * WIDTH + (800 - kept) + 3 * 39
    assert told(clients) == [kept, 800, 800]


@BOTH
@pytest.mark.parametrize("leaving", [[0], [1], [0, 1]], ids=["first", "second", "both"])
async def test_leaders_that_follow_one_another_leave_the_others_to_go_on_together(
    start: Start, leaving: list[int], cache: CacheLaunch | None
) -> None:
    running = await ready(start, cache=cache)
    first, second = ids(1, 500), ids(2, 300)
    prompts = [
        [*first, *ids(3, 200)],
        [*first, *second, 4, *ids(4, 39)],
        *([*first, *second, seed, *ids(seed, 39)] for seed in (5, 6, 7)),
    ]
    rows = [running.row(plan(prompt)) for prompt in prompts]
    at_chunk(running, 10, cancel(running, [rows[place][1] for place in leaving]))
    running.engine.submit_all([row for _, row in rows])
    left = [place for place in range(5) if place not in leaving]
    clients = [rows[place][0] for place in left]
    await all_ended(clients)
    assert [client.text for client in clients] == await lone(
        start, "llama", [prompts[place] for place in left]
    )
    tails = sum(199 if place == 0 else 39 for place in left)
    assert prefilled(running) == 500 + 300 + tails


async def test_followers_that_a_restored_leader_has_passed_are_led_by_one_of_them(
    start: Start, tmp_path: Path
) -> None:
    on_disk = CacheLaunch(1 << 28, str(tmp_path / "kv"), 1 << 30, None, True, 1 << 28)
    shared = ids(1, 800)
    longer = [*shared, *ids(2, 100)]
    running = await start("sliding", cache=on_disk)
    await running.ask(plan(longer, boundaries=(850,)))
    assert (await durability.flush(running.engine, 10.0)).durable
    running = await ready(start, "sliding", on_disk)
    # A window can be taken up at 850 alone: past what the others share with the first.
    prompts = [[*longer[:870], 7], *([*shared, seed, *ids(seed, 39)] for seed in (3, 4, 5))]
    rows = [running.row(plan(prompt)) for prompt in prompts]
    running.engine.submit_all([row for _, row in rows])
    clients = [client for client, _ in rows]
    await all_ended(clients)
    assert [client.text for client in clients] == await lone(start, "sliding", prompts)
    assert prefilled(running) == 20 + 800 + 3 * 39
    assert told(clients) == [850, 0, 800, 800]


@BOTH
async def test_of_requests_with_equal_prompts_one_says_that_it_was_prefilled_whoever_leaves(
    start: Start, cache: CacheLaunch | None
) -> None:
    running = await ready(start, cache=cache)
    rows = [running.row(plan(ids(1, 900))) for _ in range(4)]
    at_chunk(running, 20, cancel(running, [rows[0][1]]))
    running.engine.submit_all([row for _, row in rows])
    clients = [client for client, _ in rows[1:]]
    await all_ended(clients)
    assert told(clients) == [0, 899, 899]
    assert prefilled(running) == 899


async def test_a_row_that_takes_a_finished_prefill_over_says_that_all_of_it_was_there(start: Start) -> None:
    running = await start(batch=1, width=WIDTH)
    rows = [running.row(plan(ids(1, 300), 3)) for _ in range(3)]
    running.engine.submit_all([row for _, row in rows])
    await all_ended([client for client, _ in rows])
    assert told([client for client, _ in rows]) == [0, 299, 299]


async def test_a_restore_whose_first_row_left_is_a_hit_of_the_next(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk = CacheLaunch(1 << 28, str(tmp_path / "kv"), 1 << 30, None, True, 1 << 28)
    running = await start(cache=on_disk)
    await running.ask(plan(ids(1, 600)))
    assert (await durability.flush(running.engine, 10.0)).durable
    running = await start(cache=on_disk)
    advance, disk = Restore.advance, threading.Event()
    monkeypatch.setattr(Restore, "advance", lambda restore: advance(restore) if disk.is_set() else None)
    rows = [running.row(plan([*ids(1, 600), *ids(seed, 50)])) for seed in (2, 2, 2)]
    running.engine.submit_all([row for _, row in rows])
    # A turn that has them all: nothing goes on before the disk has answered.
    await until(lambda: running.engine.counters.rows == 3)
    running.engine.cancel(rows[0][1])
    await until(lambda: running.engine.counters.cancelled == 1)
    disk.set()
    running.engine.nudge()
    clients = [client for client, _ in rows[1:]]
    await all_ended(clients)
    assert told(clients) == [600, 649]
    assert running.engine.cache is not None
    stats = running.engine.cache.stats()
    assert (stats.hits, stats.misses, stats.cached_tokens) == (1, 0, 600)


def waited_for(prompt: Sequence[int]) -> Prompt:
    made = Prompt(prompt, "", [])
    made.rows.append(Row(plan(prompt), None, lambda _: None))  # type: ignore[arg-type]
    return made


def test_nobody_follows_one_that_will_go_on_past_what_they_share_or_waits_for_itself() -> None:
    shared = ids(1, 800)
    leader, follower = (waited_for([*shared, seed, *ids(seed, 39)]) for seed in (2, 3))
    follower.follows, follower.parts_at = leader, 800
    newcomer = waited_for([*shared[:400], 4, *ids(4, 39)])
    assert following.ahead(newcomer, [follower, leader], []) == (leader, 400)
    leader.done = 401
    assert following.ahead(newcomer, [follower, leader], []) is None
    assert following.ahead(leader, [follower, leader], []) is None
    other = waited_for([*shared, 5, *ids(5, 39)])
    assert following.ahead(other, [follower, leader], []) == (follower, 800)
    assert following.ahead(other, [follower, leader], [leader]) is None


class NoMemory:
    """Copies of caches that fail, so many of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
        self.made, self._fails, self._copy = 0, fails, prefill.copy_caches
        monkeypatch.setattr(prefill, "copy_caches", self.copy)

    def copy(self, caches: list[object]) -> list[object]:
        self.made += 1
        if self.made <= self._fails:
            raise RuntimeError("no memory")
        return self._copy(caches)


async def test_rows_whose_hand_over_fails_are_told_and_the_engine_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(width=WIDTH)
    # Of three rows two get copies: here the second copy is the one that fails.
    copies = NoMemory(monkeypatch, 0)
    copy = copies.copy
    monkeypatch.setattr(prefill, "copy_caches", lambda caches: 1 / 0 if copies.made else copy(caches))
    rows = [running.row(plan(ids(1, 100), seed=seed)) for seed in range(3)]
    running.engine.submit_all([row for _, row in rows])
    await all_ended([client for client, _ in rows])
    assert all(isinstance(client.events[-1], Failure) for client, _ in rows)
    assert running.engine.pending == 0
    assert running.engine.counters.errors == 3
    assert (await running.ask(plan(ids(1, 100)))).usage.cached_tokens == 0
    await until(lambda: running.engine.counters.kv_used_bytes == 0)


async def test_a_follower_that_gets_no_copy_begins_by_itself_and_spares_its_leader(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await ready(start)
    NoMemory(monkeypatch, 1)
    shared = ids(1, 400)
    prompts = [[*shared, seed, *ids(seed, 39)] for seed in (2, 3)]
    rows = [running.row(plan(prompt)) for prompt in prompts]
    running.engine.submit_all([row for _, row in rows])
    clients = [client for client, _ in rows]
    await all_ended(clients)
    assert [client.events[-1] for client in clients] == [Finish("length")] * 2
    assert [client.text for client in clients] == await lone(start, "llama", prompts)
    assert told(clients) == [0, 0]


async def test_a_prefill_is_not_kept_for_a_row_of_another_namespace(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = NoMemory(monkeypatch, 0)
    running = await start(batch=1, width=WIDTH)
    rows = [running.row(plan(ids(1, 300), 3, namespace=name)) for name in ("one", "two")]
    running.engine.submit_all([row for _, row in rows])
    await all_ended([client for client, _ in rows])
    assert told([client for client, _ in rows]) == [0, 0]
    assert copies.made == 0


def test_a_kept_prefill_goes_when_those_that_wait_are_of_another_namespace() -> None:
    cost = KvCost((LayerKv(8),))
    prefills = Prefills(Switch(None), lambda: [KVCache()], ChunkWidth("cpu", WIDTH))
    same, other = (
        Row(plan([5], namespace=name), None, lambda _: None)  # type: ignore[arg-type]
        for name in ("one", "two")
    )
    for waiting, kept in ((same, True), (other, False)):
        prefills.attach(Row(same.plan, None, lambda _: None))  # type: ignore[arg-type]
        prompt = prefills.next()
        assert prompt is not None
        prefills.hand_over(prompt, keep=True)
        prefills.drop_kept([waiting])
        assert (prompt in prefills._prompts) == kept
        prefills.drop_kept()
        assert prefills.kept_bytes(cost) == 0


def test_a_row_that_had_to_make_room_in_its_prefill_is_looked_up_again_and_counted_once() -> None:
    layout = layout_of([KVCache()])
    assert layout is not None
    cache = PromptCache(layout, lambda: [KVCache()], RamTier(1 << 20), lambda: None)
    prefills = Prefills(Switch(None), lambda: [KVCache()], ChunkWidth("cpu", WIDTH), cache)
    row = Row(plan(ids(1, 300)), None, lambda _: None)  # type: ignore[arg-type]
    for _ in range(2):
        prefills.attach(row)
        prefills.discard([row])
        row.requeue()
    assert (cache.hits, cache.misses) == (0, 1)
