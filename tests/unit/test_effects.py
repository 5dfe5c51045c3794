"""What of a worker's last lines a client is told, and a place that comes when its client has just left."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxpool.parent.pool.effects import Grant, Listeners, PoolEffects, last_words
from mlxpool.parent.pool.state import Ticket


def lines_of(*errors: BaseException) -> list[str]:
    """What Python prints of the last error, raised while those before it were handled."""
    try:
        for error in errors[:-1]:
            try:
                raise error
            except type(error) as known:
                errors[-1].__context__ = known
        raise errors[-1]
    except BaseException:
        return [line for line in traceback.format_exc().splitlines() if line]


def test_a_traceback_is_told_by_its_errors_alone() -> None:
    lines = ["[mlx] no kernel", *lines_of(KeyError("n_heads"), OSError("the weights are short")), "bye"]
    assert any(line.startswith("Traceback") for line in lines)
    assert any("File" in line for line in lines)
    assert last_words(lines, "killed by SIGABRT") == [
        "[mlx] no kernel",
        "KeyError: 'n_heads'",
        "OSError: the weights are short",
        "bye",
    ]


def test_what_the_reason_says_is_not_said_again() -> None:
    lines = lines_of(ValueError("not allowed to raise maximum limit"))
    assert last_words(lines, "can't start: ValueError: not allowed to raise maximum limit") == []
    assert last_words(["x.load.LoadError: no weights"], "no weights") == []
    assert last_words(["no weights", "none at all"], "no weights") == ["none at all"]


def test_the_last_five_lines_that_tell_something_are_enough() -> None:
    lines = ["1", "2", "3", "  File", "4", "5", "6", "NoneType: None"]
    assert last_words(lines, "killed by SIGABRT") == ["2", "3", "4", "5", "6"]


async def test_a_place_for_a_client_that_has_just_left_disturbs_nobody(tmp_path: Path) -> None:
    effects = PoolEffects(
        argv=[],
        env={},
        run_folder=tmp_path,
        log_folder=tmp_path,
        drain_timeout_s=1,
        cache_bytes=0,
        launch=lambda *_: pytest.fail("nothing is launched"),
        changed=lambda: None,
        listeners=Listeners(),
    )
    worker: Any = SimpleNamespace()
    effects.workers[3] = worker

    async def wait(grant: Grant) -> object:
        return await grant.granted

    tickets = [Ticket(number, "m", 0.0, state="granted", worker=3) for number in (1, 2)]
    loop = asyncio.get_running_loop()
    for ticket in tickets:
        effects.grants[ticket.number] = Grant(ticket, loop.create_future())
    leaving, staying = [asyncio.ensure_future(wait(effects.grants[one.number])) for one in tickets]
    await asyncio.sleep(0)
    leaving.cancel()
    for ticket in tickets:  # in the turn of whoever made room, before the one that left is seen to
        effects.grant(ticket)
    assert await staying is worker
    with pytest.raises(asyncio.CancelledError):
        await leaving
