"""The tier on disk while its folder changes: what it says of a file is what the folder says at last, whoever
comes in between, and the engine's thread waits for no lock on the disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.worker.cache.ssd import SsdTier
from tests.unit.kv_world import (
    PATIENCE_S,
    Restore,
    chain,
    files,
    open_tier,
    tokens,
    waiting,
    write,
    written,
)


def when_listed(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """Has this happen when the folder has just been listed."""
    real = os.listdir

    def listdir(path: Any) -> list[str]:
        names = real(path)
        meanwhile()
        return names

    monkeypatch.setattr("mlxpool.worker.cache.ssd.os.listdir", listdir)


def test_what_is_written_during_a_recheck_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = written(tmp_path, tokens(256))
    new = waiting(*chain(tokens(256, 5000))[0])
    with monkeypatch.context() as patched:
        when_listed(patched, lambda: write(tier, [new]))
        tier.recheck()
    assert tier.has(new.piece)
    assert tier.entries == len(files(tmp_path)) == 2


def test_what_was_deleted_by_others_and_is_written_again_during_a_recheck_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, (item,) = written(tmp_path, tokens(256))
    tier.path(item.piece).unlink()

    def found_missing_and_written() -> None:
        assert Restore(tier, [item.piece]).reading.bad == {item.piece}
        write(tier, [item])

    with monkeypatch.context() as patched:
        when_listed(patched, found_missing_and_written)
        tier.recheck()
    assert tier.has(item.piece)
    assert Restore(tier, [item.piece]).holds(item)


def test_a_folder_that_others_deleted_is_forgotten_one_that_can_t_be_listed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, items = written(tmp_path, tokens(600))

    def refuse(path: Any) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patched:
        patched.setattr("mlxpool.worker.cache.ssd.os.listdir", refuse)
        tier.recheck()
    assert tier.longest_prefix_tokens == 600
    tier.folder.rename(tmp_path / "elsewhere")
    tier.recheck()
    assert (tier.entries, tier.bytes, tier.longest_prefix_tokens) == (0, 0, 0)
    assert [tier.has(item.piece) for item in items] == [False] * 3


class Ledger:
    """The budget's lock, held by somebody else until it is let go: deleting waits before or after it did."""

    def __init__(self, tier: SsdTier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.after = False
        self.calls: list[str] = []
        self.entered, self._gate, self._done = threading.Event(), threading.Event(), threading.Event()
        self._remove, self._forget = tier.budget.remove, tier._forget_if_gone
        monkeypatch.setattr(tier.budget, "remove", self.remove)
        monkeypatch.setattr(tier, "_forget_if_gone", self.forget)

    def remove(self, path: str | Path) -> bool:
        self.calls.append(Path(path).name)
        there = self._remove(path) if self.after else False
        self.entered.set()
        assert self._gate.wait(PATIENCE_S)
        return there if self.after else self._remove(path)

    def forget(self, piece: Any) -> None:
        self._forget(piece)
        self._done.set()

    def let_go(self) -> None:
        """Until the file is gone and that is known."""
        self._gate.set()
        assert self._done.wait(PATIENCE_S)

    def open(self) -> None:
        self._gate.set()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    made, _ = written(tmp_path, tokens(256))
    yield made
    made.close()


@pytest.fixture
def ledger(tier: SsdTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    made = Ledger(tier, monkeypatch)
    yield made
    made.open()


def test_who_deletes_does_not_wait_for_the_ledger(tier: SsdTier, ledger: Ledger) -> None:
    (item,) = (waiting(*part) for part in chain(tokens(256)))
    tier.delete(item.piece)
    assert not tier.has(item.piece)
    assert (tier.entries, tier.bytes) == (0, 0)
    assert tier.path(item.piece).exists()
    ledger.let_go()
    assert not tier.path(item.piece).exists()


def test_who_asks_a_bad_file_for_its_tokens_does_not_wait_for_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (item,) = written(tmp_path, tokens(256))
    tier = open_tier(tmp_path)
    os.truncate(tier.path(item.piece), 100)
    ledger = Ledger(tier, monkeypatch)
    assert tier.ids(item.piece.record) is None
    assert not tier.has(item.piece)
    ledger.let_go()
    assert not tier.path(item.piece).exists()
    assert tier.rejected == 1


def test_deleting_what_is_not_on_disk_does_nothing(tier: SsdTier, ledger: Ledger) -> None:
    record, own = chain(tokens(256))[0]
    tier.close()  # what would be done in the background is then done at once
    tier.delete(waiting(record, own, "state").piece)
    assert ledger.calls == []
    assert tier.entries == 1


def test_deleting_many_keeps_no_restore_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, items = written(tmp_path, tokens(256 * 10))
    ledger = Ledger(tier, monkeypatch)
    for item in items[1:]:
        tier.delete(item.piece)
    assert ledger.entered.wait(PATIENCE_S)
    assert Restore(tier, [items[0].piece]).holds(items[0])
    ledger.open()


@pytest.mark.parametrize("after", [False, True])
def test_a_piece_written_again_before_or_after_its_file_goes_is_known_if_it_is_there(
    tier: SsdTier, ledger: Ledger, after: bool
) -> None:
    (item,) = (waiting(*part) for part in chain(tokens(256)))
    ledger.after = after
    tier.delete(item.piece)
    assert ledger.entered.wait(PATIENCE_S)
    write(tier, [item])
    ledger.let_go()
    assert tier.path(item.piece).exists() == after
    assert tier.has(item.piece) == after


def test_a_file_deleted_before_its_writer_says_that_it_is_there_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    item = waiting(*chain(tokens(256))[0])
    publish = tier.budget.publish

    def and_gone(*args: Any, **more: Any) -> Any:
        named = publish(*args, **more)
        tier.path(item.piece).unlink(missing_ok=True)
        return named

    monkeypatch.setattr(tier.budget, "publish", and_gone)
    write(tier, [item])
    assert (tier.has(item.piece), tier.entries) == (False, 0)
