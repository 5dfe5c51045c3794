"""The folder as a whole: right at the start, shown and pruned, and never more touched than is ours."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from mlxpool.shared.kv import folder as kv_folder
from mlxpool.shared.kv.budget import Budget
from mlxpool.shared.kv.names import BLOCK_BYTES, temp_name
from mlxpool.shared.kv.record_file import RecordError, verify
from mlxpool.worker.cache.ssd import SsdTier
from tests.unit.kv_world import (
    MARK,
    OTHER_MARK,
    PLENTY,
    chain,
    files,
    on_disk,
    open_tier,
    tokens,
    waiting,
    write,
    written,
)

BIG = "b" * 32


def aged(root: Path, mark: str, used_s: float) -> None:
    for path in (root / mark).glob("*.safetensors"):
        os.utime(path, (used_s, used_s))


def two_models(root: Path) -> None:
    """Three records of one model, used last at 2000, one of another, used last at 1000."""
    written(root, tokens(600))
    aged(root, MARK.hash, 2000)
    write(open_tier(root, mark=OTHER_MARK), [waiting(*chain(tokens(10))[0])])
    about = root / OTHER_MARK.hash / "about.json"
    about.write_bytes(about.read_bytes().replace(b"a model", b"another"))
    aged(root, OTHER_MARK.hash, 1000)


def test_a_folder_says_whose_it_is_and_what_it_stands_for(tmp_path: Path) -> None:
    written(tmp_path, tokens(10))
    about = msgspec.json.decode((tmp_path / MARK.hash / "about.json").read_bytes())
    assert about == {"model": "a model", "fingerprint": MARK.hash, "ingredients": MARK.about}


def test_a_scan_tells_each_models_part_last_used_first(tmp_path: Path) -> None:
    two_models(tmp_path)
    mine, other = kv_folder.scan(tmp_path)
    assert (mine.model, mine.fingerprint, mine.entries, mine.last_used_s) == ("a model", MARK.hash, 3, 2000)
    assert mine.bytes == sum(
        path.stat().st_blocks * 512 for path in (tmp_path / MARK.hash).glob("*.safetensors")
    )
    assert (other.model, other.entries) == ("another", 1)


BROKEN = [b"", b"\xff", b"[1]", b'{"model": 3}', b"x" * 10_000, "pipe", "link"]


def break_description(root: Path, about: bytes | str) -> None:
    path = root / MARK.hash / "about.json"
    path.unlink()
    if about == "pipe":
        os.mkfifo(path)
    elif isinstance(about, str):
        path.symlink_to("nowhere")
    else:
        path.write_bytes(about)
    (root / "ledger").unlink()


@pytest.mark.parametrize("about", BROKEN)
def test_a_broken_description_costs_the_name_alone_until_it_is_mended(
    tmp_path: Path, about: bytes | str
) -> None:
    tier, _ = written(tmp_path, tokens(10))
    break_description(tmp_path, about)
    (use,) = kv_folder.scan(tmp_path)
    assert (use.model, use.entries) == ("", 1)
    write(tier, [waiting(*chain(tokens(10, 500))[0])])
    (use,) = kv_folder.scan(tmp_path)
    assert (use.model, use.entries) == ("a model", 2)
    assert tier.budget.used() == on_disk(tmp_path)


def test_a_model_that_was_renamed_says_so_from_its_load_on(tmp_path: Path) -> None:
    written(tmp_path, tokens(10))
    tier = SsdTier(tmp_path, MARK, "its new name", PLENTY, True)
    tier.open()
    tier._tidying.shutdown()
    assert [(use.model, use.entries) for use in kv_folder.scan(tmp_path)] == [("its new name", 1)]
    assert kv_folder.prune(tmp_path, model="a model").entries == 0
    assert tier.budget.used() == on_disk(tmp_path)


def test_a_load_of_a_model_that_has_nothing_on_disk_makes_no_folder(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier._tidying.shutdown()
    assert os.listdir(tmp_path) == []


def test_a_description_written_in_small_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(
        "mlxpool.shared.kv.folder.os.write", lambda descriptor, text: real(descriptor, text[:7])
    )
    kv_folder.describe(Budget(tmp_path, PLENTY), kv_folder.About("a model", MARK.hash, MARK.about))
    assert [use.model for use in kv_folder.scan(tmp_path)] == ["a model"]


def test_a_folder_in_the_place_of_a_description_stays(tmp_path: Path) -> None:
    somebodys = tmp_path / MARK.hash / "about.json" / "precious"
    somebodys.mkdir(parents=True)
    tier, (item,) = written(tmp_path, tokens(10))
    assert somebodys.exists()
    assert tier.has(item.piece)
    assert tier.budget.used() == on_disk(tmp_path)


def test_a_folder_that_is_not_there_is_empty_and_is_not_made(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    assert kv_folder.scan(root) == []
    assert kv_folder.clean(root, PLENTY) == kv_folder.Cleaned(0, 0, 0, 0, 0)
    assert kv_folder.prune(root) == kv_folder.Pruned(0, 0, 0, 0)
    assert list(kv_folder.paths(root)) == []
    assert not root.exists()


def test_a_clean_takes_away_what_is_no_use_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    _, items = written(tmp_path, tokens(300))
    mine = tmp_path / MARK.hash
    gone = [mine / temp_name(2**22 + 1, 4096, "aa"), mine / "old-spelling.safetensors"]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "x.safetensors").write_text("keep")
    kept = [mine / ".DS_Store", mine / "notes.txt", tmp_path / "README", precious / "x.safetensors"]
    for path in (*gone, *kept):
        path.write_text("x")
    (tmp_path / ("e" * 32)).symlink_to(precious)
    (mine / "link.safetensors").symlink_to(precious / "x.safetensors")
    cleaned = kv_folder.clean(tmp_path, PLENTY)
    assert (cleaned.unfinished, cleaned.foreign, cleaned.evicted, cleaned.entries) == (1, 1, 0, 2)
    assert cleaned.bytes == sum(
        (mine / path.name).stat().st_blocks * 512 for path in mine.glob("[0-9a-f]*.*.*")
    )
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)
    assert (tmp_path / ("e" * 32)).is_symlink()
    assert all(open_tier(tmp_path).has(item.piece) for item in items)


def test_a_clean_brings_the_folder_down_to_a_smaller_budget(tmp_path: Path) -> None:
    two_models(tmp_path)
    (tmp_path / "ledger").write_bytes(b"%020d" % 0)
    max_bytes = on_disk(tmp_path) - 3 * BLOCK_BYTES
    cleaned = kv_folder.clean(tmp_path, max_bytes)
    assert cleaned.evicted == 2
    assert on_disk(tmp_path) <= max_bytes
    assert Budget(tmp_path, max_bytes).used() == on_disk(tmp_path)
    assert not (tmp_path / OTHER_MARK.hash).exists(), (
        "its only record went first, and its description with it"
    )
    assert open_tier(tmp_path).longest_prefix_tokens == 512


def test_a_clean_leaves_the_file_of_a_living_writer(tmp_path: Path) -> None:
    budget = Budget(tmp_path, PLENTY)
    temp = budget.create(MARK.hash, 10_000).temp
    assert temp is not None
    cleaned = kv_folder.clean(tmp_path, PLENTY)
    assert cleaned.unfinished == 0
    assert os.path.exists(temp.path)
    assert budget.used() == 4 * BLOCK_BYTES
    budget.discard(temp)
    os.close(temp.descriptor)


def test_pruning_a_model_leaves_the_others(tmp_path: Path) -> None:
    two_models(tmp_path)
    pruned = kv_folder.prune(tmp_path, model="another")
    assert (pruned.entries, pruned.left_entries) == (1, 0)
    assert not (tmp_path / OTHER_MARK.hash).exists()
    assert open_tier(tmp_path).entries == 3
    assert Budget(tmp_path, PLENTY).used() == on_disk(tmp_path)


def test_pruning_to_a_size_takes_what_was_used_least_recently(tmp_path: Path) -> None:
    two_models(tmp_path)
    held = sum(use.bytes for use in kv_folder.scan(tmp_path))
    pruned = kv_folder.prune(tmp_path, to_bytes=held - 1)
    assert (pruned.entries, pruned.left_entries) == (1, 3)
    assert pruned.left_bytes == held - pruned.bytes
    assert [use.model for use in kv_folder.scan(tmp_path)] == ["a model"]
    assert kv_folder.prune(tmp_path, to_bytes=held).entries == 0


def test_pruning_everything_leaves_an_empty_folder(tmp_path: Path) -> None:
    two_models(tmp_path)
    assert kv_folder.prune(tmp_path).left_entries == 0
    assert os.listdir(tmp_path) == ["ledger"]
    assert Budget(tmp_path, PLENTY).used() == on_disk(tmp_path)


def test_every_record_can_be_verified_where_it_lies(tmp_path: Path) -> None:
    two_models(tmp_path)
    found = list(kv_folder.paths(tmp_path))
    assert len(found) == len(files(tmp_path)) == 4
    for fingerprint, path in found:
        verify(path, fingerprint)
    fingerprint, path = found[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(RecordError):
        verify(path, fingerprint)
