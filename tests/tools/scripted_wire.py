"""Answers of a scripted worker through the product's own readers and writers, in every protocol.

What is said is the script's `events`, or its text when it has none; how a body is read and how an answer is
written is what a real worker does, so that a client's test over it can be exact. Imported when the first such
request comes: what is behind the readers takes longer than a scripted start.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Literal
from urllib.parse import unquote

from mlxpool.shared.api.asked import Asked
from mlxpool.shared.control import (
    HEADER_ASKED_MODEL,
    HEADER_CREATED,
    HEADER_PREVIOUS_ID,
    HEADER_REQUEST_ID,
    HEADER_RESPONSE_ID,
    Launch,
)
from mlxpool.worker.request.plan import Plan, Sampling
from mlxpool.worker.request.prepare import Prepared
from mlxpool.worker.text.events import Event, Finish, Prefilled, Text, Usage
from mlxpool.worker.wire.endpoints import ENDPOINTS
from mlxpool.worker.wire.writer import Identity, Said, Writer
from tests.tools.scripted_events import events_of
from tests.tools.scripted_http import Request
from tests.tools.scripted_script import Script, TokenText

_BY_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS}
# The one that a plan must have; nothing is sampled.
_GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)


class WireRow:
    """One request under way, of any protocol. A token is one of its events; every choice says the same.

    Raises ApiError for what the protocol's reader refuses, ValueError for a script whose events are none.
    """

    def __init__(self, request: Request, launch: Launch, script: Script) -> None:
        endpoint = _BY_PATH[request.path]
        headers = request.headers
        asked = endpoint.read(request.body)
        self.prompt = _last_text(asked)
        self.prompt_tokens = _words(asked)
        self.stream = asked.request.stream
        self.faulty = script.fault_on in self.prompt
        self.request_id = headers.get(HEADER_REQUEST_ID.lower(), "")
        self.done = 0
        self._events, ending = _events(script, launch, asked, self.prompt)
        self.count = len(self._events)
        self._prefilled, self._ending = _framed(ending, self.prompt_tokens, self.count)
        self._choices = asked.request.n * max(1, len(asked.prompts))
        self._writer = self._new_writer(endpoint.writer, endpoint.id_prefix, asked, headers, launch)

    def role_event(self) -> bytes:
        """What a stream begins with."""
        return self._writer.opening()

    def silent_event(self) -> bytes:
        """A keep-alive."""
        return self._writer.keep_alive()

    def prefilled_events(self) -> bytes:
        """What is said once the prompt is done."""
        return self._writer.write(self._said(self._prefilled))

    def token_event(self, index: int) -> bytes:
        """The bytes of one event. In order, and each once."""
        return b"" if self._writer.ended else self._writer.write(self._said([self._events[index]]))

    def last_events(self) -> bytes:
        """What ends the stream."""
        return b"" if self._writer.ended else self._writer.write(self._said(self._ending))

    def body(self) -> bytes:
        """The whole answer. Raises the ApiError of a Failure."""
        return self._writer.whole(self._said([*self._prefilled, *self._events, *self._ending]))

    def _said(self, events: Sequence[Event]) -> list[Said]:
        return [(choice, event) for event in events for choice in range(self._choices)]

    def _new_writer(
        self,
        make: Callable[[Prepared, Identity], Writer],
        id_prefix: str,
        asked: Asked,
        headers: dict[str, str],
        launch: Launch,
    ) -> Writer:
        plan = Plan(
            ids=tuple(range(self.prompt_tokens)),
            max_tokens=asked.request.max_tokens or launch.context,
            limited=asked.request.max_tokens is not None,
            sampling=_GREEDY,
            eos_ids=frozenset(),
            top_logprobs=asked.request.top_logprobs,
        )
        identity = Identity(
            headers.get(HEADER_RESPONSE_ID.lower(), "") or f"{id_prefix}{uuid.uuid4().hex}",
            int(headers.get(HEADER_CREATED.lower(), 0) or time.time()),
            unquote(headers.get(HEADER_ASKED_MODEL.lower(), "")) or launch.model,
            headers.get(HEADER_PREVIOUS_ID.lower()) or None,
        )
        return make(Prepared(asked, (plan,) * self._choices), identity)


def _events(
    script: Script, launch: Launch, asked: Asked, prompt: str
) -> tuple[list[Event], list[Prefilled | Usage | Finish]]:
    """What is said, and what frames it."""
    if script.events:
        events = events_of(script.events)
        frame = [event for event in events if isinstance(event, Prefilled | Usage | Finish)]
        return [event for event in events if event not in frame], frame
    text = TokenText(script.text, launch.model, prompt)
    count = script.tokens
    reason: Literal["stop", "length"] = "stop"
    if asked.request.max_tokens is not None and asked.request.max_tokens < count:
        count, reason = asked.request.max_tokens, "length"
    return [Text(text(place)) for place in range(count)], [Finish(reason)]


def _framed(
    given: Sequence[Prefilled | Usage | Finish], prompt_tokens: int, count: int
) -> tuple[list[Event], list[Event]]:
    """What comes before the script's events and after them: the script's own word goes first."""
    prefilled = next((event for event in given if isinstance(event, Prefilled)), Prefilled(prompt_tokens, 0))
    usage = next(
        (event for event in given if isinstance(event, Usage)),
        Usage(prefilled.prompt_tokens, count, prefilled.cached_tokens),
    )
    finish = next((event for event in given if isinstance(event, Finish)), Finish("stop"))
    return [prefilled], [usage, finish]


def _last_text(asked: Asked) -> str:
    if asked.prompts:
        last = asked.prompts[-1]
        return last if isinstance(last, str) else " ".join(map(str, last))
    return asked.request.messages[-1].content or ""


def _words(asked: Asked) -> int:
    """Tokens of the prompt, by the scripted worker's own measure: words."""
    if asked.prompts:
        return sum(len(text.split()) if isinstance(text, str) else len(text) for text in asked.prompts[:1])
    return sum(len((message.content or "").split()) for message in asked.request.messages)
