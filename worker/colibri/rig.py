"""A streamed model to be measured: loaded as for serving, its experts streamed in one way after another.

The dense part is read once. Between two ways the slots are given back before others are made, so there is
never more than one plan in memory. Rows are decoded by the engine's own batch, greedily, one at a time. What
is routed to is not put into the ledger of the home: nobody asked for it. One thread owns all of this.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec

from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.stats import ColibriStats, summarise
from mlxpool.worker import load
from mlxpool.worker.adapters.layers import Switch
from mlxpool.worker.colibri import serving
from mlxpool.worker.colibri.disk_rate import drop_all_pages
from mlxpool.worker.colibri.load import clear
from mlxpool.worker.colibri.mtp import MtpDraft, add_draft_layer
from mlxpool.worker.colibri.stream import ExpertStream
from mlxpool.worker.engine.batch import DecodeBatch
from mlxpool.worker.engine.prefill import copy_caches, take_in
from mlxpool.worker.engine.row import Row
from mlxpool.worker.request.plan import Plan, Sampling
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)


class Counts(NamedTuple):
    """What was counted up to some moment. time_s: perf_counter. tokens: of the row. passes: of the model."""

    time_s: float
    tokens: int
    hits: int
    misses: int
    read_bytes: int
    wait_s: float
    sync_s: float
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def since(self, before: Counts) -> Counts:
        since: list[Any] = [now - then for now, then in zip(self, before, strict=True)]
        return Counts(*since)


class Decoded(NamedTuple):
    """tokens: all that came, those to get warm with too. counts: of the others."""

    tokens: tuple[int, ...]
    counts: Counts

    @property
    def rate(self) -> float:
        """Tokens a second; 0 where none came in time."""
        return self.counts.tokens / self.counts.time_s if self.counts.tokens else 0.0


class Prompt(NamedTuple):
    """A prompt that has gone through the model, but for its last token. counts: of that."""

    ids: tuple[int, ...]
    caches: list[Any]
    counts: Counts


class Rig:
    """progress: of the loading, told the bytes of the dense part.

    Raises LoadError, as do its methods where experts can't be read.
    """

    def __init__(self, folder: Path, launch: StreamLaunch, progress: Callable[[int, int], None]) -> None:
        self.artifact = artifacts.read(folder)
        launch = _unlearned(launch)
        self._loaded = serving.load_streamed(folder, launch, progress)
        self._launch = launch
        assert isinstance(self._loaded.stream, ExpertStream)
        self._stream: ExpertStream | None = self._loaded.stream
        # Loading is over, and tells no more of itself.
        self._stream.stop = lambda: False

    @property
    def stream(self) -> ExpertStream:
        assert self._stream is not None
        return self._stream

    def stats(self) -> ColibriStats:
        return self.stream.stats()

    def use(self, launch: StreamLaunch) -> None:
        """Stream in this way from now on: slots as after loading, no expert in the page cache."""
        launch = _unlearned(launch)
        self.close()
        model: Any = self._loaded.model
        # The slots go with the modules that hold them.
        for layout in self.artifact.layers:
            clear(model, layout)
        if self._launch.drafts:
            model.pop("mtp")
            model.tap = None
        self._loaded = msgspec.structs.replace(self._loaded, stream=None, draft=None)
        # Layers and what they share know each other: their slots would stay until Python happens to look.
        gc.collect()
        mx.clear_cache()
        if launch.drafts:
            add_draft_layer(model, self.artifact, load.backend())
            load.evaluate(model.mtp, lambda *_: None)
        self._launch = launch
        drop_all_pages(self.artifact)
        self._stream = serving.put_stream(model, self.artifact, launch, lambda: None)
        draft = MtpDraft(model, launch.drafts, launch.draft_confidence) if launch.drafts else None
        self._loaded = msgspec.structs.replace(self._loaded, stream=self._stream, draft=draft)

    def close(self) -> None:
        """Nothing is read any more. Harmless the second time."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """Put a prompt through the model, in chunks as the engine does."""
        caches = self._loaded.make_cache()
        before = self._counts(0)
        width = self._launch.chunk
        for start in range(0, len(ids) - 1, width):
            chunk = list(ids[start : min(start + width, len(ids) - 1)])
            take_in(self._loaded.model, chunk, caches)
            mx.eval([cache.state for cache in caches])
        mx.clear_cache()
        after = self._counts(len(ids) - 1)
        return Prompt(tuple(ids), caches, after.since(before))

    def decode(self, prompt: Prompt, warm: int, tokens: int, limit_s: float | None = None) -> Decoded:
        """Decode after a prompt that can be decoded again: `tokens` after `warm` that don't count, or fewer
        where they would take longer than `limit_s`."""
        loaded = self._loaded
        plan = Plan(prompt.ids, 1 + warm + tokens, True, GREEDY, frozenset())
        row = Row(plan, AnswerText(ByteDetokeniser(lambda _: b"")), lambda _: None)
        row.cache = copy_caches(prompt.caches)
        batch = DecodeBatch(
            Switch(loaded.model), loaded.make_cache, loaded.kv, eager=True, draft=loaded.draft
        )
        batch.shares = False
        batch.join(row)
        began: Counts | None = None
        while row.emitted < plan.max_tokens:
            for sampled in batch.step(loaded.kv.row_bytes(len(prompt.ids) + plan.max_tokens)):
                row.ids.append(sampled.token)
                row.emitted += 1
            for failed in batch.take_failed():
                raise load.LoadError(str(failed.error)) from failed.error
            batch.finish()
            now = self._counts(row.emitted, row)
            if began is None and row.emitted > warm:
                # The next pass is the first that counts.
                began = now
            elif began is not None and limit_s is not None and now.time_s - began.time_s >= limit_s:
                break
        counts = self._counts(row.emitted, row)
        batch.leave([row])
        row.end()
        self.stream.turn_ended()
        return Decoded(tuple(row.ids[len(prompt.ids) :]), counts.since(began or counts))

    def _counts(self, tokens: int, row: Row | None = None) -> Counts:
        said = summarise(self.stream.stats())
        rounds = (row.target_calls, row.drafted, row.accepted) if row is not None else ()
        return Counts(
            time.perf_counter(),
            tokens,
            said.hits,
            said.misses,
            said.read_bytes,
            said.wait_s,
            self.stream.sync_s,
            *rounds,
        )


def _unlearned(launch: StreamLaunch) -> StreamLaunch:
    return msgspec.structs.replace(launch, usage_folder=None)
