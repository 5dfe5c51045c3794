"""An answer of /v1/responses from its body to its record: resolved, carried, kept.

The parent's share of the protocol: what a response goes on from is looked up and put before the body's own
input, the rest is the worker's as it came, and every end is recorded: complete, cut, failed, or left by its
client in mid-stream. HTTP, WebSocket and runs in the background all go this way.

Owns the tasks that end what was left; of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from mlxpool.parent.faults import Damaged, Unavailable
from mlxpool.parent.history import records, resolve
from mlxpool.parent.history.recorder import Recorder
from mlxpool.parent.history.records import Record
from mlxpool.parent.history.resolve import Ask, Resolved, Source
from mlxpool.parent.history.store import HistoryStore
from mlxpool.parent.library import Library
from mlxpool.shared.api.read import invalid
from mlxpool.shared.api.response_events import output_as_input
from mlxpool.shared.config import seconds_text
from mlxpool.shared.control import HEADER_PREVIOUS_ID
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import cut

from .head import Head
from .relay import LARGE_BODY_BYTES, Relay
from .responses_sinks import RecordedPreamble, Tee
from .sink import Sink

logger = logging.getLogger("mlxpool.history")

PATH = "/v1/responses"
# After a disk that was full or a file that was locked.
RETRY_AFTER_S = 5.0


class Prepared(msgspec.Struct, frozen=True):
    """A body that can be carried. head: of the body as it goes. store: whether its answer is kept."""

    resolved: Resolved
    head: Head
    previous: str | None
    store: bool
    background: bool

    @property
    def headers(self) -> dict[str, str]:
        """For the worker."""
        return {} if self.previous is None else {HEADER_PREVIOUS_ID: self.previous}

    def record(self, response: bytes, events: tuple[bytes, ...] | None) -> Record:
        """Of its answer. Raises msgspec errors for what is no response."""
        return records.of_response(
            response,
            time.time(),
            self.resolved.input or b"[]",
            background=self.background,
            previous=self.previous,
            events=events,
        )


async def read_ask(body: bytes) -> Ask:
    """`resolve.read_ask` without holding up others."""
    if len(body) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(resolve.read_ask, body)
    return resolve.read_ask(body)


class Answers:
    """find_running: the record of a response that still runs, by its id. max_body_bytes: see
    `resolve.resolve`."""

    def __init__(self, relay: Relay, library: Library, store: HistoryStore, max_body_bytes: int) -> None:
        self.relay = relay
        self.library = library
        self.store = store
        self.find_running: Callable[[str], Record | None] = lambda _: None
        self._max_body_bytes = max_body_bytes
        self._ending: set[asyncio.Task[None]] = set()

    async def prepare(
        self,
        ask: Ask,
        head: Head,
        own: Record | None = None,
        forced: Mapping[str, object] = {},
    ) -> Prepared:
        """Looks up what the body refers to. own: a record that this client alone can go on from. forced:
        fields with other values than the client's. Raises ApiError 400, 404, 413 and 503."""
        limits = self.store.figures
        store = ask.store and self.store.is_on
        if ask.store and not store:
            if ask.background:
                raise invalid("background", "background needs history, which is off (see [history])")
            forced = {**forced, "store": False}
        source = None
        if ask.previous is not None:
            is_own = own is not None and own.id == ask.previous
            record = own if is_own and own is not None else await self.find(ask.previous, resolve.PREVIOUS)
            large = len(record.input) > LARGE_BODY_BYTES
            source = await _maybe_apart(large, resolve.source_of, record)
        items = {name: await self._item(index, name, own) for index, name in ask.references.items()}
        large = len(ask.body) + (0 if source is None else sum(map(len, source.items))) > LARGE_BODY_BYTES
        resolved = await _maybe_apart(large, self._resolve, ask, source, items, forced)
        length = len(resolved.input or b"")
        if store and length > limits.max_bytes:
            raise error(
                "body_too_large",
                f"the input is {length} bytes, more than history.max_bytes ({limits.max_bytes}) lets be"
                " stored; send store: false, or raise it",
                param="input",
            )
        if "stream" in forced:
            head = msgspec.structs.replace(head, stream=forced["stream"])
        return Prepared(resolved, head, ask.previous, store, ask.background)

    async def find(self, response_id: str, param: str | None = None) -> Record:
        """A response by its id, also one that still runs. Raises ApiError 404, and 503."""
        running = self.find_running(response_id)
        if running is not None:
            return running
        shown = cut(repr(response_id))
        try:
            record = await self.store.get(response_id)
        except Damaged:
            raise error(
                "response_not_found",
                f"the stored response {shown} is damaged and can't be read; send its conversation as input",
                param=param,
            ) from None
        except Unavailable as err:
            raise unavailable(err) from None
        if record is None:
            age = seconds_text(self.store.figures.max_age_s)
            raise error(
                "response_not_found",
                f"there is no response {shown}: it was not stored, was deleted, or made room for newer ones"
                f" (history.max_age is {age}); send its conversation as input",
                param=param,
            )
        return record

    async def answer(
        self,
        prepared: Prepared,
        request_id: str,
        sink: Sink,
        begun: float | None = None,
        kept: Callable[[Record], None] = lambda _: None,
    ) -> None:
        """Carries it and records its end. kept: hears of the record, stored or not, before the client hears
        the end. Raises like `Relay.carry`."""
        record: Record | None = None

        def keep(response: bytes, events: tuple[bytes, ...] | None) -> None:
            nonlocal record
            record = self.keep(prepared, response, events)
            if record is not None:
                kept(record)

        recorder = Recorder(keep)
        try:
            await self.carry(
                prepared, request_id, Tee(sink, recorder, prepared.resolved.shift), recorder, begun
            )
        except (asyncio.CancelledError, ConnectionError):
            if sink.started and not recorder.has_ended():
                self._end_later(recorder, prepared, lambda: record)
            raise
        finally:
            self.write(prepared, record)

    async def carry(
        self, prepared: Prepared, request_id: str, sink: Sink, recorder: Recorder, begun: float | None = None
    ) -> None:
        """To the worker and back, without any record. Raises like `Relay.carry`."""
        resolved = prepared.resolved
        await self.relay.carry(
            resolved.body,
            prepared.head,
            PATH,
            request_id,
            sink,
            lambda asked: RecordedPreamble(
                asked, resolved.fields, prepared.previous, recorder, resolved.shift
            ),
            prepared.headers,
            begun,
        )

    def keep(self, prepared: Prepared, response: bytes, events: tuple[bytes, ...] | None) -> Record | None:
        """Its record, found from now on where it is stored; None for what is no response."""
        try:
            record = prepared.record(response, events)
        except (msgspec.MsgspecError, UnicodeDecodeError) as err:
            logger.error("a worker's answer on %s is no response (%s): not stored", PATH, err)
            return None
        if prepared.store:
            self.store.keep(record)
        return record

    def write(self, prepared: Prepared, record: Record | None) -> None:
        """Have it written, after the answer's last byte."""
        if record is not None and prepared.store:
            self.store.write(record)

    async def close(self) -> None:
        """Returns when what was left is ended."""
        if self._ending:
            await asyncio.wait(self._ending)

    def _resolve(
        self,
        ask: Ask,
        source: Source | None,
        items: Mapping[str, list[dict[str, Any]]],
        forced: Mapping[str, object],
    ) -> Resolved:
        return resolve.resolve(ask, source, items, max_body_bytes=self._max_body_bytes, forced=forced)

    async def _item(self, index: int, item_id: str, own: Record | None) -> list[dict[str, Any]]:
        """What stands for a reference."""
        try:
            is_own = own is not None and item_id in own.items
            record = own if is_own else await self.store.holder_of(item_id)
        except Damaged:
            record = None
        except Unavailable as err:
            raise unavailable(err) from None
        output = [] if record is None else msgspec.json.decode(record.response)["output"]
        found = [item for item in output if item.get("id") == item_id]
        if not found:
            raise invalid(
                f"input[{index}].id",
                f"input[{index}] refers to item {cut(repr(item_id))}, which no stored response has; send the"
                " item itself",
            )
        return output_as_input(found)

    def _end_later(self, recorder: Recorder, prepared: Prepared, record: Callable[[], Record | None]) -> None:
        """The client has left, and its handler must: what it heard is read without it."""

        async def end() -> None:
            await recorder.end("cancelled")
            self.write(prepared, record())

        task = asyncio.get_running_loop().create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def unavailable(err: Unavailable) -> ApiError:
    """503 for a history that can't be read now."""
    return ApiError(
        503,
        "internal_error",
        f"the history can't be read just now ({err}); try again",
        retry_after_s=RETRY_AFTER_S,
    )


async def _maybe_apart(large: bool, work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)`, off the loop where it takes long."""
    return await asyncio.to_thread(work, *args) if large else work(*args)
