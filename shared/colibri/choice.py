"""From settings and what `tune` found to what a plan is asked for and a worker is told. Pure."""

from __future__ import annotations

from typing import cast

import msgspec

from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri.launch import IoMode, StreamLaunch, WriteMode
from mlxpool.shared.colibri.layout import Artifact
from mlxpool.shared.colibri.plan import DRAFTS, StreamPlan, Wishes
from mlxpool.shared.colibri.tuned import Tuned
from mlxpool.shared.config import ModelSettings
from mlxpool.shared.config_values import AUTO

# Most disks reach their rate for reads of an expert's size with so many at once.
QUEUE_DEPTH = 8


def check(own: ModelSettings, artifact: Artifact, *, only_streamed: bool) -> None:
    """Refuse settings that can't go with streamed experts. only_streamed: the folder can't be held otherwise.

    Raises CheckpointError that names the setting.
    """
    most = max(layout.experts for layout in artifact.layers)
    if own.experts == "resident" and only_streamed:
        raise CheckpointError(
            f'experts = "resident": a {artifact.model_type} of this form is always streamed; slots = {most} '
            "holds all of its experts in memory"
        )
    if own.adapters is not None:
        raise CheckpointError(
            f"adapters = {own.adapters!r}: a model whose experts are streamed takes none; unset it"
        )
    if (own.batch or 1) > 1:
        raise CheckpointError(
            f"batch = {own.batch}: where experts are streamed one row is decoded at a time; use batch = 1"
        )
    if isinstance(own.slots, int) and own.slots > most:
        raise CheckpointError(
            f"slots = {own.slots}: this model's layers have {most} experts each; use slots = {most}, which "
            "holds all of them in memory, or fewer"
        )
    if own.mtp == "on" and artifact.mtp is None:
        raise CheckpointError('mtp = "on": the folder holds no draft layer; use mtp = "off"')


def wishes(own: ModelSettings, artifact: Artifact, tuned: Tuned, context: int | None = None) -> Wishes:
    """What the plan is asked for; context: None for the settings'. An explicit setting wins over what was
    measured, and that over the default."""
    drafts = own.mtp == "on" or (own.mtp == AUTO and tuned.mtp is True and artifact.mtp is not None)
    return Wishes(
        context=own.context if context is None else context,
        slots=own.slots if isinstance(own.slots, int) else None,
        most_slots=tuned.slots,
        drafts=DRAFTS if drafts else 0,
        reserve_bytes=own.reserve if isinstance(own.reserve, int) else None,
        prefill_chunk=own.prefill_chunk,
    )


def launch(own: ModelSettings, tuned: Tuned, plan: StreamPlan, usage_folder: str | None) -> StreamLaunch:
    """What the worker is told."""
    usual = StreamLaunch(slots=plan.slots, working_slots=plan.working_slots)
    return msgspec.structs.replace(
        usual,
        mtp_slots=plan.mtp_slots,
        mtp_working_slots=plan.mtp_working_slots,
        drafts=plan.drafts,
        draft_confidence=own.draft_confidence or 0.0,
        chunk=plan.chunk,
        io=cast("IoMode", own.io if own.io not in (None, AUTO) else tuned.io or AUTO),
        write=cast("WriteMode", own.write or AUTO),
        queue_depth=own.queue_depth if isinstance(own.queue_depth, int) else tuned.queue_depth or QUEUE_DEPTH,
        in_flight_bytes=usual.in_flight_bytes if own.in_flight is None else own.in_flight,
        prefetch=_switch(own.prefetch, tuned.prefetch),
        overlap=_switch(own.overlap, tuned.overlap),
        pins=own.pins or 0.0,
        reserve_bytes=plan.bytes_of("allocator_reserve"),
        planned_bytes=plan.planned_bytes,
        usage_folder=usage_folder,
    )


def _switch(chosen: bool | str | None, measured: bool | None) -> bool:
    if isinstance(chosen, bool):
        return chosen
    return True if measured is None else measured
