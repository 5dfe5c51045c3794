"""A connection's turns: when the next one may come."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mlxpool.parent.edge import responses_socket
from mlxpool.parent.edge.responses_socket import Held, SocketSink
from mlxpool.shared.api.response_events import event
from mlxpool.shared.errors import encode, error

CREATE = b'{"type": "response.create", "model": "m", "input": "x"}'
END = event("response.completed", 0, response={"id": "resp_1"})
REFUSAL = encode(error("model_not_found", "there is none"), "responses", "req")


class Last(msgspec.Struct):
    """As much of a record as is held."""

    raw_bytes: int
    events: None = None


class Frames:
    """A socket that notes what is sent."""

    closed = False

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    async def send_str(self, text: str) -> None:
        self.sent.append(msgspec.json.decode(text))


@pytest.mark.parametrize(("ending", "kinds"), [(True, ["response.completed"]), (False, ["error"])])
async def test_a_turn_that_is_sent_while_the_last_one_is_put_away_waits_for_it(
    ending: bool, kinds: list[str]
) -> None:
    said, rest, begun = asyncio.Event(), asyncio.Event(), 0

    async def prepare(*_: Any) -> Any:
        return SimpleNamespace(store=True)

    async def answer(prepared: Any, request_id: str, sink: SocketSink, *_: Any) -> None:
        nonlocal begun
        del prepared, request_id
        begun += 1
        await (sink.send(END) if ending else sink.whole(404, REFUSAL, {}))
        said.set()
        await rest.wait()

    socket = Frames()
    answers: Any = SimpleNamespace(prepare=prepare, answer=answer)
    connection = responses_socket._Connection(answers, Held(), socket, "req")  # type: ignore[arg-type]
    await connection.hear(CREATE)
    await said.wait()
    hearing = asyncio.create_task(connection.hear(CREATE))
    await asyncio.sleep(0)
    assert ([frame["type"] for frame in socket.sent], begun) == (kinds, 1)
    rest.set()
    said.clear()
    await hearing
    await said.wait()
    assert ([frame["type"] for frame in socket.sent], begun) == (kinds * 2, 2)
    await connection.leave()


async def test_what_ends_when_its_client_has_left_is_held_for_nobody() -> None:
    begun, gone, kept = asyncio.Event(), asyncio.Event(), asyncio.Event()
    record = Last(10)

    async def prepare(*_: Any) -> Any:
        return SimpleNamespace(store=False)

    async def answer(prepared: Any, request_id: str, sink: SocketSink, at: float, keep: Any) -> None:
        del prepared, request_id, sink, at
        begun.set()

        async def end_later() -> None:
            await gone.wait()
            keep(record)
            kept.set()

        try:
            await asyncio.get_running_loop().create_future()
        finally:
            tasks.append(asyncio.create_task(end_later()))

    tasks: list[asyncio.Task[None]] = []
    held, answers = Held(), SimpleNamespace(prepare=prepare, answer=answer)
    connection = responses_socket._Connection(answers, held, Frames(), "req")  # type: ignore[arg-type]
    await connection.hear(CREATE)
    await begun.wait()
    await connection.leave()
    held.drop(connection)
    gone.set()
    await kept.wait()
    assert held.of(connection) is None
