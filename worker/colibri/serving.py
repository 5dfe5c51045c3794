"""Put a model with streamed experts together for serving: artifact, dense part, source, reader, stream.

Runs on the engine's thread. The dense part is read as any model's is; then the slots are made and filled with
what is most wanted, and one small forward pass reads the experts that it needs. So a folder whose experts
can't be read is found out before the first request. Each layer is a sign of life for whoever watches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.layout import Artifact
from mlxpool.worker import cpu_attention, load
from mlxpool.worker.colibri.contract import ExpertSource
from mlxpool.worker.colibri.device_copies import with_device_copies
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.load import build
from mlxpool.worker.colibri.mtp import MtpDraft, add_draft_layer
from mlxpool.worker.colibri.reader import Reader
from mlxpool.worker.colibri.slab import writing
from mlxpool.worker.colibri.sources import open_source
from mlxpool.worker.colibri.stream import ExpertStream
from mlxpool.worker.engine.terms import Loaded

# A line of progress at most this often while experts are read.
_TELL_S = 1.0


class Files(NamedTuple):
    """Where a model lies, as its prompts' fingerprint wants to know it."""

    folder: Path
    model_type: str
    files: tuple[str, ...]


def load_streamed(folder: Path, launch: StreamLaunch, progress: Callable[[int, int], None]) -> Loaded:
    """The model in `folder`, its experts to be read from there as they are needed.

    progress(done, total): bytes of the dense part in memory. Raises LoadError.
    """
    backend = load.backend()
    try:
        artifact = artifacts.read(folder)
        with load.reasons(artifact.model_type):
            model = build(artifact, backend)
            if launch.drafts:
                add_draft_layer(model, artifact, backend)
            if backend == "cpu":
                cpu_attention.install()
            weights_bytes = load.evaluate(model, progress)
            stream = put_stream(model, artifact, launch, lambda: progress(weights_bytes, weights_bytes))
            try:
                files = Files(folder, artifact.model_type, artifact.files)
                loaded = load.warmed_up(model, weights_bytes, files, stream)
            except BaseException:
                stream.close()
                raise
    except (CheckpointError, ReadFault) as problem:
        raise load.LoadError(str(problem)) from problem
    draft = MtpDraft(model, launch.drafts, launch.draft_confidence) if launch.drafts else None
    return msgspec.structs.replace(loaded, draft=draft)


def put_stream(
    model: Any, artifact: Artifact, launch: StreamLaunch, tell: Callable[[], None]
) -> ExpertStream:
    """Streamed experts in a model that has its dense part, and its draft layer where `launch` drafts.

    What was streamed there before must be closed. tell: called now and then while slots are filled.

    Raises CheckpointError, ReadFault, and ValueError where `launch.write` can't be had.
    """
    backend = load.backend()
    direct = writing(launch.write) == "direct"
    source: ExpertSource = open_source(artifact, backend, launch.io)
    if direct:
        # What slots are assigned from is memory of the host, which the device's copies don't go to.
        source = with_device_copies(source, backend)
    reader = Reader(source, launch.queue_depth, launch.in_flight_bytes)
    try:
        stream = ExpertStream(artifact, source, reader, launch, backend)
        stream.install(model)
        if launch.drafts:
            stream.install_draft(model)
        stream.stop = _Teller(tell).never
        stream.preload()
    except BaseException:
        reader.close()
        raise
    return stream


def set_memory_limits(limit_bytes: int, launch: StreamLaunch) -> None:
    """Tell MLX its share. What it may keep of freed buffers is the plan's reserve."""
    load.set_memory_limits(limit_bytes, launch.reserve_bytes)


class _Teller:
    """Asked between layers whether the pass shall stop, it says no, and now and then that work goes on."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._told_s = time.monotonic()

    def never(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            self._tell()
        return False
