"""Prompts on their way through the model, chunk by chunk, each once for all rows that ask it.

Rows of one request with several answers, and any rows whose ids are equal, share a prefill: what is
prefilled is a `Prompt` with caches of its own, and rows hang on it. When it is done every row goes on with a
copy of the caches. A copy costs nothing by itself, because MLX's arrays are values: whoever writes gets a
buffer of its own then. Prompts that only begin alike share what they have in common: the later one follows
the other until there. A prompt that is done is kept while rows that ask it wait for a place; one whose last
row was cancelled is dropped. Short prompts that wait together go through the model in one pass (`padded`).
What is in the prompt cache is not prefilled, and what is prefilled goes into it. Engine thread only.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx

from mlxpool.worker.adapters.layers import Switch
from mlxpool.worker.cache.prompt_cache import Place, PromptCache
from mlxpool.worker.cache.records import RECORD_TOKENS
from mlxpool.worker.cache.sources import Caches
from mlxpool.worker.engine import following, padded
from mlxpool.worker.engine.admission import KvCost
from mlxpool.worker.engine.buffers import grow_as_ever, make_room
from mlxpool.worker.engine.chunks import ChunkWidth, company, next_turn
from mlxpool.worker.engine.prompt import Prompt
from mlxpool.worker.engine.row import Row

# What a prefill may leave to MLX's cache of freed buffers. A short one leaves what the next step takes again,
# and what was given back is dear to get anew on a GPU.
_LEFT_BYTES = 256 * 1024 * 1024


class Prefills:
    """All prompts on their way. switch: over the model, whose passes are those of its prompts' adapters.
    cache: where prefixes come from and go to, None for nowhere. pads: whether prompts may share a pass, None
    to try it. check: raises where what a pass has computed must not be used. gives_back: what a chunk leaves
    of buffers, and not only what a prompt leaves. One that takes seconds has no need of those before it, and
    buffers of many lengths lie in more of a device's memory than they fill."""

    def __init__(
        self,
        switch: Switch,
        make_cache: Callable[[], list[Any]],
        width: ChunkWidth,
        cache: PromptCache | None = None,
        pads: bool | None = None,
        check: Callable[[], None] = lambda: None,
        gives_back: bool = False,
    ) -> None:
        self._switch = switch
        self._make_cache = make_cache
        self._width = width
        self._cache = cache
        self._prompts: list[Prompt] = []
        self._pads = pads
        self._check = check
        self._gives_back = gives_back

    @property
    def rows(self) -> list[Row]:
        return [row for prompt in self._prompts for row in prompt.rows]

    def held_bytes(self, cost: KvCost) -> int:
        """What the prompts' caches take now."""
        return sum(cost.row_bytes(prompt.done) for prompt in self._prompts)

    def reserved_bytes(self, cost: KvCost) -> int:
        """What must be left of the pool for the rows that hang on prompts, and for prompts that are kept."""
        return sum(cost.row_bytes(row.projection().tokens()) for row in self.rows) + self.kept_bytes(cost)

    def kept_bytes(self, cost: KvCost) -> int:
        return sum(cost.row_bytes(prompt.done) for prompt in self._prompts if not prompt.rows)

    @property
    def runnable(self) -> bool:
        """Whether a chunk could go through the model now; else all of them wait for the disk."""
        return any(prompt.ready for prompt in self._prompts)

    def attach(self, row: Row) -> None:
        """Let a row share the prefill of its ids, or begin it."""
        for prompt in self._prompts:
            if prompt.serves(row):
                prompt.rows.append(row)
                return
        prompt = Prompt(row.ids, row.plan.namespace, self._make_cache())
        prompt.adapters = row.adapters
        prompt.rows.append(row)
        if self._cache is not None:
            prompt.boundaries = row.plan.boundaries
            prompt.cuts = self._cache.cuts(len(prompt.ids), prompt.boundaries)
        self._prompts.append(prompt)
        self._place([prompt])

    def _place(self, prompts: Sequence[Prompt]) -> None:
        """Prompts that follow nobody yet, or nobody any more: each goes behind one that is on its way, or
        begins. In this order: who comes first may be followed by the others."""
        lost = list(prompts)
        for prompt in prompts:
            prompt.follows = None
        while lost:
            prompt = lost.pop(0)
            ahead = following.ahead(prompt, self._prompts, lost)
            reach = 0
            if ahead is not None and self._cache is not None:
                reach = self._cache.reach(prompt.tokens, prompt.namespace)
            if ahead is None or reach + following.WORTH_FOLLOWING_TOKENS > ahead[1]:
                self._begin(prompt)
            else:
                prompt.follows, prompt.parts_at = ahead
                self._let_go(ahead[0])

    def _begin(self, prompt: Prompt) -> None:
        """From the longest prefix that the prompt cache has."""
        prompt.follows = None
        if self._cache is None:
            self._start(prompt, prompt.caches, 0)
            return
        prompt.restore = self._cache.restore(prompt.tokens, prompt.namespace)
        self._restored(prompt)

    def advance(self) -> None:
        """Prefixes that have come from disk since."""
        for prompt in self._prompts:
            if prompt.restore is not None:
                prompt.restore.advance()
                self._restored(prompt)

    def _restored(self, prompt: Prompt) -> None:
        restore = prompt.restore
        if restore is None or not restore.ready:
            return
        prompt.restore = None
        self._start(prompt, restore.caches or prompt.caches, restore.length)

    def _start(self, prompt: Prompt, caches: list[Any], length: int) -> None:
        """A prompt can go on from caches that hold so much of it."""
        prompt.start(caches, length)
        make_room(caches, prompt.end - length)
        first = prompt.first
        if first is not None and first.cached_tokens is None:
            first.cached_tokens = length
            if self._cache is not None:
                self._cache.count(length)
        self._let_go(prompt)

    def _let_go(self, prompt: Prompt) -> None:
        """Those that follow a prompt go on by themselves where it has come to what they share. Where a prefix
        from the prompt cache has taken it past that, they are led by one of their own."""
        if prompt.restore is not None or prompt.follows is not None:
            return
        for other in self._followers(prompt):
            if other.follows is not prompt or other.parts_at != prompt.done:
                continue
            other.follows = None
            try:
                caches = copy_caches(prompt.caches)
            except Exception:
                # Not the fault of the one that is followed.
                traceback.print_exc()
                self._begin(other)
            else:
                self._start(other, caches, prompt.done)
        if passed := [other for other in self._followers(prompt) if other.parts_at < prompt.done]:
            self._place(following.leaders_first(passed))

    def discard(self, leaving: Collection[Row]) -> None:
        """Rows leave; prompts that lose their last row with them are dropped."""
        dropped: list[Prompt] = []
        for prompt in self._prompts:
            held = len(prompt.rows)
            prompt.rows = [row for row in prompt.rows if row not in leaving]
            if held and not prompt.rows:
                dropped.append(prompt)
        while dropped:
            # Who is followed first: what it leaves may come to those behind the followers too.
            prompt = next(one for one in dropped if one.follows not in dropped)
            dropped.remove(prompt)
            self.drop(prompt)

    def drop(self, prompt: Prompt, faulty: bool = False) -> None:
        """Nobody waits for a prompt any more. Of those that follow it one takes its caches over, as far as
        they have come, and the others follow that one. faulty: its caches may be half-written."""
        orphans = following.leaders_first(self._followers(prompt))
        self._prompts.remove(prompt)
        prompt.drop()
        if orphans and prompt.done and not faulty:
            heir = orphans.pop(0)
            heir.follows = None
            self._start(heir, prompt.caches, prompt.done)
        self._place([other for other in orphans if other.rows])

    def drop_kept(self, waiting: Sequence[Row] = ()) -> None:
        """Give up prompts that are kept, but for those that one of the waiting rows asks."""
        for prompt in list(self._prompts):
            if not prompt.rows and not any(map(prompt.serves, waiting)):
                self.drop(prompt)

    def next(self) -> Prompt | None:
        """The prompt whose turn it is; None when no row waits for one that could go on now."""
        prompts = [prompt for prompt in self._prompts if prompt.ready]
        if not prompts:
            return None
        # Who is followed is as urgent as the most urgent of those that follow.
        remaining = [
            min([prompt.end, *(other.end for other in self._followers(prompt))]) - prompt.done
            for prompt in prompts
        ]
        passed_over = [prompt.passed_over for prompt in prompts]
        turn = prompts[next_turn(remaining, passed_over, self._width.tokens)]
        for prompt in prompts:
            prompt.passed_over += 1
        turn.passed_over = 0
        return turn

    def _followers(self, prompt: Prompt) -> list[Prompt]:
        return [other for other in self._prompts if other.follows is prompt]

    def completes_one(self, chunks: float) -> bool:
        """Whether so much of a chunk completes a prompt that rows wait for, and that could go on now. Chunks
        behind a long context are narrower, and take as long."""
        return any(
            prompt.ready and prompt.end - prompt.done <= chunks * self._width.at(prompt.done)
            for prompt in self._prompts
        )

    def together(self, turn: Prompt) -> list[Prompt]:
        """The prompt whose turn it is, and those that may share its pass: alone where none may."""
        longest = min(self._width.tokens, padded.longest(turn.caches))
        if self._pads is False or not self._may_share(turn, longest):
            return [turn]
        others = [
            one
            for one in self._prompts
            if one is not turn and one.namespace == turn.namespace and self._may_share(one, longest)
        ]
        taken = company(turn.end, [one.end for one in others], self._width.tokens)
        if taken and self._pads is None:
            self._pads = padded.works(self._switch.under(None), self._make_cache)
        return [turn, *(others[place] for place in taken)] if self._pads else [turn]

    def run_together(self, prompts: Sequence[Prompt]) -> bool:
        """Put whole prompts through the model in one pass. False if it failed: then each goes alone."""
        began_s = time.perf_counter()
        try:
            model = self._switch.under(prompts[0].adapters)
            rows = padded.prefill(model, self._make_cache(), [one.ids[: one.end] for one in prompts])
        except Exception:
            traceback.print_exc()
            for prompt in prompts:
                prompt.alone = True
            return False
        tokens = len(prompts) * max(one.end for one in prompts)
        self._width.observe(0, tokens, time.perf_counter() - began_s)
        for prompt, caches in zip(prompts, rows, strict=True):
            prompt.caches, prompt.done, prompt.passed_over = caches, prompt.end, 0
            self._keep(prompt, 0)
        give_back()
        return True

    def _may_share(self, prompt: Prompt, longest: int) -> bool:
        """Whether it is untouched, one pass takes all of it, and nobody needs it cut anywhere."""
        untouched = prompt.ready and not prompt.alone and prompt.done == 0 < prompt.end <= longest
        return untouched and not prompt.cuts and not self._followers(prompt)

    def cut(self, prompt: Prompt, alone: bool) -> int:
        """Where its next chunk ends. alone: no other row waits for it."""
        parts = [other.parts_at for other in self._followers(prompt)]
        stops = [stop for stop in (*prompt.cuts, *parts, prompt.end) if stop > prompt.done]
        return self._width.end(prompt.done, min(stops, default=prompt.end), alone)

    def run(self, prompt: Prompt, end: int, alone: bool) -> None:
        """Put one chunk through the model. Raises what the model and `check` raise."""
        chunk = prompt.ids[prompt.done : end]
        began_s = time.perf_counter()
        model = self._switch.under(prompt.adapters)
        take_in(model, chunk, prompt.caches)
        mx.eval([cache.state for cache in prompt.caches])
        self._check()
        elapsed_s = time.perf_counter() - began_s
        self._width.observe(prompt.done, len(chunk), elapsed_s, alone)
        began, prompt.done = prompt.done, end
        self._keep(prompt, began)
        self._let_go(prompt)
        if prompt.complete:
            grow_as_ever(prompt.caches)
        if prompt.complete or self._gives_back:
            give_back()

    def _keep(self, prompt: Prompt, began: int) -> None:
        """What has come since `began` goes into the prompt cache, once it makes a record or a place to go on
        from."""
        if self._cache is None:
            return
        stopped = prompt.done in prompt.cuts
        full = prompt.done // RECORD_TOKENS > began // RECORD_TOKENS
        if full or stopped or prompt.complete:
            source = Caches(prompt.caches, self._cache.layout)
            self._cache.keep(
                Place(prompt.tokens, prompt.done, prompt.namespace, prompt.boundaries),
                source,
                end=stopped or prompt.complete,
                # A boundary near the end does as well.
                state=stopped or (prompt.complete and not prompt.boundaries),
                lasting=prompt.done in prompt.boundaries,
            )

    def hand_over(self, prompt: Prompt, keep: bool) -> list[Row]:
        """The rows of a complete prompt, each with caches of its own; keep: for rows still to come. If it
        raises, the rows still hang on the prompt."""
        caches = [copy_caches(prompt.caches) for _ in range(len(prompt.rows) - (not keep))]
        if not keep:
            caches.append(prompt.caches)
            self._prompts.remove(prompt)
        rows = prompt.hand_over()
        for row, own in zip(rows, caches, strict=True):
            row.cache = own
        return rows


def take_in(model: Any, ids: Sequence[int], caches: list[Any]) -> None:
    """Make the graph of these ids' pass, of which caches are all that is wanted. As nothing else of it is
    evaluated, a model needs no way of its own for this, unless it reads while the graph is made."""
    getattr(model, "take_in", model)(mx.array([ids], dtype=mx.uint32), cache=caches)


def give_back() -> None:
    """What lies in MLX's cache of freed buffers, where it is much."""
    if mx.get_cache_memory() > _LEFT_BYTES:
        mx.clear_cache()


def copy_caches(caches: list[Any]) -> list[Any]:
    """Caches of any class of mlx-lm that hold the same and from now on go their own way."""
    # The array objects must be new ones too: assigning to a slice changes the object it is done on.
    return copy.deepcopy(caches)
