"""What `mlxpool colibri bench` and `tune` hand to their processes, as of shared/job_tasks.py."""

from __future__ import annotations

import msgspec

from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.measured import Name


class ColibriBenchTask(msgspec.Struct, frozen=True, kw_only=True):
    """launch: as the worker would be told. limit_bytes: what MLX may allocate. tokens, prompt_tokens: to
    decode, and of the prompt before."""

    folder: str
    launch: StreamLaunch
    limit_bytes: int
    tokens: int
    prompt_tokens: int


class StreamVariant(msgspec.Struct, frozen=True):
    """What a plan with at most so many slots comes to, with the draft layer or without."""

    slots: int
    mtp: bool
    launch: StreamLaunch


class ColibriTuneTask(msgspec.Struct, frozen=True, kw_only=True):
    """variants: the first is where the search begins. names: what may be changed; of slots and mtp to what
    there is a variant for. limit_bytes: what MLX may allocate, whichever variant it is. seconds: of one
    decoding."""

    folder: str
    variants: tuple[StreamVariant, ...]
    names: tuple[Name, ...]
    limit_bytes: int
    seconds: float
