"""The writer of `/v1/responses`: events to a response object, or to its life as a stream.

Each thing that the model says is an item: a message, reasoning, a call. An item begins when the first of it
comes, and is done when something else begins; what comes together goes out as one delta. Every event is
numbered, and the last one holds the whole object. A failure is a response that failed, with what had been
said. Ids follow from the response's own, so that a stream and a whole answer have the same. Two events open
every stream: a parent that has said them already drops these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from mlxpool.shared.api import response_object
from mlxpool.shared.api.response_events import event as sse
from mlxpool.shared.api.response_events import terminal_kind
from mlxpool.shared.api.response_items import Call, Item, ItemStatus, Message, Reasoning, Told
from mlxpool.shared.api.response_tools import ToolName
from mlxpool.shared.api.responses import ResponseOwn
from mlxpool.worker.request.prepare import Prepared
from mlxpool.worker.text import events
from mlxpool.worker.text.events import Failure, Finish, FinishReason, Logprobs
from mlxpool.worker.wire import responses_logprobs
from mlxpool.worker.wire.responses_custom import CustomInput
from mlxpool.worker.wire.responses_usage import response_usage
from mlxpool.worker.wire.writer import Identity, Said

ID_PREFIX = "resp_"


class ResponseAnswer:
    """One response, whole or streamed; feed it its row's events in order. `ended` after the last one.

    echoed: fields of the object that are known from the start and that the body does not say. clock: unix
    seconds.
    """

    def __init__(
        self,
        identity: Identity,
        own: ResponseOwn,
        echoed: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ended = False
        self._own = own
        self._clock = clock
        self._sequence = 0
        self._tail = identity.id.removeprefix(ID_PREFIX)
        self._response: dict[str, Any] = {
            **response_object.new_response(
                own.fields,
                id=identity.id,
                created=identity.created,
                model=identity.model,
                previous=identity.previous,
            ),
            **(echoed or {}),
        }
        self._output: list[dict[str, Any]] = []
        self._open: Item | None = None
        self._custom: CustomInput | None = None
        self._logprobs: list[Logprobs] = []
        self._usage: events.Usage | None = None

    def opening(self) -> bytes:
        return self._number([self._snapshot("response.created"), self._snapshot("response.in_progress")])

    def keep_alive(self) -> bytes:
        return self._number([self._snapshot("response.in_progress")])

    def write(self, said: Iterable[Said]) -> bytes:
        """Whole SSE events for these; what came together goes out together."""
        return self._number(self._tell(said))

    def whole(self, said: Iterable[Said]) -> bytes:
        """The JSON body of a complete response. Raises the ApiError of a Failure among the events."""
        told = list(said)
        for _, event in told:
            if isinstance(event, Failure):
                raise event.error
        self._tell(told)
        return msgspec.json.encode(self._response)

    def _tell(self, said: Iterable[Said]) -> list[Told]:
        told: list[Told] = []
        for _, event in said:
            self._hear(event, told)
        if self._open is not None:
            told += self._open.flush()
        return told

    def _hear(self, event: events.Event, told: list[Told]) -> None:
        match event:
            case Logprobs():
                self._logprobs.append(event)
            case events.Text(text):
                self._say(text, told)
            case events.Reasoning(text):
                self._logprobs = []
                self._in(Reasoning, told).add(text)
            case events.ToolCallStart(_, call_id, name):
                self._begin_call(call_id, name, told)
            case events.ToolCallArguments(_, text):
                self._logprobs = []
                if self._open is not None:
                    self._open.add(text if self._custom is None else self._custom.push(text))
            case events.ToolCallEnd():
                self._logprobs = []
                self._close("completed", told)
            case events.Usage():
                self._usage = event
            case Finish(reason):
                self._finish(reason, told)
            case Failure(err):
                self._add_logprobs()
                self._close("incomplete", told)
                told.append(self._end("failed", error=response_object.failure(err)))
            case events.Prefilled():
                pass

    def _say(self, text: str, told: list[Told]) -> None:
        tokens, self._logprobs = self._logprobs, []
        if not isinstance(self._open, Message):
            tokens = responses_logprobs.of_beginning(tokens, text)
        self._in(Message, told).add(text, [responses_logprobs.body(token) for token in tokens])

    def _add_logprobs(self) -> None:
        """The answer is over: a message that is open gets those of tokens that added nothing to it."""
        tokens, self._logprobs = self._logprobs, []
        if isinstance(self._open, Message):
            self._open.add("", [responses_logprobs.body(token) for token in tokens])

    def _in(self, kind: type[Message | Reasoning], told: list[Told]) -> Item:
        """The open item, which is one of this kind: what else was open is done."""
        if isinstance(self._open, kind):
            return self._open
        self._close("completed", told)
        if kind is Message:
            return self._begin(Message(self._id("msg"), len(self._output)), told)
        own = self._own
        return self._begin(Reasoning(self._id("rs"), len(self._output), own.summary, own.sealed), told)

    def _begin_call(self, call_id: str, name: str, told: list[Told]) -> None:
        self._logprobs = []
        self._close("completed", told)
        tool = self._own.names.get(name) or ToolName(name)
        self._custom = CustomInput() if tool.custom else None
        item_id = self._id("ctc" if tool.custom else "fc")
        place = len(self._output)
        self._begin(Call(item_id, place, call_id, tool.name, tool.namespace, tool.custom), told)

    def _begin(self, item: Item, told: list[Told]) -> Item:
        self._open = item
        told += item.begin()
        return item

    def _close(self, status: ItemStatus, told: list[Told]) -> None:
        if self._open is None:
            return
        if self._custom is not None:
            self._open.add(self._custom.end(cut=status == "incomplete"))
        told += self._open.end(status)
        self._output.append(self._open.item(status))
        self._open = self._custom = None

    def _finish(self, reason: FinishReason, told: list[Told]) -> None:
        cut = reason == "length"
        if self._open is None and not self._output:
            # A turn of nothing is a turn: the next one follows an answer.
            self._in(Message, told)
        self._add_logprobs()
        self._close("incomplete" if cut else "completed", told)
        if cut:
            told.append(self._end("incomplete", incomplete_details={"reason": "max_output_tokens"}))
        else:
            told.append(self._end("completed", completed_at=int(self._clock())))

    def _end(self, status: str, **fields: Any) -> Told:
        self.ended = True
        usage = None if self._usage is None else response_usage(self._usage)
        self._response.update(status=status, output=self._output, usage=usage, **fields)
        return self._snapshot(terminal_kind(status))

    def _snapshot(self, kind: str) -> Told:
        return kind, {"response": self._response}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._tail}{len(self._output):04x}"

    def _number(self, told: Iterable[Told]) -> bytes:
        out = []
        for kind, fields in told:
            out.append(sse(kind, self._sequence, **fields))
            self._sequence += 1
        return b"".join(out)


def responses_writer(prepared: Prepared, identity: Identity) -> ResponseAnswer:
    own = prepared.asked.own
    assert isinstance(own, ResponseOwn)
    echoed: dict[str, Any] = {}
    # One that could not be planned has none.
    for plan in prepared.plans[:1]:
        sampling = plan.sampling
        echoed.update(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
        )
    if prepared.warnings:
        echoed["warnings"] = list(prepared.warnings)
    return ResponseAnswer(identity, own, echoed)
