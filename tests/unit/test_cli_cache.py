"""`mlxpool cache` on a folder of real records, without a server."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.config import KV_FOLDER
from mlxpool.shared.kv import record_file
from mlxpool.shared.units import format_size
from tests.tools.kv_records import fingerprint, flip, held_bytes, write_record
from tests.tools.model_folders import write_model
from tests.unit.test_cli import Command

A, B = fingerprint("a"), fingerprint("b")


@pytest.fixture
def mlxpool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    (tmp_path / "home").mkdir()
    return Command(tmp_path / "home", monkeypatch, capfd)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two records of model a, the second used an hour ago, and one of org/b."""
    root = tmp_path / "home" / KV_FOLDER
    write_record(root, A, "a", 1)
    write_record(root, A, "a", 2, used_s=time.time() - 3600)
    write_record(root, B, "org/b", 3, data_bytes=6000, used_s=time.time() - 600)
    return root


def size(root: Path, letter: str = "*") -> str:
    """What is there now, of one folder or of all, for people."""
    return format_size(held_bytes(*root.glob(f"{letter}*/*.safetensors")))


def files(root: Path) -> list[str]:
    """The records that there are: folder's letter and number."""
    return sorted(f"{path.parent.name[0]}{int(path.name[:32], 16)}" for path in root.glob("*/*.safetensors"))


def test_status_shows_what_each_model_has(mlxpool: Command, root: Path) -> None:
    shown = mlxpool("cache", "status")
    first, head, *rows = shown.out.splitlines()
    assert first == f"disk    {size(root)} of 32.0 GB in {root}"
    assert head.split() == ["MODEL", "RECORDS", "BYTES", "USED", "FINGERPRINT"]
    latest, other = (row.split() for row in rows)
    assert float(latest.pop(4)) < 60
    assert latest == ["a", "2", *size(root, "a").split(), "s", "ago", "a" * 12]
    assert other == ["org/b", "1", *size(root, "b").split(), "10", "min", "ago", "b" * 12]
    told = json.loads(mlxpool("cache", "status", "--json").out)
    assert (told["running"], told["ram"], told["models"]) == (False, None, [])
    assert told["ssd"] == {
        "enabled": True,
        "dir": str(root),
        "bytes": held_bytes(*root.glob("*/*.safetensors")),
        "max_bytes": 32 * 10**9,
        "entries": 3,
        "off": None,
    }
    first_folder, second_folder = told["folders"]
    assert (first_folder["model"], first_folder["entries"]) == ("a", 2)
    used = second_folder.pop("last_used")
    assert used == pytest.approx(time.time() - 600, abs=60)
    assert second_folder == {
        "fingerprint": B,
        "model": "org/b",
        "entries": 1,
        "bytes": held_bytes(*(root / B).glob("*.safetensors")),
    }


def test_status_without_a_folder_or_a_disk(mlxpool: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mlxpool("cache", "status").out == f"disk    0 B of 32.0 GB in {mlxpool.home / KV_FOLDER}\n"
    monkeypatch.setenv("MLXPOOL_CACHE_SSD", "false")
    assert mlxpool("cache", "status").out == "disk    off ([cache] ssd)\n"
    assert not (mlxpool.home / KV_FOLDER).exists()


def test_verify_reads_all_and_deletes_what_is_bad(mlxpool: Command, root: Path) -> None:
    good = mlxpool("cache", "verify")
    assert (good.code, good.err) == (0, "")
    assert good.out.endswith(": all good\n")
    assert good.out.startswith("3 records, ")
    flip(next((root / A).glob("*.safetensors")))
    bad = mlxpool("cache", "verify")
    assert bad.code == 1
    assert "(deleted)" in bad.out
    assert ": 1 bad\n" in bad.out
    assert len(files(root)) == 2
    assert mlxpool("cache", "verify").code == 0


def test_verify_can_leave_what_is_bad(mlxpool: Command, root: Path) -> None:
    path = next((root / B).glob("*.safetensors"))
    flip(path, 100)
    told = mlxpool("cache", "verify", "--keep", "--json")
    assert told.code == 1
    found = json.loads(told.out)
    assert found["entries"] == 3
    (bad,) = found["bad"]
    assert (bad["path"], bad["model"], bad["deleted"]) == (str(path), "org/b", False)
    assert bad["fault"]
    assert path.exists()
    path.write_bytes(path.read_bytes()[:50])
    assert mlxpool("cache", "verify").code == 1
    assert not path.exists()


@pytest.mark.parametrize(
    ("problem", "fault"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (MemoryError(), "not enough memory"),
    ],
)
def test_verify_leaves_what_it_has_no_means_to_read(
    mlxpool: Command, root: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, fault: str
) -> None:
    untold = next((root / B).glob("*.safetensors"))
    real = record_file.open_record

    def open_record(path: Path) -> int:
        if path == untold:
            raise problem
        return real(path)

    monkeypatch.setattr(record_file, "open_record", open_record)
    shown = mlxpool("cache", "verify")
    assert shown.code == 1
    assert shown.out.splitlines() == [
        f"{untold}: {fault} (not read)",
        f"2 records, {format_size(sum(path.stat().st_size for path in (root / A).glob('*.safetensors')))}: "
        "all good, 1 more not read",
    ]
    found = json.loads(mlxpool("cache", "verify", "--json").out)
    assert (found["entries"], found["bad"], found["unread"]) == (
        2,
        [],
        [{"path": str(untold), "fault": fault}],
    )
    assert len(files(root)) == 3


@pytest.mark.parametrize("what", ["open", "scandir"])
def test_prune_deletes_nothing_while_it_can_t_tell_whose_it_is(
    mlxpool: Command, root: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for model in ("a", "org/b"):
        write_model(mlxpool.home / "models" / model)
    real = getattr(os, what)

    def scarce(path: Any, *more: Any) -> Any:
        if Path(path) in (root / A, root / A / "about.json"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *more)

    module = {"open": "mlxpool.shared.files", "scandir": "mlxpool.shared.kv.listing"}[what]
    monkeypatch.setattr(f"{module}.os.{what}", scarce)
    refused = mlxpool("cache", "prune", "--yes")
    assert (refused.code, refused.err) == (1, f"mlxpool: {root} can't be read: Too many open files\n")
    monkeypatch.undo()
    assert files(root) == ["a1", "a2", "b3"]


def test_prune_by_model_by_size_and_of_everything(mlxpool: Command, root: Path) -> None:
    gone = size(root, "b")
    assert mlxpool("cache", "prune", "--model", "org/b").out == (
        f"deleted 1 record, {gone}; 0 records, 0 B left of org/b\n"
    )
    assert files(root) == ["a1", "a2"]
    # The one that was used longest ago goes.
    one = held_bytes(*root.glob("*/*.safetensors")) // 2
    told = json.loads(mlxpool("cache", "prune", "--to", str(one + 1), "--json").out)
    assert told == {"entries": 1, "bytes": one, "left_entries": 1, "left_bytes": one}
    assert files(root) == ["a1"]
    assert mlxpool("cache", "prune", "--all").code == 0
    assert files(root) == []
    assert list(root.glob("*/")) == []


def test_prune_offers_what_belongs_to_no_model_any_more(mlxpool: Command, root: Path) -> None:
    write_model(mlxpool.home / "models" / "a")
    gone = size(root, "b")
    asked = mlxpool("cache", "prune")
    assert asked.code == 1
    assert asked.err.splitlines() == [
        f"org/b: {gone}",
        "mlxpool: nobody is here to be asked; --yes deletes without a question",
    ]
    assert files(root) == ["a1", "a2", "b3"]
    assert mlxpool("cache", "prune", "--yes").out == (
        f"deleted 1 record, {gone}; 2 records, {size(root)} left\n"
    )
    assert files(root) == ["a1", "a2"]
    assert mlxpool("cache", "prune").out == f"deleted 0 records, 0 B; 2 records, {size(root)} left\n"


def test_a_removed_model_leaves_its_prompts_to_prune(mlxpool: Command, root: Path) -> None:
    write_model(mlxpool.home / "models" / "a")
    write_model(mlxpool.home / "models" / "org" / "b")
    removed = mlxpool("rm", "org/b", "--yes")
    assert removed.out.splitlines()[1] == (
        f"{size(root, 'b')} of its prompts are still on disk: `mlxpool cache prune` deletes them"
    )
    assert mlxpool("cache", "prune", "--yes").code == 0
    assert files(root) == ["a1", "a2"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--to", "much"], 2, "--to: not a size: 'much'; use bytes or a unit, like 48GB or 32GiB"),
        (["--all", "--to", "1GB"], 2, "--all leaves nothing for --model and --to; use one of them"),
        (["--model", "c"], 1, "nothing is kept of 'c'; there are a, org/b"),
    ],
)
def test_a_prune_that_means_nothing_is_refused(
    mlxpool: Command, root: Path, arguments: list[str], code: int, message: str
) -> None:
    refused = mlxpool("cache", "prune", *arguments)
    assert (refused.code, refused.err) == (code, f"mlxpool: {message}\n")
    assert len(files(root)) == 3


def test_a_folder_that_is_none_is_one_line(mlxpool: Command) -> None:
    (mlxpool.home / KV_FOLDER).write_text("no folder")
    for words in (("status",), ("verify",), ("prune", "--to", "0")):
        refused = mlxpool("cache", *words)
        assert refused.code == 1
        assert refused.err == f"mlxpool: {mlxpool.home / KV_FOLDER} can't be read: Not a directory\n"
