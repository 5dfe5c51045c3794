"""A streamed model measured as it would be served: its disk, a prompt, an answer, its memory.

The disk's own rate is measured first, while nothing else of the process wants anything of it. Each prompt is
another: experts that were read for one are no help to the next but for what slots hold, as in a server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri import measured
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.layout import Artifact
from mlxpool.shared.footprint import footprint_bytes
from mlxpool.worker.colibri import disk_rate, serving
from mlxpool.worker.colibri.prompts import prompt
from mlxpool.worker.colibri.rig import Counts, Rig

# Of other prompts and answers: what one has by chance another lacks.
ROUNDS = 2
# Tokens of a decoding before those that count, at the least.
_LEAST_WARM_TOKENS = 8

# Share of the work that is done, a word for the stage, what is being done.
Progress = Callable[[float, str, str], None]


def warm_tokens(slots: int, top_k: int) -> int:
    """Tokens that fill the slots about once, hits taken into account."""
    return min(measured.MOST_WARM_TOKENS, max(_LEAST_WARM_TOKENS, 2 * slots // top_k))


def bench(
    folder: Path,
    launch: StreamLaunch,
    limit_bytes: int,
    tokens: int,
    prompt_tokens: int,
    encode: Callable[[str], list[int]],
    progress: Progress,
) -> measured.Bench:
    """tokens: decoded after each prompt, beside those to get warm. Raises CheckpointError, LoadError."""
    artifact = artifacts.read(folder)
    disk = own_rate(artifact, launch.queue_depth, progress)
    serving.set_memory_limits(limit_bytes, launch)
    began_s = time.perf_counter()
    rig = Rig(folder, launch, lambda done, total: progress(0.05 + 0.35 * done / max(total, 1), "load", ""))
    load_s = time.perf_counter() - began_s
    try:
        # Reads that go through the page cache shall find there what this run has put there.
        disk_rate.drop_all_pages(artifact)
        warm = warm_tokens(launch.slots, artifact.top_k)
        prefills: list[Counts] = []
        decodes: list[Counts] = []
        for number in range(ROUNDS):
            done = 0.4 + 0.6 * number / ROUNDS
            progress(done, "prefill", f"{prompt_tokens} tokens")
            read = rig.prefill(prompt(encode, prompt_tokens, number))
            progress(done + 0.3 / ROUNDS, "decode", f"{tokens} tokens")
            decodes.append(rig.decode(read, warm, tokens).counts)
            prefills.append(read.counts)
            # Its caches, before others are made.
            del read
        stats = rig.stats()
        footprint = footprint_bytes(os.getpid())
    finally:
        rig.close()
    return measured.Bench(
        form=artifact.form,
        slots=stats.main.slots,
        experts=stats.main.experts,
        io=stats.io,
        io_reason=stats.io_reason,
        write=stats.write,
        drafts=launch.drafts,
        load_s=load_s,
        disk=disk,
        prefill=_prefill(_sum(prefills), artifact),
        decode=_decode(_sum(decodes), disk.bytes_per_s),
        memory=measured.Memory(launch.planned_bytes, footprint, mx.get_peak_memory(), limit_bytes),
    )


def own_rate(artifact: Artifact, depth: int, progress: Progress) -> measured.Disk:
    """The disk's, at an expert's size. Raises CheckpointError."""
    progress(0.0, "disk", "its own rate")
    rate = disk_rate.measure(artifact, depth)
    return measured.Disk(rate.bytes_per_s, rate.reads, rate.read_bytes, depth, rate.seconds, rate.io)


def _sum(counts: list[Counts]) -> Counts:
    return Counts(*(sum(each) for each in zip(*counts, strict=True)))


def _prefill(counts: Counts, artifact: Artifact) -> measured.Prefill:
    record_bytes = sum(layout.record_bytes for layout in artifact.layers) / len(artifact.layers)
    return measured.Prefill(
        tokens=counts.tokens,
        seconds=counts.time_s,
        tok_per_s=counts.tokens / counts.time_s,
        read_bytes=counts.read_bytes,
        needed_bytes=round(counts.misses * record_bytes),
    )


def _decode(counts: Counts, disk_bytes_per_s: float) -> measured.Decode:
    needed = counts.hits + counts.misses
    return measured.Decode(
        tokens=counts.tokens,
        seconds=counts.time_s,
        tok_per_s=counts.tokens / counts.time_s,
        hit_rate=counts.hits / needed if needed else 1.0,
        read_bytes_per_token=counts.read_bytes / max(counts.tokens, 1),
        disk_share=counts.read_bytes / counts.time_s / disk_bytes_per_s,
        wait_s=counts.wait_s,
        sync_s=counts.sync_s,
        passes=counts.passes,
        drafted=counts.drafted,
        accepted=counts.accepted,
    )
