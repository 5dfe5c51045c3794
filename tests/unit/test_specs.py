"""What a worker is told of the prompt cache, from the settings."""

from __future__ import annotations

import math
from pathlib import Path

from mlxpool.parent.pool.specs import make_cache_launch
from mlxpool.shared.config import Cache, Settings
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
