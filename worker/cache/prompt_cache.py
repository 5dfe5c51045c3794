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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxpool.shared.control import PromptCacheStats, SsdCacheStats
from mlxpool.worker.cache import extents, layers, records, states
from mlxpool.worker.cache.known import Known, Queued
from mlxpool.worker.cache.ram import Gone, Part, RamTier
from mlxpool.worker.cache.records import Found, Ids, Layout, Piece, Record
from mlxpool.worker.cache.restore import Restore
from mlxpool.worker.cache.sources import Source
from mlxpool.worker.cache.ssd import SsdTier
from mlxpool.worker.cache.ssd_reading import Reading
from mlxpool.worker.cache.write_behind import WriteBehind
from mlxpool.worker.cache.writer import Writer

# Positions where a state is kept beside those that the prompt names, so that a long document that is asked
# about again in other words is not read from its start.
STATE_INTERVAL_TOKENS = 2048

# A state shorter than this costs more to keep than to compute.
MIN_STATE_TOKENS = 256

# How often records are looked over for ones that idle.
_REST_S = 1.0


class Place(NamedTuple):
    """A prefix that some caches hold: `length` of these ids. boundaries: the plan's, the first of which other
    conversations begin with too where there are more."""

    ids: Ids
    length: int
    namespace: str
    boundaries: Sequence[int] = ()


class PromptCache:
    """One model's. tier, writer: None for memory alone. wake: makes the engine look again. idle_demote_s:
    None for never. lost_disk: why there is no tier on disk where one was asked for.
    clock: seconds."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout, self.ram, self.tier, self.wake = layout, ram, tier, wake
        self._make_cache = make_cache
        self.writer = writer
        self._idle_demote_s = idle_demote_s
        self._clock = clock
        self.lost_disk = lost_disk
        queued: Queued = {}
        self.known = Known(ram, queued, tier)
        self._behind: WriteBehind | None = None
        if tier is not None and writer is not None:
            self._behind = WriteBehind(ram, tier, writer, queued, wake, clock)
        self._gathering = extents.Gathering(ram)
        self.readings: list[Reading] = []
        self._read_progress = 0
        self._looked_s = float("-inf")
        self.hits = self.misses = self.cached_tokens = 0
        self.demotions = 0

    # Looking up

    def restore(self, ids: Ids, namespace: str) -> Restore:
        """What is there of this prompt, at most all but its last token, on its way."""
        return Restore(self, ids, namespace)

    def find(self, ids: Ids, namespace: str) -> Found | None:
        return records.find(ids, len(ids) - 1, records.root(namespace), self.layout, self.known)

    def reach(self, ids: Ids, namespace: str) -> int:
        """How long a prefix of this prompt could be restored."""
        try:
            found = self.find(ids, namespace)
        except Exception:
            traceback.print_exc()
            return 0
        return 0 if found is None else found.length

    def count(self, cached_tokens: int) -> None:
        """A prompt was looked up, and needs no prefill of so many tokens."""
        self.hits += bool(cached_tokens)
        self.misses += not cached_tokens
        self.cached_tokens += cached_tokens

    def put_together(self, found: Found, parts: dict[Piece, Part], tokens: int) -> list[Any]:
        """Caches of one row with room for all its `tokens`."""
        slices = extents.joined(found.records, lambda record: parts[Piece(record, "slice")])
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
        self._gathering.want(found.records)

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

    def keep(self, place: Place, source: Source, *, end: bool, state: bool, lasting: bool) -> None:
        """Keep what these caches hold of a prefix, as far as it is not kept yet.

        end: the short record at its end too. state: a state there, where the model has such. lasting: a later
        prompt may well go on right there: the short record is written like any other. A state that is not
        lasting is taken only while its conversation has few.
        """
        try:
            self._keep(place, source, end=end, state=state, lasting=lasting)
        except Exception:
            # What can't be kept is a later prompt's loss, never this row's.
            traceback.print_exc()
            sys.stderr.flush()

    def _keep(self, place: Place, source: Source, *, end: bool, state: bool, lasting: bool) -> None:
        if place.length < 1:
            return
        tokens = place.ids[: place.length]
        first_parent = records.root(place.namespace)
        path = list(records.chain(first_parent, tokens))
        new: list[Gone] = []
        for record in path:
            if not self.layout.sliced or self.known.has_slice(record.name) or not (record.full or end):
                continue
            part = Part(source.cut(record.start, record.end))
            new.append(Gone(record, tokens[record.start : record.end], "slice", part))
        last = path[-1]
        if state and self.layout.stateful and not self.known.has_state(last.name):
            held = [part for _, part in self._states(first_parent, path, tokens)]
            # One more like the last.
            wanted_bytes = sum(part.bytes for part in held) + (held[-1].bytes if held else 0)
            if lasting or wanted_bytes <= states.BYTES_PER_CONVERSATION:
                new.append(Gone(last, tokens[last.start :], "state", Part(*source.state(place.length))))
        # Now: a graph that still reads a buffer would make the next write to it copy all of it.
        mx.eval([list(gone.part.arrays.values()) for gone in new])
        for gone in new:
            self.ram.add(*gone)
        self.ram.touch(path)
        if end and self.layout.sliced:
            self._gathering.want(path)
        if any(gone.kind == "state" for gone in new):
            self._thin_states(place, first_parent, path, tokens)
        if self._behind is not None:
            for gone in new:
                # What lies between two places to go on from is written when it goes, or when asked for.
                if lasting or (gone.record.full and gone.kind == "slice"):
                    self._behind.add(Piece(gone.record, gone.kind))
        self.make_room(0)

    def _states(self, first_parent: bytes, path: Sequence[Record], tokens: Ids) -> list[tuple[Record, Part]]:
        """The states in memory of all that this conversation has been, the shortest first."""
        found: list[tuple[Record, Part]] = []
        for parent in (first_parent, *(record.name for record in path if record.full)):
            for record in self.ram.children(parent):
                part = self.ram.part(record.name, "state")
                if part is None or record.end > len(tokens):
                    continue
                own = self.ram.ids(record)
                if own is not None and np.array_equal(own, tokens[record.start : record.end]):
                    found.append((record, part))
        return sorted(found, key=lambda one: one[0].end)

    def _thin_states(self, place: Place, first_parent: bytes, path: Sequence[Record], tokens: Ids) -> None:
        """Old states of a conversation go, or are at least not written any more."""
        held = self._states(first_parent, path, tokens)
        # What other conversations begin with too is replaced by none of this one's.
        shared = place.boundaries[0] if len(place.boundaries) > 1 else 0
        kept = [record.end == shared for record, _ in held]
        for old in states.superseded(len(held), kept):
            record, part = held[old]
            if record.end % STATE_INTERVAL_TOKENS:
                part.fleeting = True
                if self._behind is not None:
                    self._behind.forget(Piece(record, "state"))
        for old in states.surplus([part.bytes for _, part in held], kept):
            record, _ = held[old]
            self.ram.drop(record, "state")
            if self.tier is not None:
                self.tier.delete(Piece(record, "state"))

    def make_room(self, more_bytes: int) -> None:
        """Make memory fit, and so much more: what goes is written first."""
        # What others stand on goes after them, and is written before them.
        for gone in reversed(self.ram.evict(more_bytes)):
            if self._behind is not None and not gone.part.fleeting:
                self._behind.offer(gone)

    def set_max_bytes(self, max_bytes: int) -> None:
        """Another share of memory."""
        self.ram.max_bytes = max_bytes
        self.make_room(0)

    def gather(self) -> bool:
        """While nothing runs: let some neighbours share their arrays; False when there are none to do so."""
        try:
            return self._gathering.step()
        except Exception:
            # No memory, for one: all is held as it was.
            traceback.print_exc()
            return False

    # Writing

    def maintain(self) -> None:
        """What a turn of the engine does beside: hand the writer what comes next, let idle records go."""
        behind = self._behind
        if behind is None:
            return
        behind.maintain()
        now_s = self._clock()
        if self._idle_demote_s is None or now_s < self._looked_s + _REST_S:
            return
        self._looked_s = now_s
        behind.tidy()
        done: list[Gone] = []
        for gone in self.ram.idle(now_s - self._idle_demote_s):
            if gone.part.fleeting or behind.is_on_disk(gone):
                done.append(gone)
            elif behind.has_room:
                behind.offer(gone)
            else:
                break
        for gone in done:
            self.ram.drop(gone.record, gone.kind)
            self.demotions += 1

    @property
    def rest_s(self) -> float | None:
        """For how long nothing needs to be done here unless something comes; None for ever."""
        if self._behind is None or not len(self.ram):
            return None
        return _REST_S if self._idle_demote_s is not None or self._behind.waits else None

    def unwritten(self) -> list[Gone]:
        """What memory holds that ought to be on disk and is not: least recently used first, and what others
        stand on after them."""
        return [
            gone
            for gone in self.ram.parts()
            if not gone.part.fleeting and (self._behind is None or not self._behind.is_on_disk(gone))
        ]

    def offer_some(self, unwritten: list[Gone]) -> int:
        """Hand the writer the last of these, as much as it takes; returns how many are left."""
        return 0 if self._behind is None else self._behind.offer_some(unwritten)

    def wrote(self, piece: Piece, durable: bool) -> None:
        """The writer is done with a part, or has given it up. Its thread."""
        if self._behind is not None:
            self._behind.wrote(piece, durable)

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

    def ssd_stats(self) -> SsdCacheStats | None:
        """None where no tier on disk was asked for."""
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
            longest_durable_prefix_tokens=tier.longest_prefix_tokens,
            off=tier.off or writer.off,
        )
