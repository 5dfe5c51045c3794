"""An engine in this process, with a real model whose forward pass can be made to fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared.control import AdaptersLaunch, CacheLaunch, Launch
from mlxpool.worker.adapters.layers import AdapterSet
from mlxpool.worker.adapters.mounted import Adapters
from mlxpool.worker.cache.open import open_cache
from mlxpool.worker.engine.chunks import ChunkWidth
from mlxpool.worker.engine.constraint import Constraint
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.speculation import Draft
from mlxpool.worker.engine.terms import Limits, Loaded, Stream
from mlxpool.worker.load import load
from mlxpool.worker.request.plan import Plan, Sampling
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser
from mlxpool.worker.text.events import Event, Failure, Finish, Logprobs, Text, Usage


class Faulty:
    """A real model that notes the shapes of its inputs, with a switch: the next one of this shape raises.

    before: called with the shape before each pass, and may raise too."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.shapes: list[tuple[int, int]] = []
        self.fail_when: Callable[[tuple[int, int]], bool] = lambda _: False
        self.before: Callable[[tuple[int, int]], None] = lambda _: None

    def __call__(self, tokens: Any, cache: Any) -> Any:
        self._watch(tokens)
        return self._model(tokens, cache=cache)

    def take_in(self, tokens: Any, cache: Any) -> None:
        self._watch(tokens)
        getattr(self._model, "take_in", self._model)(tokens, cache=cache)

    def _watch(self, tokens: Any) -> None:
        self.shapes.append(tokens.shape)
        if self.fail_when(tokens.shape):
            self.fail_when = lambda _: False
            raise RuntimeError("out of something")
        self.before(tokens.shape)


class Client:
    """Collects one row's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = asyncio.Event()

    def put(self, events: Sequence[Event]) -> None:
        self.events.extend(events)
        if events and isinstance(events[-1], Finish | Failure):
            self.ended.set()

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Text))

    @property
    def usage(self) -> Usage:
        return next(event for event in self.events if isinstance(event, Usage))

    @property
    def logprobs(self) -> list[Logprobs]:
        return [event for event in self.events if isinstance(event, Logprobs)]


def plan(
    prompt: Sequence[int],
    max_tokens: int = 20,
    eos: Sequence[int] = (),
    top_logprobs: int | None = None,
    boundaries: Sequence[int] = (),
    namespace: str = "",
    **sampling: Any,
) -> Plan:
    """A plan for these ids; greedy unless told otherwise."""
    settings = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1, **sampling}
    return Plan(
        tuple(prompt),
        max_tokens,
        True,
        Sampling(**settings),
        frozenset(eos),
        top_logprobs=top_logprobs,
        namespace=namespace,
        boundaries=tuple(boundaries),
    )


class Running:
    """An engine and its model; `ask` runs one row to its end."""

    def __init__(
        self,
        folder: Path,
        batch: int = 4,
        width: int | None = 16,
        cache: CacheLaunch | None = None,
        model: Any = None,
        draft: Callable[[Any], Draft] | None = None,
        stream: Stream | None = None,
        loaded: Callable[[], Loaded] | None = None,
    ) -> None:
        """model: in place of the folder's; weights of one thread are another's too. draft: of the model.

        stream: as if the model had streamed experts. loaded: in place of what the folder's loading gives."""
        self.model: Any = None

        def load_faulty() -> Loaded:
            given = load(folder, lambda _done, _total: None) if loaded is None else loaded()
            self.model = Faulty(given.model if model is None else model)
            made = given.draft if draft is None else draft(self.model)
            return msgspec.structs.replace(given, model=self.model, draft=made, stream=stream or given.stream)

        launch = Launch("m", str(folder), "", 4096, batch, 1 << 30, 1 << 30, cache=cache)
        self.engine = Engine(
            load_faulty,
            Limits(batch, 1 << 30),
            ChunkWidth("cpu", width, flat=stream is not None),
            lambda loaded: open_cache(launch, loaded, "cpu", self.engine),
        )

    async def ready(self) -> Running:
        self.engine.start()
        await self.engine.loaded
        # What it tries of the model while nothing runs comes first.
        await self.engine.call(lambda: None)
        self.model.shapes.clear()
        return self

    def stop(self) -> None:
        """End its threads: a daemon that wakes while the interpreter ends takes the process down."""
        self.engine.stop()
        if self.engine.cache is not None:
            self.engine.cache.close()

    def row(
        self, of: Plan, constraint: Constraint | None = None, adapters: AdapterSet | None = None
    ) -> tuple[Client, Row]:
        client = Client()
        text = AnswerText(ByteDetokeniser(token_bytes), of.format)
        if adapters is not None:
            of = msgspec.structs.replace(of, namespace=adapters.namespace)
        return client, Row(of, text, client.put, constraint, token_bytes, adapters)

    def submit(
        self, of: Plan, constraint: Constraint | None = None, adapters: AdapterSet | None = None
    ) -> tuple[Client, Row]:
        client, row = self.row(of, constraint, adapters)
        self.engine.submit(row)
        return client, row

    async def ask(
        self, of: Plan, constraint: Constraint | None = None, adapters: AdapterSet | None = None
    ) -> Client:
        client, _ = self.submit(of, constraint, adapters)
        await asyncio.wait_for(client.ended.wait(), 60)
        return client


def no_adapters() -> Adapters:
    """Of a model that has none, where nobody asks for one."""
    unasked: Any = None
    return Adapters(unasked, list, AdaptersLaunch(), 0)


def token_bytes(token: int) -> bytes:
    """A vocabulary of bytes; ids past them begin anew."""
    return bytes([token % 256])


async def until(check: Callable[[], bool]) -> None:
    """Let the loop turn until the engine's thread has come so far."""
    deadline_s = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0)
