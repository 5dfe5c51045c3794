"""The ledger of routed choices: what it learns, that it comes back, and that nothing in its file can stop a
model."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mlxpool.worker.colibri import ledger as module
from mlxpool.worker.colibri.ledger import HALF_LIFE_TOKENS, SAVE_EVERY_S, Ledger

EXPERTS = {1: 8, 2: 8}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(folder: Path, fingerprint: str = "a", clock: Clock | None = None) -> Ledger:
    return Ledger.open(str(folder), fingerprint, EXPERTS, clock or Clock())


def test_each_choice_counts_and_the_most_chosen_come_first(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.add(1, np.array([[3, 5], [3, 7], [5, 3]], dtype=np.uint32))
    assert ledger.counts(1).tolist() == [0, 0, 0, 3, 0, 2, 0, 1]
    assert ledger.hottest(1, 2) == [3, 5]
    assert ledger.hottest(1, 8) == [3, 5, 7], "what was never chosen is no favourite"
    assert ledger.hottest(2, 8) == []


def test_what_was_learned_comes_back_with_the_same_model_alone(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.add(2, np.array([[1, 1]]))
    ledger.save()
    assert opened(tmp_path).hottest(2, 1) == [1]
    assert opened(tmp_path, "b").hottest(2, 1) == []
    assert Ledger.open(str(tmp_path), "a", {1: 8, 2: 9}).hottest(2, 1) == []


def test_old_choices_count_less(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.add(1, np.zeros((100, 2), dtype=np.int64))
    ledger.turn_ended()
    ledger.add(1, np.full((HALF_LIFE_TOKENS, 1), 4))
    ledger.turn_ended()
    counts = ledger.counts(1)
    assert counts[0] == pytest.approx(100, rel=0.01)
    assert ledger.hottest(1, 2) == [4, 0]


def test_it_is_written_now_and_then_and_when_asked(tmp_path: Path, clock: Clock) -> None:
    ledger = opened(tmp_path, clock=clock)
    ledger.add(1, np.array([[1]]))
    ledger.turn_ended()
    assert list(tmp_path.iterdir()) == []
    clock.now_s = SAVE_EVERY_S
    ledger.turn_ended()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    written = (tmp_path / "a.json").stat().st_mtime_ns
    ledger.save()
    assert (tmp_path / "a.json").stat().st_mtime_ns == written, "nothing is new"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format":1,"fingerprint":"a","layers":{"1":[1,2]}}',
        b'{"format":2,"fingerprint":"a","layers":{"1":[0,0,0,0,0,0,0,0],"2":[0,0,0,0,0,0,0,0]}}',
        b'{"format":1,"fingerprint":"z","layers":{"1":[0,0,0,0,0,0,0,0],"2":[0,0,0,0,0,0,0,0]}}',
        b'{"format":1,"fingerprint":"a","layers":{"1":[-1,0,0,0,0,0,0,0],"2":[0,0,0,0,0,0,0,0]}}',
        b'{"format":1,"fingerprint":"a","layers":{"1":[1e999,0,0,0,0,0,0,0],"2":[0,0,0,0,0,0,0,0]}}',
    ],
)
def test_a_damaged_file_is_learned_anew(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "a.json").write_bytes(body)
    ledger = opened(tmp_path)
    assert ledger.counts(1).tolist() == [0] * 8
    ledger.add(1, np.array([[2]]))
    ledger.save()
    assert opened(tmp_path).hottest(1, 1) == [2]


def test_a_place_that_takes_no_file_costs_the_file_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    ledger = opened(tmp_path / "file" / "below")
    ledger.add(1, np.array([[2]]))
    ledger.save()
    ledger.save()
    assert ledger.hottest(1, 1) == [2]
    assert capfd.readouterr().err.count("can't be written") == 1


def test_without_a_folder_it_is_kept_in_memory() -> None:
    ledger = Ledger.open(None, "a", EXPERTS)
    ledger.add(1, np.array([[2]]))
    ledger.save()
    assert ledger.hottest(1, 1) == [2]


def test_files_of_other_models_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_FILES", 2)
    for place, name in enumerate("xyz"):
        (tmp_path / f"{name}.json").write_text("{}")
        os.utime(tmp_path / f"{name}.json", (place, place))
    ledger = opened(tmp_path)
    ledger.add(1, np.array([[2]]))
    ledger.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "z.json"]


def test_a_file_that_another_process_clears_away_meanwhile_is_none_of_its_business(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # As one that goes between the list of names and the look at it.
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    ledger = opened(tmp_path)
    ledger.add(1, np.array([[2]]))
    ledger.save()
    assert capfd.readouterr().err == ""
    assert opened(tmp_path).hottest(1, 1) == [2]


def test_a_large_model_fits_into_a_small_file(tmp_path: Path) -> None:
    ledger = Ledger.open(str(tmp_path), "a", dict.fromkeys(range(75), 256))
    draw = np.random.default_rng(1)
    for layer in range(75):
        ledger.add(layer, draw.integers(0, 256, (500, 8)))
    ledger.save()
    size_bytes = (tmp_path / "a.json").stat().st_size
    assert size_bytes < 400_000
    assert len(msgspec.json.decode((tmp_path / "a.json").read_bytes())["layers"]) == 75
