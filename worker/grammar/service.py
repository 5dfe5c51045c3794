"""Compiled grammars for one model: cached, compiled at most once at a time, handed out as constraints.

Owned by the event loop; what it hands out belongs to the engine's thread. xgrammar, and torch with it, is
imported with the first grammar, in a thread of its own and beside the compiling process, never before. A
grammar that was refused is remembered for a while too: a client that sends it again has its answer at once.
Grammars are known by a digest, because a text may be a megabyte.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.errors import error
from mlxpool.shared.prompt.reasoning_families import REASONING_FAMILIES
from mlxpool.worker.engine.constraint import Constraint
from mlxpool.worker.grammar import formats, messages, runtime
from mlxpool.worker.grammar.helper import COMMAND
from mlxpool.worker.grammar.matcher import MatcherConstraint, OpenCount
from mlxpool.worker.grammar.queue import LIMITS, CompileQueue, Entry, Limits, Refused
from mlxpool.worker.grammar.spec import (
    Demand,
    Enforced,
    GrammarSpec,
    Instructed,
    decide,
    give_up,
    invalid_text,
    unheld,
)
from mlxpool.worker.text.tools.families import family_tokens

# Kept compiled grammars: an agent uses a handful. The bytes are the compiler's count.
CACHE_GRAMMARS = 128
CACHE_BYTES = 64 * 1024 * 1024

# A refusal for being slow may have been the machine's fault, and no client sends one for ever.
REFUSAL_S = 60.0
_REFUSALS = 128

# Reading a form is Python's work, under its one lock: more threads would only take turns.
_FORM_THREADS = 2


class Compiled:
    """A grammar ready for rows. Each row has a constraint of its own; making one takes microseconds for most
    grammars, and for some a quarter of a second, which is why it is done on `thread`."""

    def __init__(
        self, grammar: Any, stop_ids: Sequence[int], opened: OpenCount, thread: Executor | None = None
    ) -> None:
        self.bytes: int = grammar.memory_size_bytes
        self._grammar = grammar
        self._stop_ids = stop_ids
        self._opened = opened
        self._thread = thread

    def constraint(self, field: str = "grammar") -> Constraint:
        """A matcher at the grammar's beginning; the row that gets it releases it. field: where the form was
        asked for, for messages. Not on the event loop."""
        matcher = runtime.xgrammar().GrammarMatcher(self._grammar)
        return MatcherConstraint(matcher, self._stop_ids, self._opened, field)

    async def constraints(self, count: int, field: str) -> list[Constraint]:
        """`count` of them, or none: where one can't be had those before it are released."""
        loop = asyncio.get_running_loop()
        making = loop.run_in_executor(self._thread, self._make, count, field)
        try:
            await asyncio.wait({making})
        except asyncio.CancelledError:
            making.add_done_callback(_release)
            raise
        return making.result()

    def _make(self, count: int, field: str) -> list[Constraint]:
        made: list[Constraint] = []
        try:
            for _ in range(count):
                made.append(self.constraint(field))
        except BaseException:
            for constraint in made:
                constraint.release()
            raise
        return made


def _release(making: asyncio.Future[list[Constraint]]) -> None:
    if not making.cancelled() and making.exception() is None:
        for constraint in making.result():
            constraint.release()


class Held(msgspec.Struct, frozen=True):
    """How an answer is held to its form. compiled: the grammar, None where none is. family: how calls that
    the grammar forces are to be read, None where it forces none. instruction: for a system message.
    warnings: for the answer's Warning header. field: where the form was asked for."""

    compiled: Compiled | None = None
    family: str | None = None
    instruction: str | None = None
    warnings: tuple[str, ...] = ()
    field: str = "grammar"

    async def constraints(self, rows: int) -> Sequence[Constraint | None]:
        """One for each row, which releases it; None for all where there is no grammar."""
        return [None] * rows if self.compiled is None else await self.compiled.constraints(rows, self.field)


class _OnWay:
    """A grammar on its way: its place in the queue, the one task that reads what comes back, and how many
    wait for it."""

    def __init__(self, entry: Entry, task: asyncio.Task[Compiled]) -> None:
        self.entry = entry
        self.task = task
        self.waiters = 0


class GrammarService:
    """For one model. width: of its logits. slots: rows of its batch, which is how many grammars compile at
    once. markers: ids of the special tokens that the answer's readers take for markers."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        width: int,
        slots: int,
        *,
        limits: Limits = LIMITS,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._tokenizer = tokenizer
        self._width = width
        self._stop_ids = tuple(sorted(token for token in tokenizer.eos_ids if token < width))
        self.markers: Mapping[str, int] = _markers(tokenizer, width)
        self._queue = CompileQueue(self._vocabulary, slots, limits, command)
        self._opened = OpenCount()
        self._cache: OrderedDict[bytes, Compiled] = OrderedDict()
        self._cache_bytes = 0
        self._refusals: OrderedDict[bytes, tuple[float, Refused]] = OrderedDict()
        self._on_way: dict[bytes, _OnWay] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._forms = ThreadPoolExecutor(_FORM_THREADS, thread_name_prefix="grammar-form")
        # The tokenizer as xgrammar takes it, and its compiler; the thread's alone.
        self._info: Any = None
        self._compiler: Any = None
        self._is_warm = False

    @property
    def open_constraints(self) -> int:
        """Constraints that rows hold."""
        return self._opened.count

    @property
    def preparing(self) -> int:
        """Grammars being compiled."""
        return self._queue.preparing

    @property
    def waiting(self) -> int:
        """Grammars that wait for a place."""
        return self._queue.waiting

    @property
    def helper_pid(self) -> int | None:
        """The compiling process, None while there is none."""
        return self._queue.helper_pid

    async def hold(self, demand: Demand) -> Held:
        """How this answer is held to its form; `Held()` where it has none.

        Raises ApiError: 400 for what can't be enforced and had to be, 429 when too many grammars wait.
        """
        if demand.structure is None and not demand.is_forced:
            return Held(warnings=unheld(demand))
        run = asyncio.get_running_loop().run_in_executor
        # Schemas come in megabytes.
        decision = await run(self._forms, decide, demand)
        if isinstance(decision, Enforced):
            try:
                return await self._held(demand, decision)
            except Refused as refused:
                mistake = invalid_text(demand, refused.reason) if refused.unread else None
                if mistake is not None:
                    raise mistake from refused
                decision = await run(self._forms, give_up, demand, refused.reason)
        if isinstance(decision, Enforced):
            try:
                return await self._held(demand, decision)
            except Refused as refused:
                raise error(
                    "unsupported_schema",
                    f"a call can't be forced here: {refused.reason}; send tool_choice auto",
                    param="tool_choice",
                ) from refused
        if isinstance(decision, Instructed):
            unheld_too = unheld(demand, instructed=True)
            return Held(None, None, decision.instruction, (decision.warning, *unheld_too))
        return Held()

    async def _held(self, demand: Demand, decision: Enforced) -> Held:
        compiled = await self.compile(decision.spec)
        warnings = (*decision.warnings, *unheld(demand))
        return Held(compiled, decision.family, None, warnings, demand.field)

    async def compile(self, spec: GrammarSpec) -> Compiled:
        """The compiled grammar. Raises Refused with the reason, ApiError 429 when too many wait.

        Whoever asks for a grammar that is on its way waits for the same one. A cancelled call gives up its
        part in it.
        """
        key = hashlib.blake2b(spec.text.encode(), digest_size=32).digest()
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            return cached
        self._raise_known_refusal(key)
        way = self._on_way.get(key) or self._set_out(key, spec)
        way.waiters += 1
        try:
            # Whoever leaves here leaves the others their task.
            await asyncio.wait({way.task})
            if way.task.cancelled():
                raise error("shutting_down", "this model is being stopped", retry_after_s=1)
            return way.task.result()
        except Refused as refused:
            raise Refused(refused.reason, unread=refused.unread) from refused
        finally:
            way.waiters -= 1
            # One that is being read stays on its way: the thread can't be stopped.
            if not way.waiters and not way.entry.result.done():
                del self._on_way[key]
                self._queue.leave(way.entry)

    async def close(self) -> None:
        """End the compiling process and refuse what waits."""
        await self._queue.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._forms.shutdown(wait=False, cancel_futures=True)

    # Inside

    def _set_out(self, key: bytes, spec: GrammarSpec) -> _OnWay:
        entry = self._queue.enter(spec.text)
        way = _OnWay(entry, asyncio.get_running_loop().create_task(self._fetch(key, spec, entry)))
        self._on_way[key] = way
        way.task.add_done_callback(partial(self._arrived, key, way))
        if not self._is_warm:
            self._is_warm = True
            self._thread.submit(self._warm)
        return way

    async def _fetch(self, key: bytes, spec: GrammarSpec, entry: Entry) -> Compiled:
        try:
            serialised = await entry.result
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._thread, self._read, spec, serialised)
        except Refused as refused:
            self._remember(key, refused)
            raise
        return self._keep(key, Compiled(grammar, self._stop_ids, self._opened, self._thread))

    def _arrived(self, key: bytes, way: _OnWay, task: asyncio.Task[Compiled]) -> None:
        if self._on_way.get(key) is way:
            del self._on_way[key]
        if not task.cancelled():
            # Looked at, also where nobody waits any more.
            task.exception()

    def _vocabulary(self) -> messages.Vocabulary:
        tokens = self._tokenizer.vocabulary()[: self._width]
        for text, token in self.markers.items():
            tokens[token] = formats.marker_bytes(text)
        return messages.Vocabulary(tokens, list(self._stop_ids), self._width)

    def _warm(self) -> None:
        """On the thread: what reading the first grammar needs, while the process is still starting."""
        if self._compiler is None:
            self._info = runtime.tokenizer_info(self._vocabulary())
            self._compiler = runtime.compiler(self._info, 1)

    def _read(self, spec: GrammarSpec, serialised: str | None) -> Any:
        """On the thread: a grammar that the process has compiled. Raises Refused."""
        try:
            self._warm()
            if serialised is None:
                return self._compiler.compile_structural_tag(spec.text)
            return runtime.xgrammar().CompiledGrammar.deserialize_json(serialised, self._info)
        except (ImportError, OSError, RuntimeError, ValueError) as err:
            raise Refused(runtime.plain_reason(f"{type(err).__name__}: {err}")) from err

    def _keep(self, key: bytes, compiled: Compiled) -> Compiled:
        self._cache[key] = compiled
        self._cache_bytes += compiled.bytes
        while len(self._cache) > CACHE_GRAMMARS or (self._cache_bytes > CACHE_BYTES and len(self._cache) > 1):
            _, dropped = self._cache.popitem(last=False)
            self._cache_bytes -= dropped.bytes
        return compiled

    def _remember(self, key: bytes, refused: Refused) -> None:
        self._refusals[key] = (time.monotonic(), refused)
        self._refusals.move_to_end(key)
        while len(self._refusals) > _REFUSALS:
            self._refusals.popitem(last=False)

    def _raise_known_refusal(self, key: bytes) -> None:
        while self._refusals:
            oldest, (since, _) = next(iter(self._refusals.items()))
            if time.monotonic() - since <= REFUSAL_S:
                break
            del self._refusals[oldest]
        if key in self._refusals:
            refused = self._refusals[key][1]
            raise Refused(refused.reason, unread=refused.unread)


def _markers(tokenizer: ChatTokenizer, width: int) -> dict[str, int]:
    """Ids of the markers that are special tokens of this vocabulary and don't end an answer."""
    reasoning = (family.tokens for family in REASONING_FAMILIES.values())
    found = {}
    for text in family_tokens().union(*reasoning):
        token = tokenizer.token_id(text)
        if token is None or token >= width or token in tokenizer.eos_ids:
            continue
        if tokenizer.is_special(token):
            found[text] = token
    return found
