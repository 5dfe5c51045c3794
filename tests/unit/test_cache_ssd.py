"""The tier on disk: what was written comes back; what is wrong with a file is a miss, and the file goes."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpool.shared.kv.names import file_name
from mlxpool.worker.cache import records
from mlxpool.worker.cache.records import Piece
from mlxpool.worker.cache.ssd import SsdTier
from mlxpool.worker.cache.ssd_reading import file_of
from tests.unit.kv_world import (
    MARK,
    OTHER_MARK,
    PATIENCE_S,
    ROOT_NAME,
    Restore,
    chain,
    empty,
    files,
    open_tier,
    tokens,
    waiting,
    write,
    written,
)


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


def test_slices_and_states_of_many_megabytes_come_back(tmp_path: Path) -> None:
    record, own = chain(tokens(256))[0]
    items = [waiting(record, own, "slice", 3_000_000), waiting(record, own, "state", 5_000_000)]
    tier = open_tier(tmp_path)
    write(tier, items)
    restore = Restore(tier, [item.piece for item in items])
    assert all(restore.holds(item) for item in items)
    assert restore.reading.progress > 4, "data too move the counter"


def regions(size: int, data_start: int) -> list[int]:
    """Places all over a file: length, hash, table, ids, padding, each tensor's ends and middle."""
    values = size - 30
    return [
        *range(0, data_start, 37),
        data_start - 1,
        data_start,
        (data_start + values) // 2,
        values - 1,
        values,
        size - 1,
    ]


def test_a_flipped_bit_anywhere_costs_that_file_alone(tmp_path: Path) -> None:
    tier, items = written(tmp_path, tokens(600))
    path = tier.path(items[1].piece)
    whole = path.read_bytes()
    start = len(whole) - items[1].nbytes
    for count, place in enumerate(regions(len(whole), start), 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        tier.open()
        restore = Restore(tier, [item.piece for item in items])
        assert restore.reading.bad == {items[1].piece}, place
        assert restore.holds(items[0])
        assert restore.holds(items[2])
        assert not path.exists()
        assert not tier.has(items[1].piece)
        assert tier.rejected == count
    assert tier.longest_prefix_tokens == 256


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 35, 67, 500, -2500, -2430, -31, -30, -1])
@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_file_is_a_miss(tmp_path: Path, length: int, verify: bool) -> None:
    tier, items = written(tmp_path, tokens(300))
    path = tier.path(items[0].piece)
    size = path.stat().st_size
    os.truncate(path, length if length >= 0 else size + length)
    tier = open_tier(tmp_path, verify=verify)
    restore = Restore(tier, [item.piece for item in items])
    assert restore.reading.bad == {items[0].piece}
    assert restore.holds(items[1])
    assert not path.exists()


def test_without_verify_flipped_data_are_not_looked_for(tmp_path: Path) -> None:
    tier, items = written(tmp_path, tokens(10))
    path = tier.path(items[0].piece)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    assert Restore(open_tier(tmp_path, verify=False), [items[0].piece]).reading.bad == set()
    assert Restore(open_tier(tmp_path), [items[0].piece]).reading.bad == {items[0].piece}


def test_another_models_record_in_our_folder_is_a_miss(tmp_path: Path) -> None:
    other = open_tier(tmp_path, mark=OTHER_MARK)
    (record, own), *_ = chain(tokens(10))
    item = waiting(record, own)
    write(other, [item])
    (tmp_path / MARK.hash).mkdir()
    shutil.copy(other.path(item.piece), tmp_path / MARK.hash)
    tier = open_tier(tmp_path)
    assert tier.has(item.piece)
    assert Restore(tier, [item.piece]).reading.bad == {item.piece}
    assert files(tmp_path / MARK.hash) == []
    assert Restore(other, [item.piece]).holds(item)


def test_a_record_under_anothers_name_is_a_miss(tmp_path: Path) -> None:
    tier, items = written(tmp_path, tokens(512))
    os.replace(tier.path(items[0].piece), tier.path(items[1].piece))
    shutil.copy(tier.path(items[1].piece), tier.path(items[0].piece))
    restore = Restore(tier, [item.piece for item in items])
    assert restore.reading.bad == {items[1].piece}
    assert restore.holds(items[0])


def test_a_record_whose_tokens_are_not_its_names_is_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    (record, own), *_ = chain(tokens(10))
    item = waiting(record, own + 1)
    write(tier, [item])
    assert Restore(tier, [item.piece]).reading.bad == {item.piece}


@pytest.mark.parametrize("way", ["deleted", "replaced", "shortened", "flipped"])
def test_a_file_that_changes_between_head_and_data_is_a_miss(tmp_path: Path, way: str) -> None:
    tier, items = written(tmp_path, tokens(600))
    path = tier.path(items[1].piece)

    def change() -> None:
        data = path.read_bytes()
        if way == "shortened":
            os.truncate(path, len(data) - 1)
        elif way == "flipped":
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(bytes([data[-1] ^ 1]))
        else:
            keep = path.open("rb")  # so that the new file can't get the old one's number
            path.unlink()
            if way == "replaced":
                path.write_bytes(data)
            keep.close()

    restore = Restore(tier, [item.piece for item in items], between=change)
    assert restore.reading.bad == {items[1].piece}
    assert restore.holds(items[0])
    assert restore.holds(items[2])
    assert not path.exists()
    assert not tier.has(items[1].piece)


def test_files_that_another_process_evicted_are_a_miss(tmp_path: Path) -> None:
    tier, items = written(tmp_path, tokens(600))
    for item in items:
        tier.path(item.piece).unlink()
    restore = Restore(tier, [item.piece for item in items])
    assert restore.reading.bad == {item.piece for item in items}
    assert (tier.entries, tier.bytes, tier.rejected, tier.restores) == (0, 0, 0, 0)


def test_what_others_deleted_is_forgotten_when_durability_is_asked_for(tmp_path: Path) -> None:
    tier, items = written(tmp_path, tokens(600))
    tier.path(items[2].piece).unlink()
    assert tier.longest_prefix_tokens == 600
    tier.recheck()
    assert [tier.has(item.piece) for item in items] == [True, True, False]
    assert tier.longest_prefix_tokens == 512


def test_links_and_folders_in_the_place_of_files_are_a_miss(tmp_path: Path) -> None:
    tier, items = written(tmp_path, tokens(512))
    linked, folder = (tier.path(item.piece) for item in items)
    target = tmp_path / "precious"
    os.replace(linked, target)
    linked.symlink_to(target)
    folder.unlink()
    folder.mkdir()
    restore = Restore(tier, [item.piece for item in items])
    assert restore.reading.bad == {item.piece for item in items}
    assert target.exists()
    tier.open()
    assert tier.entries == 0


def test_too_many_open_files_are_no_fault_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, items = written(tmp_path, tokens(300))

    def refuse(*args: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("mlxpool.worker.cache.ssd_reading.open_record", refuse)
        restore = Restore(tier, [item.piece for item in items])
    assert restore.reading.bad == {item.piece for item in items}
    assert not tier.has(items[0].piece), "or the same look-up would find it again at once"
    tier.open()
    assert Restore(tier, [item.piece for item in items]).holds(items[1])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_can_t_be_read_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    tier, items = written(tmp_path, tokens(10))

    def refuse(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr("mlxpool.shared.kv.record_file.os.pread", refuse)
        assert Restore(tier, [items[0].piece]).reading.bad == {items[0].piece}
    assert files(tmp_path) == []


def test_a_folder_that_can_t_be_listed_is_empty_and_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, tokens(300))

    def refuse(path: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patched:
        patched.setattr("mlxpool.shared.kv.listing.os.scandir", refuse)
        tier = open_tier(tmp_path)
    assert tier.off is not None
    assert "Permission denied" in tier.off
    assert "\n" not in tier.off
    assert (tier.entries, tier.longest_prefix_tokens, list(tier.children(ROOT_NAME))) == (0, 0, [])
    tier.open()
    assert (tier.off, tier.entries) == (None, 2)


def test_a_file_in_the_place_of_the_folder_is_empty_and_off(tmp_path: Path) -> None:
    (tmp_path / MARK.hash).write_text("in the way")
    assert "not a directory" in (open_tier(tmp_path).off or "").lower()
    root = tmp_path / "file"
    root.write_text("in the way")
    assert open_tier(root).off is not None
    assert open_tier(tmp_path / "not" / "yet").off is None


@pytest.mark.parametrize("phase", ["heads", "allocate", "data"])
def test_a_cancelled_reading_ends_and_says_so(tmp_path: Path, phase: str) -> None:
    tier, items = written(tmp_path, tokens(2000))
    woken = threading.Semaphore(0)
    reading = tier.begin([item.piece for item in items], woken.release)
    if phase != "heads":
        assert woken.acquire(timeout=PATIENCE_S)
        if phase == "data":
            reading.fill((piece, empty(head)) for piece, head in reading.heads.items())
    reading.cancel()
    reading.cancel()
    deadline = time.monotonic() + PATIENCE_S
    while reading.phase != "done" and time.monotonic() < deadline:
        woken.acquire(timeout=0.1)
    assert reading.phase == "done"
    assert reading.bad == set()
    assert tier.entries == len(items)
    assert Restore(tier, [item.piece for item in items]).holds(items[-1])


def test_arrays_that_do_not_fit_cost_their_piece_and_no_file(tmp_path: Path) -> None:
    tier, items = written(tmp_path, tokens(900))
    woken = threading.Semaphore(0)
    reading = tier.begin([item.piece for item in items], woken.release)
    assert woken.acquire(timeout=PATIENCE_S)
    arrays = {piece: empty(head) for piece, head in reading.heads.items()}
    arrays[items[0].piece]["0.keys"] = np.empty((2, 299), np.float32)
    arrays[items[1].piece]["0.keys"].flags.writeable = False
    arrays[items[2].piece]["0.keys"] = np.empty((300, 2), np.float32).T
    reading.fill(arrays.items())
    assert woken.acquire(timeout=PATIENCE_S)
    assert reading.phase == "done"
    assert reading.bad == {item.piece for item in items[:3]}
    assert len(files(tmp_path)) == 4


def test_pieces_that_are_not_asked_for_after_all_are_not_read(tmp_path: Path) -> None:
    tier, items = written(tmp_path, tokens(512))
    woken = threading.Semaphore(0)
    reading = tier.begin([item.piece for item in items], woken.release)
    assert woken.acquire(timeout=PATIENCE_S)
    reading.fill([(items[0].piece, empty(reading.heads[items[0].piece]))])
    assert woken.acquire(timeout=PATIENCE_S)
    assert (reading.phase, reading.bad, reading.bytes) == ("done", set(), items[0].nbytes)


def test_a_reading_outlives_the_tier_and_whoever_is_woken(tmp_path: Path) -> None:
    tier, items = written(tmp_path, tokens(10))
    tier.close()
    calls = []

    def wake() -> None:
        calls.append(1)
        raise RuntimeError("the engine is gone")

    reading = tier.begin([items[0].piece], wake)
    assert reading.phase == "allocate"
    reading.fill([(items[0].piece, empty(reading.heads[items[0].piece]))])
    assert (reading.phase, len(calls)) == ("done", 2)


def test_nothing_to_read_is_done_at_once(tmp_path: Path) -> None:
    assert Restore(open_tier(tmp_path), []).reading.bad == set()


def siblings(tier: SsdTier, lengths: list[int], firsts: list[int]) -> list[Piece]:
    """Short records behind the root, written in this order."""
    items = [waiting(*chain(tokens(length, first))[0]) for length, first in zip(lengths, firsts, strict=True)]
    write(tier, items)
    return [item.piece for item in items]


def test_children_come_most_recently_used_first_also_after_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    pieces = siblings(tier, [10, 20, 30], [0, 1000, 2000])
    assert [child.end for child in tier.children(ROOT_NAME)] == [30, 20, 10]
    tier.touch([pieces[0].record])
    assert [child.end for child in tier.children(ROOT_NAME)] == [10, 30, 20]
    for age, piece in enumerate([pieces[1], pieces[2], pieces[0]]):
        os.utime(tier.path(piece), (1000 - age, 1000 - age))
    tier.open()
    assert [child.end for child in tier.children(ROOT_NAME)] == [20, 30, 10]


def test_tokens_are_read_from_the_files_of_a_few_children_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings(open_tier(tmp_path), [10] * 12, [1000 * place for place in range(12)])
    tier = open_tier(tmp_path)
    opened = []
    real = os.open

    def counting(path: Any, *more: Any) -> int:
        opened.append(path)
        return real(path, *more)

    monkeypatch.setattr("mlxpool.worker.cache.ssd.open_record", lambda path: counting(path, os.O_RDONLY))
    for _ in range(3):
        known = [tier.ids(record) for record in tier.children(ROOT_NAME)]
    assert [ids is not None for ids in known] == [True] * 8 + [False] * 4
    assert len(opened) == 8
    assert known[0] is not None
    assert known[0].tolist() == list(range(11000, 11010))


def test_a_bad_file_that_is_asked_for_its_tokens_goes(tmp_path: Path) -> None:
    _, items = written(tmp_path, tokens(10))
    tier = open_tier(tmp_path)
    path = tier.path(items[0].piece)
    path.write_bytes(path.read_bytes()[:100])
    tier.close()  # what would be done in the background is then done at once
    assert tier.ids(items[0].piece.record) is None
    assert not path.exists()
    assert tier.entries == 0


def test_a_short_end_goes_when_a_longer_record_covers_it(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    ids = tokens(300)
    first, tail = (waiting(*part) for part in chain(ids[:260]))
    write(tier, [first, tail])
    grown = waiting(*chain(ids)[1])
    write(tier, [grown])
    assert not tier.has(tail.piece)
    assert files(tmp_path) == sorted(file_name(file_of(item.piece)) for item in (first, grown))


def test_a_short_end_stays_that_says_something_else_and_so_does_a_state(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    ids = tokens(300)
    other = np.concatenate([ids[:256], tokens(4, 9000)])
    stateful = ids[:270]
    short = waiting(*chain(stateful)[1])
    kept = [waiting(*chain(ids)[0]), waiting(*chain(other)[1]), waiting(*chain(stateful)[1], kind="state")]
    write(tier, [short, *kept, waiting(*chain(ids)[1])])
    assert all(tier.has(item.piece) for item in kept)
    assert not tier.has(short.piece)
    assert tier.entries == 4


def test_using_a_prefix_makes_its_files_young_and_none_older_than_what_needs_it(tmp_path: Path) -> None:
    now = [0.0]
    _, items = written(tmp_path, tokens(700))
    tier = open_tier(tmp_path, clock=lambda: now[0])
    for item in items:
        os.utime(tier.path(item.piece), (1000, 1000))
    path = [item.piece.record for item in items]
    tier.close()  # what would be done in the background is then done at once

    def ages() -> list[bool]:
        """Which files are young; then all are made old again."""
        young = [tier.path(item.piece).stat().st_mtime > 2000 for item in items]
        for item in items:
            os.utime(tier.path(item.piece), (1000, 1000))
        return young

    tier.touch(path[:1])
    assert ages() == [True, False, False]
    now[0] = 30.0
    tier.touch(path[:2])
    assert ages() == [True, True, False], "what the second needs is as young"
    tier.touch(path[:2])
    assert ages() == [False, False, False], "not every minute anew"
    now[0] = 91.0
    tier.touch(path)
    assert ages() == [True, True, True]


def test_a_whole_prefix_is_one_without_a_gap(tmp_path: Path) -> None:
    tier, items = written(tmp_path, tokens(900))
    tier.delete(items[1].piece)
    assert tier.longest_prefix_tokens == 256
    # Its file goes in the background; one that were written before would go with it.
    tier._tidying.submit(lambda: None).result()
    write(tier, [items[1]])
    assert tier.longest_prefix_tokens == 900


def test_states_alone_say_how_long_a_prefix_is(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, [waiting(*chain(tokens(700))[place], kind="state") for place in (0, 2)])
    assert tier.longest_prefix_tokens == 700


def test_the_tier_answers_what_a_look_up_asks(tmp_path: Path) -> None:
    ids = tokens(600)
    written(tmp_path, ids)
    tier = open_tier(tmp_path)
    layout = records.Layout((records.Leaf("KVCache", True),))
    found = records.find(ids, 599, ROOT_NAME, layout, tier)
    assert found is not None
    assert found.length == 599
    changed = ids.copy()
    changed[570] = 9
    found = records.find(changed, 599, ROOT_NAME, layout, tier)
    assert found is not None
    assert found.length == 570


def timed(work: Callable[[], object]) -> float:
    """Of the processor: whatever else the machine does."""
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def test_ten_thousand_files_are_listed_without_opening_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / MARK.hash
    folder.mkdir()
    parent = ROOT_NAME
    for place in range(10_000):
        record = records.Record(place.to_bytes(16, "big"), parent, place * 256, place * 256 + 256)
        parent = record.name
        os.close(os.open(folder / file_name(file_of(Piece(record, "slice"))), os.O_CREAT | os.O_WRONLY))

    def refuse(*args: Any, **more: Any) -> int:
        raise AssertionError("opened")

    tier = open_tier(tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    assert min(timed(tier.open) for _ in range(3)) < 0.3
    assert (tier.entries, tier.longest_prefix_tokens) == (10_000, 2_560_000)
