"""Compiled grammars for one model: cached, compiled at most once at a time, handed out as constraints.

Owned by the event loop; what it hands out belongs to the engine's thread. xgrammar, and torch with it, is
imported with the first grammar, in a thread of its own and beside the compiling process, never before. A
grammar that was refused is remembered too: a client that sends it again has its answer at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.errors import error
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
)
from mlxpool.worker.text.reasoning import REASONING_FAMILIES
from mlxpool.worker.text.tools.families import family_tokens

# Kept compiled grammars: an agent uses a handful. The bytes are the compiler's count and the specs' texts.
CACHE_GRAMMARS = 128
CACHE_BYTES = 64 * 1024 * 1024

# A refusal for being slow may have been the machine's fault.
REFUSAL_S = 60.0
_REFUSALS = 128


class Compiled:
    """A grammar ready for rows. Each row has a constraint of its own; making one takes microseconds."""

    def __init__(self, grammar: Any, stop_ids: Sequence[int], opened: OpenCount) -> None:
        self.bytes: int = grammar.memory_size_bytes
        self._grammar = grammar
        self._stop_ids = stop_ids
        self._opened = opened

    def constraint(self) -> Constraint:
        """A matcher at the grammar's beginning; the row that gets it releases it."""
        matcher = runtime.xgrammar().GrammarMatcher(self._grammar)
        return MatcherConstraint(matcher, self._stop_ids, self._opened)


class Held(msgspec.Struct, frozen=True):
    """How an answer is held to its form. compiled: the grammar, None where none is. family: how calls that
    the grammar forces are to be read, None where it forces none. instruction: for a system message.
    warnings: for the answer's Warning header."""

    compiled: Compiled | None = None
    family: str | None = None
    instruction: str | None = None
    warnings: tuple[str, ...] = ()


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
        self._cache: OrderedDict[GrammarSpec, Compiled] = OrderedDict()
        self._cache_bytes = 0
        self._refusals: OrderedDict[GrammarSpec, tuple[float, Refused]] = OrderedDict()
        self._on_way: dict[GrammarSpec, tuple[Entry, int]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
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
            return Held()
        # Schemas come in megabytes.
        decision = await asyncio.to_thread(decide, demand)
        if isinstance(decision, Enforced):
            try:
                return await self._held(decision)
            except Refused as refused:
                mistake = invalid_text(demand, refused.reason) if refused.unread else None
                if mistake is not None:
                    raise mistake from refused
                decision = await asyncio.to_thread(give_up, demand, refused.reason)
        if isinstance(decision, Enforced):
            try:
                return await self._held(decision)
            except Refused as refused:
                raise error(
                    "unsupported_schema",
                    f"a call can't be forced here: {refused.reason}; send tool_choice auto",
                    param="tool_choice",
                ) from refused
        if isinstance(decision, Instructed):
            return Held(None, None, decision.instruction, (decision.warning,))
        return Held()

    async def _held(self, decision: Enforced) -> Held:
        return Held(await self.compile(decision.spec), decision.family, None, decision.warnings)

    async def compile(self, spec: GrammarSpec) -> Compiled:
        """The compiled grammar. Raises Refused with the reason, ApiError 429 when too many wait.

        Whoever asks for a grammar that is on its way waits for the same one. A cancelled call gives up its
        part in it.
        """
        cached = self._cache.get(spec)
        if cached is not None:
            self._cache.move_to_end(spec)
            return cached
        self._raise_known_refusal(spec)
        entry, others = self._on_way.get(spec) or (self._queue.enter(spec.text), 0)
        self._on_way[spec] = (entry, others + 1)
        if not self._is_warm:
            self._is_warm = True
            self._thread.submit(self._warm)
        try:
            serialised = await asyncio.shield(entry.result)
            cached = self._cache.get(spec)
            if cached is None:
                loop = asyncio.get_running_loop()
                grammar = await loop.run_in_executor(self._thread, self._read, spec, serialised)
                cached = self._keep(spec, Compiled(grammar, self._stop_ids, self._opened))
            return cached
        except Refused as refused:
            self._remember(spec, refused)
            raise Refused(refused.reason, unread=refused.unread) from refused
        finally:
            waits = self._on_way[spec][1] - 1
            if waits:
                self._on_way[spec] = (entry, waits)
            else:
                del self._on_way[spec]
                self._queue.leave(entry)

    async def close(self) -> None:
        """End the compiling process and refuse what waits."""
        await self._queue.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # Inside

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

    def _keep(self, spec: GrammarSpec, compiled: Compiled) -> Compiled:
        known = self._cache.get(spec)
        if known is not None:
            return known
        self._cache[spec] = compiled
        self._cache_bytes += compiled.bytes + len(spec.text)
        while len(self._cache) > CACHE_GRAMMARS or (self._cache_bytes > CACHE_BYTES and len(self._cache) > 1):
            old, dropped = self._cache.popitem(last=False)
            self._cache_bytes -= dropped.bytes + len(old.text)
        return compiled

    def _remember(self, spec: GrammarSpec, refused: Refused) -> None:
        self._refusals[spec] = (time.monotonic(), refused)
        while len(self._refusals) > _REFUSALS:
            self._refusals.popitem(last=False)

    def _raise_known_refusal(self, spec: GrammarSpec) -> None:
        since, refused = self._refusals.get(spec, (0.0, None))
        if refused is None:
            return
        if not refused.unread and time.monotonic() - since > REFUSAL_S:
            del self._refusals[spec]
            return
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
