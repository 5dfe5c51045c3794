"""From the library's view of a model to what the scheduler and a worker need to know of it."""

from __future__ import annotations

import math
from pathlib import Path

from mlxpool.parent.library import Description, LibraryModel
from mlxpool.shared.config import ModelSettings, Settings
from mlxpool.shared.control import AdaptersLaunch, CacheLaunch, Launch

from .state import ModelSpec

# The parent's own affair: no worker is told of these.
_NOT_TOLD = ("pin", "idle_ttl")


def make_spec(model: LibraryModel, described: Description, queue_limit: int) -> ModelSpec:
    """The spec of a model as its files and settings are now."""
    own, plan = model.settings, described.plan
    ttl = own.idle_ttl
    return ModelSpec(
        model.name,
        planned_bytes=plan.planned_bytes if plan is not None else 0,
        overhead_bytes=plan.overhead_bytes if plan is not None else 0,
        max_running=own.rows(streamed=described.stream is not None),
        queue_limit=queue_limit,
        idle_ttl_s=ttl if ttl is not None and math.isfinite(ttl) and ttl >= 0 else None,
        stamp=described.stamp,
        fault=described.fault,
        too_large=(
            f"model {model.name!r} {plan.explanation}"
            if plan is not None and plan.verdict == "does_not_fit"
            else None
        ),
    )


def serves_differently(was: ModelSettings, now: ModelSettings, reserved: int, fresh: ModelSpec) -> bool:
    """Whether a live worker was told something that the settings no longer say. reserved: bytes, its plan."""
    told = (key for key in ModelSettings.__struct_fields__ if key not in _NOT_TOLD)
    return reserved != fresh.planned_bytes or any(getattr(was, key) != getattr(now, key) for key in told)


def make_cache_launch(settings: Settings, ram_bytes: int) -> CacheLaunch:
    """How a worker with this share of memory keeps prompts."""
    cache = settings.cache
    on_disk = cache.is_on_disk
    return CacheLaunch(
        ram_bytes=ram_bytes,
        folder=str(settings.kv_folder) if on_disk else None,
        ssd_budget_bytes=cache.ssd_budget if on_disk else 0,
        idle_demote_s=cache.idle_demote if math.isfinite(cache.idle_demote) else None,
        verify=cache.verify,
        spill_queue_bytes=cache.spill_queue,
    )


def make_launch(
    model: LibraryModel,
    described: Description,
    socket: str,
    trace_path: str | None,
    cache: CacheLaunch,
    adapters: Path,
) -> Launch:
    """What the worker is told. adapters: the home's. Only for a model that has a plan."""
    own, plan = model.settings, described.plan
    assert plan is not None
    stream = described.stream
    return Launch(
        model=model.name,
        path=str(model.path),
        socket=socket,
        context=plan.context,
        batch=own.rows(streamed=stream is not None),
        kv_pool_bytes=plan.kv_pool_bytes,
        memory_limit_bytes=plan.planned_bytes - plan.grammar_bytes if stream is None else stream.arrays_bytes,
        prefill_chunk=own.prefill_chunk,
        max_tokens=own.max_tokens,
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        thinking=own.thinking,
        tool_parser=own.tool_parser,
        reasoning_parser=own.reasoning_parser,
        trace_path=trace_path,
        cache=cache,
        adapters=AdaptersLaunch(str(adapters), own.adapters),
        stream=described.launch,
    )
