"""The tier on disk: what was written comes back; what is wrong with a file is a miss, and the file goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.kv_world import Restore, open_tier, tokens, written


@pytest.mark.parametrize("verify", [True, False])
def test_what_was_written_comes_back_after_a_restart(tmp_path: Path, verify: bool) -> None:
    _, items = written(tmp_path, tokens(600))
    tier = open_tier(tmp_path, verify=verify)
    assert [tier.has(item.piece) for item in items] == [True, True, True]
    assert tier.longest_prefix_tokens == 600
    restore = Restore(tier, [item.piece for item in items])
    assert all(restore.holds(item) for item in items)
    assert restore.reading.bad == set()
    assert restore.reading.bytes == sum(item.nbytes for item in items)
    assert (tier.restores, tier.rejected) == (1, 0)
