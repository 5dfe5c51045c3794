"""Who holds the engine, counted; what it says of a time that is over is heard by nobody."""

from __future__ import annotations

import asyncio

import pytest

from mlxpool.worker.engine.hold import Hold


class Engine:
    """Looks when it is nudged; `rests` is its word that nothing runs in this term."""

    def __init__(self) -> None:
        self.nudges = 0
        self.hold = Hold(asyncio.get_running_loop(), self._nudge)

    def _nudge(self) -> None:
        self.nudges += 1

    async def rests(self, term: int) -> None:
        self.hold.rest(term)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_hold_is_taken_once_nothing_runs_and_a_second_one_at_once():
    engine = Engine()
    first = asyncio.create_task(engine.hold.take())
    await asyncio.sleep(0)
    assert (engine.hold.term, engine.nudges, first.done()) == (1, 1, False)
    await engine.rests(1)
    await asyncio.wait_for(first, 60)
    await asyncio.wait_for(engine.hold.take(), 30)
    assert engine.nudges == 1


async def test_the_engine_goes_on_with_the_last_holder_s_end_and_is_told_so():
    engine = Engine()
    takes = [asyncio.create_task(engine.hold.take()) for _ in range(2)]
    await asyncio.sleep(0)
    await engine.rests(1)
    await asyncio.gather(*takes)
    engine.hold.give_back()
    assert (engine.hold.term, engine.hold.resting.is_set(), engine.nudges) == (1, True, 1)
    engine.hold.give_back()
    assert (engine.hold.term, engine.hold.resting.is_set(), engine.nudges) == (0, False, 2)


async def test_what_is_said_of_an_earlier_term_grants_nothing():
    engine = Engine()
    given_up = asyncio.create_task(engine.hold.take())
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert (engine.hold.term, engine.nudges) == (0, 2)
    again = asyncio.create_task(engine.hold.take())
    await asyncio.sleep(0)
    await engine.rests(1)  # it saw the first one, and rows run again since
    assert (engine.hold.term, again.done()) == (2, False)
    await engine.rests(2)
    await asyncio.wait_for(again, 60)
    engine.hold.give_back()
    await engine.rests(2)
    assert not engine.hold.resting.is_set()
