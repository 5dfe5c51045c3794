"""Grammars in preparation, with a compiler that hangs, dies or refuses as it is told."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import uvloop

from mlxpool.shared.errors import ApiError
from mlxpool.worker.grammar.helper import Helper
from mlxpool.worker.grammar.messages import Vocabulary
from mlxpool.worker.grammar.queue import CompileQueue, Limits, Refused

COMMAND = (sys.executable, "-m", "tests.tools.scripted_compiler")

Make = Callable[..., CompileQueue]

# What the C library calls for the rest of the process's life.
_KEPT: list[object] = []


@pytest_asyncio.fixture
async def make() -> AsyncIterator[Make]:
    made: list[CompileQueue] = []

    def make_queue(slots: int = 4, *arguments: str, **limits: float) -> CompileQueue:
        queue = CompileQueue(
            lambda: Vocabulary([b"a"], [0], 32), slots, Limits(**limits), (*COMMAND, *arguments)
        )
        made.append(queue)
        return queue

    yield make_queue
    for queue in made:
        await queue.close()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for is another process's
            await asyncio.sleep(0.005)


async def refused(entry_result: asyncio.Future[str | None]) -> Refused:
    with pytest.raises(Refused) as caught:
        await entry_result
    return caught.value


async def test_grammars_come_back_to_those_that_wait_for_them(make: Make) -> None:
    queue = make(2)
    entries = [queue.enter(f"done {place}") for place in range(5)]
    assert (queue.preparing, queue.waiting) == (2, 3)
    assert [await entry.result for entry in entries] == [f"done {place}" for place in range(5)]
    assert (queue.preparing, queue.waiting) == (0, 0)


async def test_a_refusal_carries_the_compilers_words_without_its_source_places(make: Make) -> None:
    queue = make()
    refusal = await refused(queue.enter("fail").result)
    assert (refusal.reason, refusal.unread) == ("it is no good", True)


async def test_those_beside_a_slow_grammar_are_compiled_by_the_next_process(
    make: Make, tmp_path: Path
) -> None:
    queue = make(4, compile_s=1.0)
    slow = queue.enter("hang")
    await wait_until(lambda: slow.timer is not None)
    first = queue.helper_pid
    beside = queue.enter(f"second {tmp_path / 'seen'}")
    refusal = await refused(slow.result)
    assert (refusal.reason, refusal.unread) == ("it takes more than 1 s to compile", False)
    assert "second" in (await beside.result or "")
    assert queue.helper_pid != first


async def test_a_grammar_that_breaks_the_compiler_is_tried_twice_and_takes_no_other_with_it(
    make: Make, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    queue = make(4, "--log", str(log))
    beside = queue.enter(f"second {tmp_path / 'seen'}")
    await wait_until((tmp_path / "seen").exists)
    breaking = queue.enter("die")
    after = queue.enter("done")
    assert (await refused(breaking.result)).reason == "it breaks the grammar compiler"
    assert "second" in (await beside.result or "")
    assert await after.result == "done"
    assert [line.split()[1] for line in log.read_text().splitlines()].count("die") == 2


async def test_a_process_that_never_starts_is_a_refusal_and_not_a_wait(make: Make) -> None:
    queue = make(2, "--never", start_s=0.3)
    assert (await refused(queue.enter("done").result)).reason == "it breaks the grammar compiler"
    missing = CompileQueue(lambda: Vocabulary([], [], 0), 1, Limits(), ("/nonexistent/python",))
    assert (await refused(missing.enter("done").result)).reason == "it breaks the grammar compiler"
    await missing.close()


async def test_too_many_that_wait_are_told_to_come_again(make: Make) -> None:
    queue = make(1, waiting=2)
    entries = [queue.enter("done") for _ in range(3)]
    with pytest.raises(ApiError) as caught:
        queue.enter("done")
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert caught.value.headers()["Retry-After"]
    assert "2 wait" in caught.value.message
    assert [await entry.result for entry in entries] == ["done"] * 3


async def test_a_cancelled_grammar_gives_its_place_back_at_once(make: Make) -> None:
    queue = make(1, waiting=1, leave_s=60)
    running = queue.enter("hang")
    waiting = queue.enter("done a")
    await wait_until(lambda: running.timer is not None)
    queue.leave(waiting)
    assert (queue.preparing, queue.waiting) == (1, 0)
    next_one = queue.enter("done b")
    queue.leave(running)
    assert (queue.preparing, queue.waiting) == (1, 0)
    # Without the process being killed: it may be done in a moment.
    assert await next_one.result == "done b"


async def test_a_cancelled_grammar_that_goes_on_is_killed_within_its_moment(
    make: Make, tmp_path: Path
) -> None:
    queue = make(2, leave_s=0.05)
    running = queue.enter("hang")
    beside = queue.enter(f"second {tmp_path / 'seen'}")
    await wait_until(lambda: running.timer is not None and (tmp_path / "seen").exists())
    first = queue.helper_pid
    assert first is not None
    process = psutil.Process(first)
    queue.leave(running)
    assert "second" in (await beside.result or "")
    assert await asyncio.to_thread(process.wait, 10) is not None or not process.is_running()


@pytest.mark.parametrize("leaves", [True, False], ids=["leave", "are too slow"])
async def test_clients_that_keep_sending_slow_grammars_do_not_keep_another_from_being_done(
    make: Make, leaves: bool
) -> None:
    queue = make(4, compile_s=0.6, leave_s=0.05)

    async def pester() -> None:
        while True:
            slow = queue.enter("hang")
            if leaves:
                await wait_until(lambda entry=slow: entry.timer is not None)
                queue.leave(slow)
            await asyncio.wait({slow.result})

    pests = [asyncio.ensure_future(pester()) for _ in range(3)]
    await asyncio.sleep(0)
    honest = queue.enter("apart")
    try:
        async with asyncio.timeout(60):
            assert await honest.result == "apart"
    finally:
        for pest in pests:
            pest.cancel()


async def test_an_idle_process_gives_its_memory_back_and_the_next_grammar_has_another(make: Make) -> None:
    queue = make(1, idle_s=0.05)
    assert await queue.enter("done").result == "done"
    first = queue.helper_pid
    assert first is not None
    await wait_until(lambda: queue.helper_pid is None)
    await wait_until(lambda: not psutil.pid_exists(first))
    assert await queue.enter("done again").result == "done again"


async def test_a_worker_that_stops_refuses_what_waits_and_leaves_no_process(make: Make) -> None:
    queue = make(1)
    running, waiting = queue.enter("hang"), queue.enter("done")
    await wait_until(lambda: running.timer is not None)
    pid = queue.helper_pid
    assert pid is not None
    await queue.close()
    for entry in (running, waiting):
        with pytest.raises(ApiError) as caught:
            await entry.result
        assert (caught.value.status, caught.value.code) == (503, "shutting_down")
    assert not psutil.pid_exists(pid)
    with pytest.raises(ApiError):
        queue.enter("done")


async def test_a_refusal_that_nobody_waits_for_is_no_complaint_in_the_log(make: Make) -> None:
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: said.append(context))
    queue = make(1)
    queue.enter("hang")
    queue.enter("done")
    await queue.close()
    await asyncio.sleep(0)
    gc.collect()
    assert said == []


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
async def test_a_process_that_was_killed_is_waited_for_although_nobody_remembers_it() -> None:
    async def started_and_killed() -> int:
        helper = Helper(lambda *_: None, lambda _: None)
        helper.start(lambda: Vocabulary([b"a"], [0], 32), COMMAND)
        await wait_until(lambda: helper.is_ready)
        assert helper.pid is not None
        helper.kill()
        return helper.pid

    pid = await started_and_killed()
    # Before the event loop can hear of its end.
    gc.collect()
    await wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="where starting a process may leave libraries in peace")
def test_starting_the_process_disturbs_no_library_that_computes_meanwhile() -> None:
    # What OpenBLAS does: told of a fork, it ends its threads, also in the middle of a product.
    told: list[str] = []
    before_fork = ctypes.CFUNCTYPE(None)(lambda: told.append("fork"))
    _KEPT.append(before_fork)
    assert ctypes.CDLL(None).__register_atfork(before_fork, None, None, None) == 0

    async def compile_one() -> str | None:
        queue = CompileQueue(lambda: Vocabulary([b"a"], [0], 32), 1, Limits(), COMMAND)
        try:
            return await queue.enter("done").result
        finally:
            await queue.close()

    assert uvloop.run(compile_one()) == "done"
    assert told == []
