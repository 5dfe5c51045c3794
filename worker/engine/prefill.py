"""Prompts on their way through the model, chunk by chunk, each once for all rows that ask it.

Rows of one request with several answers, and any rows whose ids are equal, share a prefill: what is
prefilled is a `Prompt` with caches of its own, and rows hang on it. When it is done every row goes on with a
copy of the caches. A copy costs nothing by itself, because MLX's arrays are values: whoever writes gets a
buffer of its own then. A prompt that is done is kept while rows that ask it wait for a place; one whose last
row was cancelled is dropped. Short prompts that wait together go through the model in one pass (`padded`).
Engine thread only.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlxpool.worker.engine import padded
from mlxpool.worker.engine.admission import KvCost
from mlxpool.worker.engine.chunks import ChunkWidth, company, next_turn
from mlxpool.worker.engine.row import Row

# What a prefill may leave to MLX's cache of freed buffers. A short one leaves what the next step takes again,
# and what was given back is dear to get anew on a GPU.
_LEFT_BYTES = 256 * 1024 * 1024


class Prompt:
    """Ids, the first `done` of which are in `caches`, and the rows that wait for the rest."""

    def __init__(self, ids: Sequence[int], caches: list[Any]) -> None:
        self.ids = list(ids)
        self.caches = caches
        self.rows: list[Row] = []
        self.done = 0
        self.passed_over = 0
        self.token_s = 0.0  # what a token of its last chunk took
        self.alone = False  # a pass that it shared has failed

    @property
    def end(self) -> int:
        """Ids that are prefilled; the last one goes through the first decode step."""
        return len(self.ids) - 1

    @property
    def complete(self) -> bool:
        return self.done == self.end


class Prefills:
    """All prompts on their way."""

    def __init__(self, model: Any, make_cache: Callable[[], list[Any]], width: ChunkWidth) -> None:
        self._model = model
        self._make_cache = make_cache
        self._width = width
        self._prompts: list[Prompt] = []
        self._pads: bool | None = None  # whether prompts may share a pass; not tried yet

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

    def attach(self, row: Row) -> None:
        """Let a row share the prefill of its ids, or begin it."""
        for prompt in self._prompts:
            if prompt.ids == row.ids:
                prompt.rows.append(row)
                return
        prompt = Prompt(row.ids, self._make_cache())
        prompt.rows.append(row)
        self._prompts.append(prompt)

    def discard(self, leaving: Collection[Row]) -> None:
        """Rows leave; prompts that lose their last row with them are dropped."""
        for prompt in list(self._prompts):
            held = len(prompt.rows)
            prompt.rows = [row for row in prompt.rows if row not in leaving]
            if held and not prompt.rows:
                self._prompts.remove(prompt)

    def drop(self, prompt: Prompt) -> None:
        self._prompts.remove(prompt)

    def drop_kept(self, waiting: Iterable[Row] = ()) -> None:
        """Give up prompts that are kept, but for those that one of the waiting rows asks."""
        asked = [row.ids for row in waiting]
        self._prompts = [prompt for prompt in self._prompts if prompt.rows or prompt.ids in asked]

    def next(self) -> Prompt | None:
        """The prompt whose turn it is; None when no row waits for one."""
        prompts = [prompt for prompt in self._prompts if prompt.rows]
        if not prompts:
            return None
        remaining = [prompt.end - prompt.done for prompt in prompts]
        passed_over = [prompt.passed_over for prompt in prompts]
        turn = prompts[next_turn(remaining, passed_over, self._width.tokens)]
        for prompt in prompts:
            prompt.passed_over += 1
        turn.passed_over = 0
        return turn

    def together(self, turn: Prompt) -> list[Prompt]:
        """The prompt whose turn it is, and those that may share its pass: alone where none may."""
        longest = min(self._width.tokens, padded.longest(turn.caches))
        if self._pads is False or not _may_share(turn, longest):
            return [turn]
        others = [one for one in self._prompts if one is not turn and one.rows and _may_share(one, longest)]
        taken = company(turn.end, [one.end for one in others], self._width.tokens)
        if taken and self._pads is None:
            self._pads = padded.works(self._model, self._make_cache)
        return [turn, *(others[place] for place in taken)] if self._pads else [turn]

    def run_together(self, prompts: Sequence[Prompt]) -> bool:
        """Put whole prompts through the model in one pass. False if it failed: then each goes alone."""
        began_s = time.perf_counter()
        try:
            rows = padded.prefill(self._model, self._make_cache(), [one.ids[: one.end] for one in prompts])
        except Exception:
            traceback.print_exc()
            for prompt in prompts:
                prompt.alone = True
            return False
        self._width.observe(len(prompts) * max(one.end for one in prompts), time.perf_counter() - began_s)
        for prompt, caches in zip(prompts, rows, strict=True):
            prompt.caches, prompt.done, prompt.passed_over = caches, prompt.end, 0
        _give_back()
        return True

    def cut(self, prompt: Prompt) -> int:
        """Where its next chunk ends."""
        return self._width.end(prompt.done, prompt.end, prompt.token_s)

    def run(self, prompt: Prompt, end: int) -> None:
        """Put one chunk through the model. Raises what the model raises."""
        chunk = prompt.ids[prompt.done : end]
        began_s = time.perf_counter()
        self._model(mx.array([chunk], dtype=mx.uint32), cache=prompt.caches)
        mx.eval([cache.state for cache in prompt.caches])
        elapsed_s = time.perf_counter() - began_s
        self._width.observe(len(chunk), elapsed_s)
        prompt.token_s = elapsed_s / len(chunk)
        prompt.done = end
        if prompt.complete:
            _give_back()

    def hand_over(self, prompt: Prompt, keep: bool) -> list[Row]:
        """The rows of a complete prompt, each with caches of its own; keep: for rows still to come."""
        rows, prompt.rows = prompt.rows, []
        copies = len(rows) - (not keep)
        for row in rows[:copies]:
            row.cache = copy_caches(prompt.caches)
        if not keep:
            rows[-1].cache = prompt.caches
            self._prompts.remove(prompt)
        return rows


def _may_share(prompt: Prompt, longest: int) -> bool:
    """Whether it is untouched and one pass takes all of it."""
    return not prompt.alone and prompt.done == 0 < prompt.end <= longest


def _give_back() -> None:
    if mx.get_cache_memory() > _LEFT_BYTES:
        mx.clear_cache()


def copy_caches(caches: list[Any]) -> list[Any]:
    """Caches of any class of mlx-lm that hold the same and from now on go their own way."""
    # The array objects must be new ones too: assigning to a slice changes the object it is done on.
    return copy.deepcopy(caches)
