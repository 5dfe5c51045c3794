"""What a worker is told, from the settings, and when they no longer say what it was told."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from mlxpool.parent.pool.specs import make_cache_launch, serves_differently
from mlxpool.parent.pool.state import ModelSpec
from mlxpool.shared.config import Cache, ModelSettings, Settings
from mlxpool.shared.control import CacheLaunch


def launch(**cache: object) -> CacheLaunch:
    return make_cache_launch(Settings(home=Path("/home/me"), cache=Cache(**cache)), 100)  # type: ignore[arg-type]


def test_a_worker_is_told_its_share_and_where_the_disk_is() -> None:
    assert launch(ssd_budget=5, idle_demote=60.0, verify=False, spill_queue=7) == CacheLaunch(
        ram_bytes=100,
        folder="/home/me/kv",
        ssd_budget_bytes=5,
        idle_demote_s=60.0,
        verify=False,
        spill_queue_bytes=7,
    )


def test_never_is_never_and_nothing_on_disk_is_no_folder() -> None:
    assert launch(idle_demote=math.inf).idle_demote_s is None
    assert (launch(ssd=False).folder, launch(ssd_budget=0).folder) == (None, None)
    assert launch(ssd=False).ssd_budget_bytes == 0


CHANGES = {
    "path": "/elsewhere", "context": 512, "batch": 2, "prefill_chunk": 64, "max_tokens": 9,
    "temperature": 0.1, "top_p": 0.2, "top_k": 3, "thinking": False, "tool_parser": "hermes",
    "reasoning_parser": "think", "adapters": "mine", "pin": True, "idle_ttl": 1.0,
    "experts": "stream", "slots": 3, "io": "direct", "prefetch": False, "overlap": False, "mtp": "on",
    "reserve": 7, "queue_depth": 2, "in_flight": 9, "write": "assign", "pins": 0.2,
    "draft_confidence": 0.7,
}  # fmt: skip


@pytest.mark.parametrize("key", ModelSettings.__struct_fields__)
def test_a_live_worker_leaves_for_a_change_of_what_it_was_told_and_for_no_other(key: str) -> None:
    was = ModelSettings()
    now = msgspec.structs.replace(was, **{key: CHANGES[key]})
    assert serves_differently(was, now, 7, ModelSpec("m", 7)) == (key not in ("pin", "idle_ttl"))
    assert not serves_differently(was, was, 7, ModelSpec("m", 7))
    assert serves_differently(was, was, 7, ModelSpec("m", 8))  # its files take other memory now
