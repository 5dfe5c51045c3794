"""Where answers of /v1/responses go: past a recorder to a client, or to nobody yet.

The recorder sees each event before it is sent, so that whoever hears the end of a response can go on from it
at once. Owned by the task that carries the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.parent.history.recorder import Recorder
from mlxpool.parent.history.resolve import shifted, shifted_error
from mlxpool.shared.errors import ApiError

from .preamble import ResponsesPreamble
from .sink import Sink


class RecordedPreamble(ResponsesPreamble):
    """Lets the recorder end a stream that fails: it alone knows what was said. shift: see `Resolved`."""

    def __init__(
        self,
        model: str,
        fields: Mapping[str, Any],
        previous: str | None,
        recorder: Recorder,
        shift: int,
    ) -> None:
        super().__init__(model, fields, previous)
        self._recorder = recorder
        self._shift = shift
        recorder.begun = self.begun

    def begun(self, status: str = "in_progress") -> dict[str, Any]:
        """The response's object before anything was said."""
        return self._response(status)

    async def failure(self, err: ApiError) -> bytes:
        return await self._recorder.end("failed", shifted_error(err, self._shift))


class Tee:
    """A sink with a recorder before it. shift: of indices in refusals, see `Resolved`."""

    def __init__(self, sink: Sink, recorder: Recorder, shift: int) -> None:
        self._sink = sink
        self._recorder = recorder
        self._shift = shift

    @property
    def started(self) -> bool:
        return self._sink.started

    async def start(self, headers: Mapping[str, str]) -> None:
        await self._sink.start(headers)

    async def send(self, data: bytes) -> None:
        if not self._recorder.noted(data):
            data = await self._recorder.passing(data)
        await self._sink.send(data)

    async def end(self) -> None:
        await self._sink.end()

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        if status == 200:
            self._recorder.whole(body)
        elif self._shift:
            body = shifted(body.decode(errors="replace"), self._shift).encode()
        await self._sink.whole(status, body, headers)

    def abandon(self) -> None:
        self._sink.abandon()


class Captured:
    """Holds one whole answer for whoever asked."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.headers: Mapping[str, str] = {}

    @property
    def started(self) -> bool:
        return False

    async def start(self, headers: Mapping[str, str]) -> None:
        raise AssertionError(f"no stream was asked for: {headers}")

    async def send(self, data: bytes) -> None:
        raise AssertionError(f"no stream was asked for: {data!r}")

    async def end(self) -> None:
        raise AssertionError("no stream was asked for")

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.status, self.body, self.headers = status, body, headers

    def abandon(self) -> None:
        """There is nobody to leave."""
