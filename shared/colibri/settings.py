"""What may be chosen of streamed experts: in [colibri] for all models, beside its other keys for one."""

from __future__ import annotations

from typing import Annotated

import msgspec

from mlxpool.shared import config_values as v
from mlxpool.shared.config_values import Key


class Colibri(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[colibri]: models whose experts are read from disk as they are needed. "auto" is what `mlxpool colibri
    tune` kept for the model on this machine, else what the key's reason says. Bytes."""

    slots: Annotated[
        int | str, Key(v.AUTO_COUNT, "Experts held per layer. Auto without a measurement: as many as fit.")
    ] = "auto"
    io: Annotated[
        str,
        Key(
            v.IO_MODE,
            "Auto without a measurement: past the page cache, which would hold the same bytes a second time.",
        ),
    ] = "auto"
    prefetch: Annotated[
        bool | str,
        Key(v.SWITCH, "Read what the next layer will likely ask for. Auto without a measurement: yes."),
    ] = "auto"
    overlap: Annotated[
        bool | str,
        Key(v.SWITCH, "Compute with what is there while the rest is read. Auto without a measurement: yes."),
    ] = "auto"
    mtp: Annotated[
        str,
        Key(
            v.MTP_MODE, "Drafts of the model's own layer. Auto without a measurement: off, as they read more."
        ),
    ] = "auto"
    draft_confidence: Annotated[
        float,
        Key(
            v.PROBABILITY,
            "How likely a draft must be to be verified, which asks every layer for experts. 0: any draft is.",
        ),
    ] = 0.0
    reserve: Annotated[
        int | str,
        Key(v.AUTO_SIZE, "Left to buffers, process and safety. Auto: by the model's widths and the budget."),
    ] = "auto"
    queue_depth: Annotated[
        int | str,
        Key(v.DEPTH, "Reads at once. Auto without a measurement: 8, where most disks reach their rate."),
    ] = "auto"
    in_flight: Annotated[int, Key(v.SIZE, "Of reads at once, together; one is always let through.")] = (
        512 * 2**20
    )
    write: Annotated[
        str, Key(v.WRITE_MODE, "Auto: straight into the arrays where a trial at start shows that this works.")
    ] = "auto"
    pins: Annotated[
        float,
        Key(
            v.PINS, "Share of a layer's slots that learned favourites keep. 0: the least recently used goes."
        ),
    ] = 0.0


class ModelColibri(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same for one model. None inherits [colibri]."""

    experts: Annotated[
        str | None,
        Key(v.EXPERTS, "Unset: streamed where a folder can't be held otherwise, else all in memory."),
    ] = None
    slots: Annotated[int | str | None, Key(v.AUTO_COUNT, "Unset: [colibri] slots.")] = None
    io: Annotated[str | None, Key(v.IO_MODE, "Unset: [colibri] io.")] = None
    prefetch: Annotated[bool | str | None, Key(v.SWITCH, "Unset: [colibri] prefetch.")] = None
    overlap: Annotated[bool | str | None, Key(v.SWITCH, "Unset: [colibri] overlap.")] = None
    mtp: Annotated[str | None, Key(v.MTP_MODE, "Unset: [colibri] mtp.")] = None
    draft_confidence: Annotated[float | None, Key(v.PROBABILITY, "Unset: [colibri] draft_confidence.")] = None
    reserve: Annotated[int | str | None, Key(v.AUTO_SIZE, "Unset: [colibri] reserve.")] = None
    queue_depth: Annotated[int | str | None, Key(v.DEPTH, "Unset: [colibri] queue_depth.")] = None
    in_flight: Annotated[int | None, Key(v.SIZE, "Unset: [colibri] in_flight.")] = None
    write: Annotated[str | None, Key(v.WRITE_MODE, "Unset: [colibri] write.")] = None
    pins: Annotated[float | None, Key(v.PINS, "Unset: [colibri] pins.")] = None
