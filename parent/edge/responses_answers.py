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
from functools import partial

import msgspec

from mlxpool.parent.history import records, resolve
from mlxpool.parent.history.recorder import Recorder
from mlxpool.parent.history.records import Record
from mlxpool.parent.history.resolve import Ask, Resolved, Source, shifted_error
from mlxpool.parent.history.store import HistoryStore
from mlxpool.parent.library import Library
from mlxpool.shared.api import responses
from mlxpool.shared.api.read import invalid
from mlxpool.shared.control import HEADER_PREVIOUS_ID
from mlxpool.shared.errors import ApiError, error

from .head import Head
from .relay import MakePreamble, Relay, maybe_apart
from .responses_lookup import Lookup
from .responses_sinks import RecordedPreamble, Tee
from .sink import Sink

logger = logging.getLogger("mlxpool.history")

PATH = "/v1/responses"


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
    ask: Ask = await maybe_apart(len(body), resolve.read_ask, body)
    return ask


async def check(resolved: Resolved) -> None:
    """Raises ApiError 400 for what a worker would refuse, counted from the client's own first item."""
    try:
        await maybe_apart(len(resolved.body), responses.parse, resolved.body)
    except ApiError as err:
        raise shifted_error(err, resolved.shift) from None


def preamble_of(prepared: Prepared, asked: str, recorder: Recorder) -> RecordedPreamble:
    """What speaks for its stream. asked: the model's name as the client wrote it."""
    resolved = prepared.resolved
    return RecordedPreamble(asked, resolved.fields, prepared.previous, recorder, resolved.shift)


class Answers:
    """lookup: what bodies refer to. max_body_bytes: see `resolve.resolve`."""

    def __init__(self, relay: Relay, library: Library, store: HistoryStore, max_body_bytes: int) -> None:
        self.relay = relay
        self.library = library
        self.store = store
        self.lookup = Lookup(store)
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
        store = ask.store and forced.get("store") is not False
        if store and not self.store.is_on:
            if ask.background:
                raise invalid("background", "background needs history, which is off (see [history])")
            forced, store = {**forced, "store": False}, False
        if own is not None and 0 < limits.max_age_s <= time.time() - own.created:
            own = None
        source: Source | None = None
        if ask.previous is not None:
            if own is None or own.id != ask.previous:
                record = await self.lookup.find(ask.previous, resolve.PREVIOUS)
            else:
                record = own
            source = await maybe_apart(len(record.input) + len(record.response), resolve.source_of, record)
        items = await self.lookup.items(ask, own, self._max_body_bytes) if ask.references else {}
        length = len(ask.body) + sum(len(items[item_id]) for item_id in ask.references.values())
        work = partial(resolve.resolve, max_body_bytes=self._max_body_bytes, forced=forced)
        resolved: Resolved = await maybe_apart(
            length + (0 if source is None else source.length), work, ask, source, items
        )
        length = len(resolved.input or b"")
        if store and length > limits.max_bytes:
            way_out = "send store: false without background" if ask.background else "send store: false"
            raise error(
                "body_too_large",
                f"the input is {length} bytes, more than history.max_bytes ({limits.max_bytes}) lets be"
                f" stored; {way_out}, or raise it",
                param="input",
            )
        if "stream" in forced:
            head = msgspec.structs.replace(head, stream=forced["stream"])
        return Prepared(resolved, head, ask.previous, store, ask.background)

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
        tee = Tee(sink, recorder, prepared.resolved.shift)
        ends_as: tuple[str, ApiError | None] = ("failed", error("internal_error", "the server failed"))
        try:
            await self.carry(
                prepared, request_id, tee, partial(preamble_of, prepared, recorder=recorder), begun
            )
        except (asyncio.CancelledError, ConnectionError):
            ends_as = ("cancelled", None)
            raise
        finally:
            if sink.started and not recorder.has_ended():
                self._end_later(recorder, ends_as, prepared, lambda: record)
            self.write(prepared, record)

    async def carry(
        self,
        prepared: Prepared,
        request_id: str,
        sink: Sink,
        make_preamble: MakePreamble,
        begun: float | None = None,
    ) -> None:
        """To the worker and back, without any record. Raises like `Relay.carry`."""
        await self.relay.carry(
            prepared.resolved.body,
            prepared.head,
            PATH,
            request_id,
            sink,
            make_preamble,
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

    def _end_later(
        self,
        recorder: Recorder,
        ends_as: tuple[str, ApiError | None],
        prepared: Prepared,
        record: Callable[[], Record | None],
    ) -> None:
        """The client has left, and its handler must: what it heard is read without it."""

        async def end() -> None:
            await recorder.end(*ends_as)
            self.write(prepared, record())

        task = asyncio.get_running_loop().create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
