"""What the prompt cache keeps, where, and in which order it goes to disk: an engine with a tiny model."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxpool.shared.control import CacheLaunch
from mlxpool.worker.cache import durability, states
from mlxpool.worker.cache.prompt_cache import PromptCache
from mlxpool.worker.cache.records import Piece
from mlxpool.worker.cache.writer import Waiting, Writer
from tests.tools.engine_fixture import Start
from tests.tools.running_engine import Running, plan, until


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(5, 250), k=count)


def on_disk(folder: Path, **changed: Any) -> CacheLaunch:
    settings: dict[str, Any] = {
        "ram_bytes": 1 << 28,
        "folder": str(folder / "kv"),
        "ssd_budget_bytes": 1 << 30,
        "idle_demote_s": None,
        "spill_queue_bytes": 1 << 28,
    }
    return CacheLaunch(**(settings | changed))


def cache_of(running: Running) -> PromptCache:
    assert running.engine.cache is not None
    return running.engine.cache


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "kv").rglob("*.safetensors")}


async def ended(running: Running, *of: Any) -> list[int]:
    """Run one row; all its ids."""
    client, row = running.submit(*of)
    await asyncio.wait_for(client.ended.wait(), 60)
    return row.ids


async def test_memory_is_held_to_its_cap_and_nothing_else_holds_what_left_it(
    start: Start, tmp_path: Path
) -> None:
    import mlx.core as mx

    alone = CacheLaunch(ram_bytes=300_000)
    # A queue that is full all the time, and no disk at all.
    for cache in (alone, on_disk(tmp_path, ram_bytes=300_000, spill_queue_bytes=350_000)):
        running = await start(cache=cache)
        await running.ask(plan(ids(0, 600)))
        before_bytes = await running.engine.call(mx.get_active_memory)
        for seed in range(1, 30):
            await running.ask(plan(ids(seed, 600)))
        grown_bytes = await running.engine.call(mx.get_active_memory) - before_bytes
        assert cache_of(running).ram.bytes <= 300_000
        assert grown_bytes < 1_000_000


async def test_what_a_record_stands_on_is_written_before_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[Piece] = []
    offer = Writer.offer

    def noted(self: Writer, waiting: Waiting, first: bool = False) -> None:
        offered.append(waiting.piece)
        offer(self, waiting, first)

    monkeypatch.setattr(Writer, "offer", noted)
    for kind, ram_bytes in (("llama", 1 << 28), ("llama", 300_000), ("sliding", 1 << 28)):
        offered.clear()
        running = await start(kind, cache=on_disk(tmp_path / f"{kind}{ram_bytes}", ram_bytes=ram_bytes))
        for seed in range(3):
            await running.ask(plan([*ids(0, 400), *ids(seed, 700)], boundaries=(400, 1000)))
        assert (await durability.flush(running.engine, 10.0)).durable
        slices = [piece.record.name for piece in offered if piece.kind == "slice"]
        for place, piece in enumerate(offered):
            if piece.record.start:
                before = {other.record.name for other in offered[:place] if other.kind == "slice"}
                assert piece.record.parent in before
        assert len(slices) >= 9


async def test_a_turn_writes_only_its_new_records_and_one_tail(start: Start, tmp_path: Path) -> None:
    running = await start(cache=on_disk(tmp_path))
    talk = await ended(running, plan(ids(1, 4000), 20))
    assert (await durability.flush(running.engine, 10.0)).durable
    before = files(tmp_path)
    assert len(before) == 4019 // 256 + 1
    talk = await ended(running, plan([*talk, *ids(2, 300)], 20))
    assert (await durability.flush(running.engine, 10.0)).durable
    after = files(tmp_path)
    # 4,339 tokens: two records have become whole, and the end is a new tail; the old one is of no use now.
    assert len(after - before) == 4339 // 256 - 4019 // 256 + 1
    assert len(before - after) == 1


async def test_states_of_turns_gone_by_are_neither_written_nor_kept_without_room(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start("sliding", cache=on_disk(tmp_path))
    cache = cache_of(running)

    def held() -> list[int]:
        return sorted(gone.record.end for gone in cache.ram.parts() if gone.kind == "state")

    prompt = ids(1, 600)
    for turn in range(5):
        if turn == 3:
            # From here on there is room for those alone that are kept whatever they take.
            monkeypatch.setattr(states, "BYTES_PER_CONVERSATION", 0)
            monkeypatch.setattr(states.surplus, "__defaults__", (0,))
        boundaries = (500, len(prompt) - 5)
        talk = await ended(running, plan(prompt, 10, boundaries=boundaries))
        prompt = [*talk[:-1], *ids(turn + 2, 60)]
    ends = [len(talk) - 1, boundaries[1]]
    assert held() == sorted([500, *ends])
    assert (await durability.flush(running.engine, 10.0)).durable
    assert sorted(int(name.split(".")[3]) for name in files(tmp_path) if ".state." in name) == held()


async def test_what_a_full_disk_refused_is_not_offered_again_at_once(start: Start, tmp_path: Path) -> None:
    running = await start(cache=on_disk(tmp_path, ssd_budget_bytes=200_000, idle_demote_s=0.0))
    cache = cache_of(running)
    assert cache.writer is not None
    await running.ask(plan(ids(1, 3000)))
    report = await durability.flush(running.engine, 10.0)
    assert not report.durable
    assert report.missing > 5
    dropped = cache.writer.dropped
    for _ in range(3):
        # As if a second had passed each time.
        cache._looked_s = float("-inf")
        await running.engine.call(cache.maintain)
    assert cache.writer.pending == 0
    assert cache.writer.dropped == dropped


async def test_a_flush_right_after_a_client_left_waits_for_what_its_row_leaves(
    start: Start, tmp_path: Path
) -> None:
    running = await start(cache=on_disk(tmp_path))
    for seed in range(5):
        client, row = running.submit(plan(ids(seed, 600), 400))
        await until(lambda client=client: bool(client.events))
        running.engine.cancel(row)
        report = await durability.flush(running.engine, 10.0)
        assert report.durable
        assert report.flushed > 0
        assert b"off" not in msgspec.json.encode(report)


async def test_a_flush_says_why_nothing_is_written(start: Start, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    running = await start(cache=on_disk(tmp_path))
    await running.ask(plan(ids(1, 600)))
    report = await durability.flush(running.engine, 10.0)
    assert (report.durable, report.missing > 0) == (False, True)
    assert isinstance(report.off, str)
    assert "not a directory" in report.off.lower()


async def test_restores_at_once_take_no_more_memory_than_one_and_the_cap(
    start: Start, tmp_path: Path
) -> None:
    import mlx.core as mx

    prompts = [ids(seed, 1800) for seed in range(6)]
    running = await start(cache=on_disk(tmp_path))
    for prompt in prompts:
        await running.ask(plan(prompt, 2))
    assert (await durability.flush(running.engine, 10.0)).durable
    again = await start(batch=8, cache=on_disk(tmp_path, ram_bytes=1_000_000))
    most = 0
    tier = cache_of(again).ram

    def watched() -> None:
        nonlocal most
        most = max(most, tier.bytes + tier.coming_bytes)

    rows = [again.row(plan(prompt, 2)) for prompt in prompts]
    again.engine.submit_all([row for _, row in rows])
    while not all(client.ended.is_set() for client, _ in rows):
        await again.engine.call(watched)
        await asyncio.sleep(0)
    assert [client.usage.cached_tokens for client, _ in rows] == [1799] * 6
    # One prefix takes 0.92 MB.
    assert most <= 2_000_000
    await again.engine.call(mx.clear_cache)


async def test_files_that_make_no_memory_are_left_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxpool.worker.cache import layers

    running = await start(cache=on_disk(tmp_path))
    first = await running.ask(plan(ids(1, 700)))
    assert (await durability.flush(running.engine, 10.0)).durable
    before = files(tmp_path)

    def no_memory(*_: Any, **__: Any) -> list[Any]:
        raise RuntimeError("[malloc] Unable to allocate")

    again = await start(cache=on_disk(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(layers, "assemble", no_memory)
        answer = await again.ask(plan(ids(1, 700)))
    assert answer.text == first.text
    assert answer.usage.cached_tokens == 0
    assert before <= files(tmp_path)
    assert (await again.ask(plan(ids(1, 700)))).usage.cached_tokens == 699


@pytest.mark.parametrize("what", ["fifo", "folder", "full folder", "link"])
async def test_what_is_no_file_under_a_records_name_gives_way_to_the_record(
    start: Start, tmp_path: Path, what: str
) -> None:
    running = await start(cache=on_disk(tmp_path))
    first = await running.ask(plan(ids(1, 700)))
    assert (await durability.flush(running.engine, 10.0)).durable
    for path in (tmp_path / "kv").rglob("*.safetensors"):
        path.unlink()
        if what == "fifo":
            os.mkfifo(path)
        elif what == "link":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
            if what == "full folder":
                (path / "something").write_text("else")
    again = await start(cache=on_disk(tmp_path))
    answer = await again.ask(plan(ids(1, 700)))
    assert (answer.text, answer.usage.cached_tokens) == (first.text, 0)
    report = await durability.flush(again.engine, 10.0)
    if what == "full folder":
        # Whose it is nobody knows: it stays, and the record is missing.
        assert report.missing > 0
        return
    assert report.durable
    assert (await (await start(cache=on_disk(tmp_path))).ask(plan(ids(1, 700)))).usage.cached_tokens == 699


async def test_a_look_up_that_fails_is_a_miss(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxpool.worker.cache import records

    running = await start(cache=CacheLaunch(ram_bytes=1 << 28))
    first = await running.ask(plan(ids(1, 700)))

    def broken(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patched:
        patched.setattr(records, "find", broken)
        clients = await asyncio.gather(running.ask(plan(ids(1, 700))), running.ask(plan(ids(2, 800))))
    assert clients[0].text == first.text
    assert [client.usage.cached_tokens for client in clients] == [0, 0]
    assert (await running.ask(plan(ids(1, 700)))).usage.cached_tokens == 699
