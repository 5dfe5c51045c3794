"""`GET /api/events`: what the dashboard shows, pushed as it changes.

Two kinds of news. *States* (`pool`, `models`) supersede each other: a viewer that is slow gets the newest and
misses the ones between. *Lines* (`event`, `job`, `log`) each matter: a viewer keeps a bounded number and
loses the oldest. A state is put together once for all viewers, at most every MIN_INTERVAL_S, and only while
there is a viewer and something has changed.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Callable, Iterable
from importlib.metadata import version

import msgspec
from aiohttp import web

from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

# Five a second look live to a person; more would only cost.
MIN_INTERVAL_S = 0.2
# Files change without anybody telling: the list of models is looked at again this often.
MODELS_INTERVAL_S = 5.0
# Proxies and browsers drop a connection that is silent for a minute or so.
COMMENT_INTERVAL_S = 15.0
# Lines kept for a viewer that does not read; a screenful is 50.
MAX_LINES = 1000
# A viewer beyond this is a page that reconnects without closing.
MAX_VIEWERS = 64
LOG_HISTORY_LINES = 200


class LogLines(msgspec.Struct, frozen=True):
    """Data of a `log` event."""

    model: str
    lines: list[str]


class Mailbox:
    """One viewer's unread news. Event loop only."""

    def __init__(self, logs: frozenset[str]) -> None:
        self._logs = logs
        self._states: dict[str, bytes] = {}
        self._lines: collections.deque[bytes] = collections.deque(maxlen=MAX_LINES)
        self._filled = asyncio.Event()
        self.ended = False

    def wants_log(self, model: str) -> bool:
        """Whether this viewer asked for that model's log."""
        return "*" in self._logs or model in self._logs

    def put_state(self, name: str, event: bytes) -> None:
        """Replace what was not read of the same name."""
        self._states[name] = event
        self._filled.set()

    def put_line(self, event: bytes) -> None:
        """Append; the oldest goes when there are too many."""
        self._lines.append(event)
        self._filled.set()

    def end(self) -> None:
        """Nothing comes any more."""
        self.ended = True
        self._filled.set()

    async def take(self, timeout_s: float) -> bytes:
        """Everything unread; b"" after so much silence, or when nothing comes any more."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._filled.wait()
        except TimeoutError:
            return b""
        self._filled.clear()
        news = b"".join((*self._lines, *self._states.values()))
        self._lines.clear()
        self._states.clear()
        return news


class EventHub:
    """All viewers. Created in the running loop; `run` is its one task."""

    def __init__(self, states: dict[str, Callable[[], object]]) -> None:
        """states: name → its present value, anything msgspec encodes."""
        self._make = states
        self._last: dict[str, bytes] = {}
        self._viewers: set[Mailbox] = set()
        self._dirty = asyncio.Event()

    def changed(self) -> None:
        """Something in the states may be different."""
        if self._viewers:
            self._dirty.set()

    def line(self, name: str, data: object) -> None:
        """Tell every viewer of something that happened."""
        if self._viewers:
            event = encode_event(name, data)
            for viewer in self._viewers:
                viewer.put_line(event)

    def log_line(self, model: str, line: str) -> None:
        """A line of a model's log, for those who asked for it."""
        wanting = [viewer for viewer in self._viewers if viewer.wants_log(model)]
        if wanting:
            event = encode_event("log", LogLines(model, [line]))
            for viewer in wanting:
                viewer.put_line(event)

    async def run(self) -> None:
        """Send states when they changed, until cancelled; then every viewer's stream ends.

        Left open they would hold up the server's end: a viewer stays as long as it is let.
        """
        try:
            await self._send_states()
        finally:
            for viewer in self._viewers:
                viewer.end()

    async def _send_states(self) -> None:
        loop = asyncio.get_running_loop()
        last_look = loop.time()
        while True:
            try:
                async with asyncio.timeout(MODELS_INTERVAL_S):
                    await self._dirty.wait()
            except TimeoutError:
                pass
            self._dirty.clear()
            if not self._viewers:
                continue
            for name, make in self._make.items():
                if name == "models" and loop.time() - last_look < 1.0:
                    loop.call_later(1.0, self._dirty.set)
                    continue
                if name == "models":
                    last_look = loop.time()
                event = encode_event(name, make())
                if event != self._last.get(name):
                    self._last[name] = event
                    for viewer in self._viewers:
                        viewer.put_state(name, event)
            await asyncio.sleep(MIN_INTERVAL_S)

    async def watch(self, logs: frozenset[str], first: Iterable[bytes]) -> AsyncIterator[bytes]:
        """One viewer's stream: what is now, then what changes. Raises ApiError when there are too many."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise error("queue_full", f"{MAX_VIEWERS} viewers watch already, the limit", retry_after_s=5)
        viewer = Mailbox(logs)
        self._viewers.add(viewer)
        try:
            states = b"".join(encode_event(name, make()) for name, make in self._make.items())
            yield encode_event("hello", {"version": version("mlxpool")}) + states + b"".join(first)
            while not viewer.ended:
                yield await viewer.take(COMMENT_INTERVAL_S) or b": still here\n\n"
        finally:
            self._viewers.discard(viewer)


def encode_event(name: str, data: object) -> bytes:
    """One server-sent event. JSON has no line ends of its own."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


class EventRoutes:
    """The handler."""

    def __init__(
        self,
        hub: EventHub,
        jobs: Callable[[], Iterable[object]],
        history: Callable[[str], list[str]],
        names: Callable[[], list[str]],
    ) -> None:
        """jobs: present rows. history: the last lines of a model's log (reads a file). names: of models."""
        self._hub = hub
        self._jobs = jobs
        self._history = history
        self._names = names

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /api/events?logs=NAME…"""
        asked = frozenset(request.query.getall("logs", []))
        known = self._names()
        if unknown := sorted(asked - {*known, "*"}):
            raise error(
                "model_not_found", f"no model {cut(unknown[0])!r} whose log could be shown", param="logs"
            )
        first = [encode_event("job", row) for row in self._jobs()]
        for name in known if "*" in asked else sorted(asked):
            lines = await asyncio.to_thread(self._history, name)
            if lines:
                first.append(encode_event("log", LogLines(name, lines)))
        stream = self._hub.watch(asked, first)
        opening = await anext(stream)  # refuses before a stream has begun
        out = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        try:
            await out.prepare(request)
            await out.write(opening)
            async for news in stream:
                await out.write(news)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        return out
