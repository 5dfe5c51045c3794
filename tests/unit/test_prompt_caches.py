"""Shares of the prompt cache on their way to workers that can't be reached, refuse, or say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import msgspec
import pytest

from mlxpool.parent.pool import prompt_caches
from mlxpool.parent.pool.prompt_caches import PromptCaches
from mlxpool.parent.pool.upstream import Unreachable, Upstream, UpstreamError
from mlxpool.shared.control import CacheShare, CacheSummary
from tests.tools.served import until


class Answer:
    """What a fake worker answers."""

    def __init__(self, status: int) -> None:
        self.status = status

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read(self) -> bytes:
        return b"{}"


class FakeWorker(Upstream):
    """A worker's socket with a fate for each request; what comes after the last one is answered."""

    def __init__(self, *fates: Exception | int | None) -> None:
        """A fate is an exception, a status, or None for silence."""
        super().__init__("")
        self.fates = list(fates)
        self.told: list[int] = []

    async def request(  # type: ignore[override]
        self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        assert (method, headers) == ("POST", None)
        if target.startswith("/control/drain"):
            await asyncio.get_running_loop().create_future()
        assert target == "/control/cache"
        self.told.append(msgspec.json.decode(body, type=CacheShare).ram_bytes)
        fate = self.fates.pop(0) if self.fates else 200
        if isinstance(fate, Exception):
            raise fate
        if fate is None:
            await asyncio.get_running_loop().create_future()
        assert fate is not None
        return Answer(fate)


class Pool:
    """Prompt caches of fake workers, and what runs in their background."""

    def __init__(self, total_bytes: int, *workers: FakeWorker) -> None:
        self.workers = dict(enumerate(workers, 1))
        self.tasks: set[asyncio.Task[None]] = set()
        self.caches = PromptCaches(total_bytes, self.workers.get, self._background)
        for worker in self.workers:
            self.caches.launched(worker, f"m{worker}")
            self.caches.ready(worker)

    def _background(self, worker: int, work: Coroutine[None, None, None]) -> None:
        assert worker in self.workers
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def held(self) -> list[int]:
        return [self.caches.share_of(worker) for worker in self.workers]

    async def first_answers(self) -> None:
        """Until what was told at once has met its fate."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Until nothing is on its way."""
        async with asyncio.timeout(60):
            while self.tasks:
                await asyncio.wait(set(self.tasks))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits as long as people would."""
    for name in ("RETRY_FIRST_S", "RETRY_MAX_S", "SHARE_PATIENCE_S"):
        monkeypatch.setattr(prompt_caches, name, 0.02)
    monkeypatch.setattr(prompt_caches, "SHARE_TIMEOUT_S", 0.2)


LOST = [
    pytest.param(Unreachable("can't connect"), id="unreachable"),
    pytest.param(UpstreamError("the connection is gone"), id="cut"),
    pytest.param(500, id="refused"),
]


@pytest.mark.parametrize("fate", LOST)
async def test_a_newcomer_whose_raise_is_lost_gets_it_in_the_end(fate: Exception | int) -> None:
    first, second = FakeWorker(), FakeWorker(fate, fate)
    pool = Pool(900, first, second)
    assert pool.held() == [900, 0]
    await pool.settle()
    assert (pool.held(), first.told, second.told) == ([450, 450], [450], [450, 450, 450])


@pytest.mark.parametrize("fate", LOST)
async def test_what_was_not_given_up_is_given_to_nobody_until_it_is(fate: Exception | int) -> None:
    first, second = FakeWorker(fate), FakeWorker()
    pool = Pool(900, first, second)
    await pool.first_answers()
    assert (pool.held(), second.told) == ([900, 0], [])
    await pool.settle()
    assert (pool.held(), first.told, second.told) == ([450, 450], [450, 450], [450])


async def test_one_that_says_nothing_is_taken_at_its_word_in_the_end() -> None:
    first, second = FakeWorker(None), FakeWorker()
    pool = Pool(900, first, second)
    await pool.settle()
    assert (pool.held(), first.told, second.told) == ([450, 450], [450], [450])


async def test_one_that_says_nothing_holds_up_no_raise_that_is_free_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_caches, "SHARE_TIMEOUT_S", 60.0)
    silent, others = FakeWorker(), [FakeWorker(), FakeWorker()]
    pool = Pool(900, silent, *others[:1])
    await pool.settle()
    assert pool.held() == [450, 450]
    silent.fates = [None]
    pool.workers[3] = others[1]
    pool.caches.launched(3, "m3")
    pool.caches.ready(3)
    await until(lambda: pool.held() == [450, 300, 150])
    for task in pool.tasks:
        task.cancel()


async def test_a_worker_that_is_gone_is_told_nothing_more() -> None:
    first, second = FakeWorker(Unreachable("can't connect")), FakeWorker()
    pool = Pool(900, first, second)
    await pool.first_answers()
    del pool.workers[1]
    pool.caches.gone(1)
    await pool.settle()
    assert (first.told, second.told, pool.held()) == ([450], [900], [900])


async def test_what_a_worker_takes_along_that_dies_in_its_drain_is_said() -> None:
    pool = Pool(900, FakeWorker())
    pool.caches.has_disk(1)
    pool.caches.heard(1, "m1", CacheSummary(pending=3))
    drain = asyncio.ensure_future(pool.caches.drain(1, 60))
    await pool.first_answers()
    drain.cancel()
    assert pool.caches.gone(1) == (
        "the worker ended 0.0 s into its drain: prompts that were not on disk yet are lost "
        "(3 records waited to be written)"
    )
    assert pool.caches.tally.drains == {True: 0, False: 1}


async def test_a_worker_that_dies_in_no_drain_or_keeps_nothing_on_disk_loses_nothing() -> None:
    pool = Pool(900, FakeWorker(), FakeWorker())
    pool.caches.has_disk(1)
    assert pool.caches.gone(1) is None
    drain = asyncio.ensure_future(pool.caches.drain(2, 60))
    await pool.first_answers()
    drain.cancel()
    assert pool.caches.gone(2) is None
    assert pool.caches.tally.drains == {True: 1, False: 0}


async def test_a_drain_without_an_answer_says_how_long_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_caches, "REPORT_MARGIN_S", 0.05)
    pool = Pool(900, FakeWorker())
    pool.caches.has_disk(1)
    ended = await pool.caches.drain(1, 0.05)
    assert not ended.durable
    assert ended.text == (
        "the drain failed after 0.1 s (no answer within 0.1 s): prompts that were not on disk yet are lost"
    )
    assert pool.caches.gone(1) is None
