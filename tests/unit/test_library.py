"""Which folders are models, which names lead to them, and what is said of names that lead nowhere."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from mlxpool.parent.library import Library
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.config import Defaults, ModelSettings, Pool, Settings
from mlxpool.shared.errors import ApiError
from tests.tools.model_folders import write_model


def home_with(tmp_path: Path, *names: str) -> Path:
    home = tmp_path / "home"
    for name in names:
        write_model(home / "models" / name)
    return home


def refusal(library: Library, asked: str | None) -> tuple[int, str, str]:
    with pytest.raises(ApiError) as caught:
        library.resolve(asked)
    assert caught.value.param == "model"
    return caught.value.status, caught.value.code, caught.value.message


def test_models_are_the_visible_folders_with_a_config(tmp_path: Path) -> None:
    home = home_with(tmp_path, "b", "a", ".staging-c", ".hidden")
    (home / "models" / "empty").mkdir()
    (home / "models" / "file").touch()
    assert Library(Settings(home=home)).names() == ["a", "b"]


@pytest.mark.skipif(sys.platform == "darwin", reason="its disks take no such name")
def test_a_folder_whose_name_is_no_text_is_no_model(tmp_path: Path) -> None:
    home = home_with(tmp_path, "a")
    write_model(home / "models" / "b\udcff")
    assert Library(Settings(home=home)).names() == ["a"]


def test_without_any_folder_there_are_no_models(tmp_path: Path) -> None:
    library = Library(Settings(home=tmp_path / "gone"))
    assert library.names() == []
    assert refusal(library, "x") == (
        404,
        "model_not_found",
        "no model 'x' on this server; there are no models here yet: "
        f"`mlxpool pull starter --home {tmp_path}/gone` fetches a small one",
    )


def test_a_long_name_is_told_by_its_beginning(tmp_path: Path) -> None:
    library = Library(Settings(home=home_with(tmp_path, "a"), aliases={"x*": "a", "y": "gone"}))
    assert refusal(library, "x" * 5000) == (
        404,
        "model_not_found",
        f"no model '{'x' * 80}…' on this server; there are a, y",
    )
    assert library.resolve("x" * 512).name == "a"


def test_the_first_folder_of_a_name_wins_and_the_others_are_told(tmp_path: Path) -> None:
    home = home_with(tmp_path, "a")
    more = tmp_path / "more"
    write_model(more / "a")
    write_model(more / "b")
    library = Library(Settings(home=home, model_dirs=(more,)))
    assert [(model.name, model.source) for model in library.models()] == [("a", "home"), ("b", str(more))]
    assert library.shadowed() == {"a": [more / "a"]}


def test_a_path_in_the_config_names_a_model_and_comes_first(tmp_path: Path) -> None:
    home = home_with(tmp_path, "a")
    own = write_model(tmp_path / "elsewhere")
    settings = Settings(home=home, models={"a": ModelSettings(path=str(own), context=99)})
    found = Library(settings).find("a")
    assert found is not None
    assert (found.path, found.source, found.settings.context) == (own, "config", 99)


def test_a_configured_path_that_is_missing_is_listed_with_its_fault(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, models={"a": ModelSettings(path=str(tmp_path / "gone"))})
    library = Library(settings)
    assert library.names() == ["a"]
    described = library.describe(library.resolve("a"), "cpu", None)
    assert described.fault == "gone: can't be listed: No such file or directory"


def test_a_folder_that_appears_is_found_without_a_restart(tmp_path: Path) -> None:
    home = home_with(tmp_path, "a")
    library = Library(Settings(home=home))
    assert library.names() == ["a"]
    staged = write_model(home / "models" / ".staging-b")
    os.rename(staged, home / "models" / "b")
    assert library.names() == ["a", "b"]
    shutil.rmtree(home / "models" / "a")
    assert library.names() == ["b"]


def test_a_folder_that_is_filled_later_is_found_once_it_has_a_config(tmp_path: Path) -> None:
    home = home_with(tmp_path)
    (home / "models" / "slow").mkdir(parents=True)
    library = Library(Settings(home=home))
    assert library.names() == []
    write_model(home / "models" / "slow")
    assert library.names() == ["slow"]


ALIASES = {
    "a": "b",
    "claude-*": "a",
    "claude-haiku-*": "b",
    "gpt": "a",
    "*-mini": "b",
    "dead": "gone",
}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("a", "a"),  # an exact name beats an alias of the same name
        ("gpt", "a"),
        ("claude-sonnet", "a"),
        ("claude-haiku-4", "b"),  # the longer pattern
        ("o4-mini", "b"),
        ("claude-", "a"),
        (None, "a"),  # the default, through an alias
    ],
)
def test_names_resolve_exactly_then_by_alias_then_by_longest_pattern(
    tmp_path: Path, asked: str | None, found: str
) -> None:
    settings = Settings(home=home_with(tmp_path, "a", "b"), aliases=ALIASES, defaults=Defaults(model="gpt"))
    assert Library(settings).resolve(asked).name == found


@pytest.mark.parametrize("pattern", ["x*y*z", "x*z", "*"])
def test_a_star_stands_for_any_text(tmp_path: Path, pattern: str) -> None:
    library = Library(Settings(home=home_with(tmp_path, "a"), aliases={pattern: "a"}))
    assert library.resolve("x-y-z").name == "a"


def test_overlapping_ends_of_a_pattern_do_not_match(tmp_path: Path) -> None:
    library = Library(Settings(home=home_with(tmp_path, "a"), aliases={"ab*ba": "a", "p.q*": "a"}))
    assert refusal(library, "aba")[1] == "model_not_found"
    assert refusal(library, "pxq")[1] == "model_not_found"


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    library = Library(
        Settings(home=home_with(tmp_path, "smollm2-135m", "qwen3-8b"), aliases={"dead": "gone"})
    )
    assert refusal(library, "smolm2-135m") == (
        404,
        "model_not_found",
        "no model 'smolm2-135m' on this server; did you mean smollm2-135m?",
    )
    assert refusal(library, "zzz")[2].endswith("there are qwen3-8b, smollm2-135m, dead")
    assert refusal(library, "dead")[2].startswith("no model 'gone' (alias of 'dead') on this server; ")


def test_no_name_and_no_default_is_a_bad_request(tmp_path: Path) -> None:
    status, code, message = refusal(Library(Settings(home=home_with(tmp_path, "a"))), None)
    assert (status, code) == (400, "invalid_request")
    assert message.startswith("no model was named and the server has no default one; name one: there are a")


@pytest.mark.parametrize("asked", ["", ".", "..", "../home/models/a", "/etc", "a/", "a\0", ".staging-b"])
def test_a_clients_text_never_becomes_a_path(tmp_path: Path, asked: str) -> None:
    library = Library(Settings(home=home_with(tmp_path, "a", ".staging-b")))
    assert refusal(library, asked)[:2] == (404, "model_not_found")


def test_a_model_is_described_until_its_files_change(tmp_path: Path) -> None:
    home = home_with(tmp_path, "a")
    library = Library(Settings(home=home))
    model = library.resolve("a")
    first = library.describe(model, "cpu", None)
    assert first.fault is None
    assert first.plan is not None
    assert first.plan.weights_bytes == 256 * 64 * 4
    assert library.describe(model, "cpu", None) is first
    (home / "models" / "a" / "config.json").write_text("{")
    broken = library.describe(model, "cpu", None)
    assert broken.plan is None
    assert broken.fault is not None
    assert broken.fault.startswith("config.json: no JSON object")
    write_model(home / "models" / "a")
    assert library.describe(model, "cpu", None).fault is None


@pytest.mark.parametrize("problem", [ValueError("embedded null byte"), RecursionError(), MemoryError()])
@pytest.mark.parametrize(
    "where", ["stamp_of", "is_only_streamed", "_size_bytes", "model_facts", "memory.plan", "checkpoint.read"]
)
async def test_what_nobody_thought_of_is_one_models_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    problem: Exception,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(f"mlxpool.parent.library.{where}", fails)
    listing = Library(Settings(home=home_with(tmp_path, "a")))
    await listing.look()
    (model,) = listing.models()
    described = listing.describe(model, "cpu", None)
    assert described.plan is None
    assert described.fault is not None
    assert described.fault.startswith(f"a: its files can't be understood ({type(problem).__name__}: ")
    assert "Traceback" in caplog.text
    with pytest.raises(CheckpointError, match="its files can't be understood"):
        listing.fit(model, "cpu", None, None)


def test_a_path_that_no_file_can_have_is_a_models_fault(tmp_path: Path) -> None:
    library = Library(Settings(home=tmp_path, models={"a": ModelSettings(path="/a\0b")}))
    fault = library.describe(library.resolve("a"), "cpu", None).fault
    assert fault is not None
    assert "embedded null byte" in fault


def test_only_an_explicit_budget_lowers_a_context(tmp_path: Path) -> None:
    home = home_with(tmp_path, "a")
    whole = Library(Settings(home=home))
    model = whole.resolve("a")
    full = whole.describe(model, "cpu", None).plan
    assert full is not None
    limit = full.planned_bytes - 100_000
    by_default = whole.describe(model, "cpu", limit).plan
    chosen = Library(Settings(home=home, pool=Pool(memory_budget=limit))).describe(model, "cpu", limit).plan
    assert by_default is not None
    assert chosen is not None
    assert (by_default.verdict, by_default.context) == ("does_not_fit", 2048)
    assert chosen.verdict == "fits_with_context"
    assert chosen.context < 2048
