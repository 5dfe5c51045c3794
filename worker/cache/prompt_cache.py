"""The prompt cache as the engine sees it: what of a prompt is there already, and what is kept of a row.

Both tiers stand behind one question. A prefix is put together from records, wherever each of them is: those
on disk are read into arrays of their own and held in memory from then on. What prefill and rows compute is
cut into records as it comes; what memory has no room for, and what has not been asked for in a while, goes
to disk first. Nothing here is ever a request's error: a record that can't be had is a shorter prefix.

Owned by the engine thread. The readers' and the writer's threads work beside it and touch no array.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.shared.control import PromptCacheStats, SsdCacheStats
from mlxpool.shared.kv.record_file import Tensor
from mlxpool.worker.cache import layers, records
from mlxpool.worker.cache.known import Known
from mlxpool.worker.cache.layers_memory import alias, dtype_name
from mlxpool.worker.cache.ram import Gone, Part, RamTier
from mlxpool.worker.cache.records import Found, Ids, Layout, Piece, Record
from mlxpool.worker.cache.restore import Restore
from mlxpool.worker.cache.sources import Source
from mlxpool.worker.cache.ssd import SsdTier
from mlxpool.worker.cache.ssd_reading import Reading
from mlxpool.worker.cache.writer import Waiting, Writer

# Positions where a state is kept beside those that the prompt names, so that a long document that is asked
# about again in other words is not read from its start.
STATE_INTERVAL_TOKENS = 2048

# A state shorter than this costs more to keep than to compute.
MIN_STATE_TOKENS = 256

# States along one conversation: each is a whole window or recurrent state, and old ones are rarely gone back
# to. The first (a system prompt's) and the two newest are kept whatever they take.
STATE_BYTES_PER_CONVERSATION = 512 * 1024 * 1024
_STATES_KEPT = 2

# What the writer is given at a time: enough to be busy, little enough that what is superseded meanwhile is
# not written.
_OFFERED_BYTES = 64 * 1024 * 1024

# A conversation's next turn makes the states of its last one old: those of one that goes on are not written.
_STATE_PATIENCE_S = 20.0

# How often records are looked over for ones that idle.
_REST_S = 1.0


class PromptCache:
    """One model's. tier, writer: None for memory alone. wake: makes the engine look again. idle_demote_s:
    None for never. lost_disk: why there is no tier on disk where one was asked for."""

    def __init__(
        self,
        layout: Layout,
        make_cache: Callable[[], list[Any]],
        ram: RamTier,
        wake: Callable[[], None],
        tier: SsdTier | None = None,
        writer: Writer | None = None,
        idle_demote_s: float | None = None,
        lost_disk: str | None = None,
    ) -> None:
        self.layout, self.ram, self.tier, self.wake = layout, ram, tier, wake
        self._make_cache = make_cache
        self.writer = writer
        self._idle_demote_s = idle_demote_s
        self.lost_disk = lost_disk
        self._unwritten: deque[Gone] = deque()
        self._later: deque[tuple[float, Gone]] = deque()  # states, and when they are to be written
        self._queued: dict[Piece, Gone] = {}  # the writer's thread takes out of it
        self.known = Known(ram, self._queued, tier)
        self.readings: list[Reading] = []
        self._read_progress = 0
        self._looked_s = 0.0
        self.hits = self.misses = self.cached_tokens = 0
        self.demotions = 0

    # Looking up

    def restore(self, ids: Sequence[int], namespace: str) -> Restore:
        """What is there of this prompt, at most all but its last token, on its way."""
        return Restore(self, np.array(ids, dtype=np.uint32), namespace)

    def find(self, ids: Ids, namespace: str) -> Found | None:
        return records.find(ids, len(ids) - 1, records.root(namespace), self.layout, self.known)

    def reach(self, ids: Sequence[int], namespace: str) -> int:
        """How long a prefix of this prompt could be restored."""
        found = self.find(np.array(ids, dtype=np.uint32), namespace)
        return 0 if found is None else found.length

    def count(self, cached_tokens: int) -> None:
        """A prompt was looked up, and needs no prefill of so many tokens."""
        self.hits += bool(cached_tokens)
        self.misses += not cached_tokens
        self.cached_tokens += cached_tokens

    def put_together(self, found: Found, parts: dict[Piece, Part], tokens: int) -> list[Any]:
        """Caches of one row with room for all its `tokens`."""
        slices = [
            (record.start, record.end, parts[Piece(record, "slice")].arrays) for record in found.records
        ]
        state = None
        if found.state is not None:
            part = parts[Piece(found.state, "state")]
            state = (part.arrays, part.scalars)
        caches = layers.assemble(
            self._make_cache, self.layout, found.length, slices, state, tokens - found.length
        )
        mx.eval([cache.state for cache in caches])
        return caches

    def used(self, found: Found) -> None:
        """A prefix was restored: its records are recent, and room is made for those that were read."""
        path = list(found.records)
        if found.state is not None and found.state not in path:
            path.append(found.state)
        self.ram.touch(path)
        if self.tier is not None:
            self.tier.touch(path)
        self.make_room(0)

    def read(self, reading: Reading) -> None:
        """A reading is over."""
        self._read_progress += reading.progress

    def reject(self, pieces: Sequence[Piece]) -> None:
        """These make no caches: they go, from both tiers."""
        for piece in pieces:
            self.ram.drop(piece.record, piece.kind)
            if self.tier is not None:
                self.tier.delete(piece)

    @property
    def progress(self) -> int:
        """Grows with every record that is read."""
        return self._read_progress + sum(reading.progress for reading in self.readings)

    # Keeping

    def cuts(self, ids_count: int, boundaries: Sequence[int]) -> list[int]:
        """Where a prefill of so many ids must stop, so that a state can be taken there."""
        if not self.layout.stateful:
            return []
        wanted = {*boundaries, *range(STATE_INTERVAL_TOKENS, ids_count, STATE_INTERVAL_TOKENS)}
        return sorted(cut for cut in wanted if MIN_STATE_TOKENS <= cut < ids_count)

    def keep(
        self,
        ids: Sequence[int],
        length: int,
        namespace: str,
        source: Source,
        *,
        end: bool,
        state: bool,
        lasting: bool,
    ) -> None:
        """Keep what these caches hold of the first `length` ids, as far as it is not kept yet.

        end: the short record at its end too. state: a state there, where the model has such. lasting: a later
        prompt may well go on right there: the short record is written like any other. A state that is not
        lasting is taken only while its conversation has few.
        """
        try:
            self._keep(ids, length, namespace, source, end=end, state=state, lasting=lasting)
        except Exception:
            # What can't be kept is a later prompt's loss, never this row's.
            traceback.print_exc()
            sys.stderr.flush()

    def _keep(
        self,
        ids: Sequence[int],
        length: int,
        namespace: str,
        source: Source,
        *,
        end: bool,
        state: bool,
        lasting: bool,
    ) -> None:
        if length < 1:
            return
        tokens = np.array(ids[:length], dtype=np.uint32)
        path = list(records.chain(records.root(namespace), tokens))
        new: list[Gone] = []
        for record in path:
            if not self.layout.sliced or self.known.has_slice(record.name) or not (record.full or end):
                continue
            part = Part(source.cut(record.start, record.end))
            new.append(Gone(record, tokens[record.start : record.end], "slice", part))
        last = path[-1]
        wants_state = state and self.layout.stateful and not self.known.has_state(last.name)
        if wants_state and (lasting or self._has_room_for_states(path)):
            new.append(Gone(last, tokens[last.start :], "state", Part(*source.state(length))))
        # Now: a graph that still reads a buffer would make the next write to it copy all of it.
        mx.eval([list(gone.part.arrays.values()) for gone in new])
        for gone in new:
            self.ram.add(*gone)
        self.ram.touch(path)
        self._thin_states(path)
        due_s = time.monotonic() + _STATE_PATIENCE_S
        for gone in new:
            if gone.kind == "state" and lasting:
                self._later.append((due_s, gone))
            elif gone.record.full or lasting:
                self._unwritten.append(gone)
        self.make_room(0)

    def _states(self, path: Sequence[Record]) -> list[tuple[Record, Part]]:
        """The states in memory along a conversation."""
        parts = ((record, self.ram.part(record.name, "state")) for record in path)
        return [(record, part) for record, part in parts if part is not None]

    def _has_room_for_states(self, path: Sequence[Record]) -> bool:
        """Whether one more like the last would stay."""
        held = self._states(path)
        taken_bytes = sum(part.bytes for _, part in held)
        return taken_bytes + (held[-1][1].bytes if held else 0) <= STATE_BYTES_PER_CONVERSATION

    def _thin_states(self, path: Sequence[Record]) -> None:
        """Hold a conversation's states to their share: old ones between the first and the newest go."""
        held = self._states(path)
        taken_bytes = sum(part.bytes for _, part in held)
        for record, part in held[1:-_STATES_KEPT]:
            if taken_bytes <= STATE_BYTES_PER_CONVERSATION:
                break
            taken_bytes -= part.bytes
            self.ram.drop(record, "state")
            if self.tier is not None:
                self.tier.delete(Piece(record, "state"))

    def make_room(self, more_bytes: int) -> None:
        """Make memory fit, and so much more: what goes is written first."""
        for gone in self.ram.evict(more_bytes):
            self._offer(gone)

    def set_max_bytes(self, max_bytes: int) -> None:
        """Another share of memory."""
        self.ram.max_bytes = max_bytes
        self.make_room(0)

    # Writing

    def maintain(self) -> None:
        """What a turn of the engine does beside: hand the writer what comes next, let idle records go."""
        writer, now_s = self.writer, time.monotonic()
        while self._later and self._later[0][0] <= now_s:
            self._unwritten.append(self._later.popleft()[1])
        while self._unwritten and writer is not None and writer.pending_bytes < _OFFERED_BYTES:
            gone = self._unwritten.popleft()
            if self.ram.part(gone.record.name, gone.kind) is gone.part:
                self._offer(gone)
        if self._idle_demote_s is None or self.tier is None or now_s < self._looked_s + _REST_S:
            return
        self._looked_s = now_s
        for gone in self.ram.idle(now_s - self._idle_demote_s):
            if self.tier.has(Piece(gone.record, gone.kind)):
                self.ram.drop(gone.record, gone.kind)
                self.demotions += 1
            elif writer is not None and writer.pending_bytes < _OFFERED_BYTES:
                self._offer(gone)

    @property
    def rest_s(self) -> float | None:
        """For how long nothing needs to be done here unless something comes; None for ever."""
        if self.tier is None or not len(self.ram):
            return None
        return _REST_S if self._idle_demote_s is not None or self._later or self._unwritten else None

    def unwritten(self) -> deque[Gone]:
        """What memory holds that is not on disk, least recently used first."""
        if self.tier is not None:
            # Other processes delete too.
            self.tier.recheck()
        return deque(gone for gone in self.ram.parts() if not self._is_on_disk(gone))

    def offer_some(self, unwritten: deque[Gone]) -> int:
        """Hand the writer the next of these, as much as it takes; returns how many are left."""
        writer = self.writer
        while unwritten and writer is not None and writer.pending_bytes < _OFFERED_BYTES:
            self._offer(unwritten.popleft())
        return len(unwritten)

    def _is_on_disk(self, gone: Gone) -> bool:
        return self.tier is not None and self.tier.has(Piece(gone.record, gone.kind))

    def _offer(self, gone: Gone) -> None:
        piece = Piece(gone.record, gone.kind)
        if self.writer is None or piece in self._queued or self._is_on_disk(gone):
            return
        part = gone.part
        try:
            buffers = {name: alias(array) for name, array in part.arrays.items()}
            tensors = {
                name: Tensor(dtype_name(array.dtype), array.shape) for name, array in part.arrays.items()
            }
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            return
        self._queued[piece] = gone
        self.writer.offer(Waiting(piece, gone.ids, tensors, buffers, part.scalars))

    def wrote(self, piece: Piece) -> None:
        """The writer is done with a part, or has given it up. Its thread."""
        self._queued.pop(piece, None)
        if self._unwritten:
            self.wake()

    def close(self) -> None:
        """The worker ends: what still waits to be written is given up."""
        if self.writer is not None:
            self.writer.close()

    # Figures

    def stats(self) -> PromptCacheStats:
        return PromptCacheStats(
            entries=len(self.ram),
            bytes=self.ram.bytes,
            max_bytes=self.ram.max_bytes,
            hits=self.hits,
            misses=self.misses,
            cached_tokens=self.cached_tokens,
        )

    def ssd_stats(self, longest: bool = True) -> SsdCacheStats | None:
        """None where no tier on disk was asked for. longest: whether to look for the longest prefix too,
        which takes a walk over all records."""
        tier, writer = self.tier, self.writer
        if tier is None or writer is None:
            return None if self.lost_disk is None else SsdCacheStats(off=self.lost_disk)
        return SsdCacheStats(
            dir=str(tier.folder),
            entries=tier.entries,
            bytes=tier.bytes,
            max_bytes=tier.max_bytes,
            restores=tier.restores,
            restore_ms_last=tier.restore_ms_last,
            restore_ms=tier.restore_ms,
            restored_bytes=tier.restored_bytes,
            rejected=tier.rejected,
            spills=writer.spills,
            demotions=self.demotions,
            pending=writer.pending,
            pending_bytes=writer.pending_bytes,
            dropped=writer.dropped,
            failed=writer.failed,
            longest_durable_prefix_tokens=tier.longest_prefix_tokens if longest else 0,
            off=tier.off or writer.off,
        )
