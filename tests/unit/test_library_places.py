"""Where models lie: publishers' folders, the Hugging Face cache; and how one is taken off the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxpool.parent import hf_cache, removal
from mlxpool.parent.hf_cache import HfCache
from mlxpool.parent.library import Library, LibraryModel
from mlxpool.shared import staging
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.config import ModelSettings, Settings
from mlxpool.shared.errors import ApiError
from tests.tools.model_folders import write_model


def found(library: Library) -> list[tuple[str, str]]:
    return [(model.name, model.source) for model in library.models()]


# ---- publishers' folders --------------------------------------------------------------------------------


def test_a_publishers_folder_names_its_models_org_slash_name(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for place in ("plain", "org/one", "org/two", "org/.staging-three", ".trash-1/x"):
        write_model(models / place)
    write_model(models / "deep" / "er" / "still")
    (models / "org" / "no-config").mkdir()
    library = Library(Settings(home=tmp_path), tmp_path / "none")
    assert found(library) == [("org/one", "home"), ("org/two", "home"), ("plain", "home")]
    assert library.resolve("org/one").path == models / "org" / "one"
    assert library.describe(library.resolve("org/one"), "cpu", None).size_bytes == sum(
        path.stat().st_size for path in (models / "org" / "one").iterdir()
    )


def test_what_lies_within_a_model_is_no_model(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "org")
    write_model(tmp_path / "models" / "org" / "inner")
    assert Library(Settings(home=tmp_path), tmp_path / "none").names() == ["org"]


def test_a_model_that_appears_in_a_publishers_folder_is_found_without_a_restart(tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_model(models / "org" / "one")
    library = Library(Settings(home=tmp_path), tmp_path / "none")
    assert library.names() == ["org/one"]
    staged = write_model(models / ".staging-org--two" / "model")
    assert library.names() == ["org/one"]
    staged.rename(models / "org" / "two")
    assert library.names() == ["org/one", "org/two"]
    (models / "new").mkdir()
    assert library.names() == ["org/one", "org/two"]
    write_model(models / "new" / "three")
    assert library.names() == ["new/three", "org/one", "org/two"]


def test_a_link_to_a_model_is_one(tmp_path: Path) -> None:
    target = write_model(tmp_path / "elsewhere")
    (tmp_path / "models" / "org").mkdir(parents=True)
    (tmp_path / "models" / "org" / "linked").symlink_to(target)
    (tmp_path / "models" / "dangling").symlink_to(tmp_path / "gone")
    assert Library(Settings(home=tmp_path), tmp_path / "none").names() == ["org/linked"]


@pytest.mark.parametrize(
    ("asked", "name"),
    [("gpt-4o", "org/name"), ("org/other", "org/name"), ("org/name", "org/name"), ("claude-x", "plain")],
)
def test_aliases_lead_from_and_to_names_with_a_publisher(tmp_path: Path, asked: str, name: str) -> None:
    write_model(tmp_path / "models" / "org" / "name")
    write_model(tmp_path / "models" / "plain")
    aliases = {"gpt-*": "org/name", "org/*": "org/name", "claude-*": "plain", "org/name": "plain"}
    library = Library(Settings(home=tmp_path, aliases=aliases), tmp_path / "none")
    assert library.resolve(asked).name == name


def test_settings_of_a_model_with_a_publisher_are_its_own(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "org" / "name")
    settings = Settings(home=tmp_path, models={"org/name": ModelSettings(context=512)})
    model = Library(settings, tmp_path / "none").resolve("org/name")
    assert model.settings.context == 512


def test_a_fit_is_the_plan_at_the_context_asked_for(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models" / "a")
    library = Library(Settings(home=tmp_path), tmp_path / "none")
    model = library.resolve("a")
    assert library.fit(model, "cpu", None, None).plan == library.describe(model, "cpu", None).plan
    smaller = library.fit(model, "cpu", None, 512).plan
    # Two layers of two KV heads of 16, keys and values, in float32.
    assert (smaller.context, smaller.kv_pool_bytes) == (512, 512 * 2 * 2 * 16 * 2 * 4)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: no JSON object"):
        library.fit(model, "cpu", None, 512)


# ---- the Hugging Face cache -----------------------------------------------------------------------------

COMMIT = "a" * 40


def write_cached(cache: Path, name: str, commit: str = COMMIT, shards: int = 1) -> Path:
    """A repository as huggingface_hub lays it down: blobs, links to them, a ref; returns the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    if shards == 1:
        write_model(snapshot)
    else:
        names = [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
        for n, file in enumerate(names):
            write_model(snapshot, {f"t{n}": ("F16", (4, 4))}, file=file)
        weight_map = ", ".join(f'"t{n}": "{file}"' for n, file in enumerate(names))
        (snapshot / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{weight_map}}}}}')
    for number, path in enumerate(sorted(snapshot.iterdir())):
        blob = repository / "blobs" / f"{commit[:4]}{number}"
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def cached(cache: Path) -> list[str]:
    return [name for name, _ in HfCache(cache).models()]


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"}, "/old"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, str(Path.home() / ".cache/huggingface/hub")),
    ],
)
def test_the_cache_is_where_the_environment_says(env: dict[str, str], folder: str) -> None:
    assert str(hf_cache.location(env)) == folder


def test_whole_snapshots_of_main_are_models(tmp_path: Path) -> None:
    write_cached(tmp_path, "org/name")
    write_cached(tmp_path, "gpt2")
    write_cached(tmp_path, "org/sharded", shards=3)
    (tmp_path / "datasets--org--data" / "snapshots" / COMMIT).mkdir(parents=True)
    (tmp_path / ".locks").mkdir()
    (tmp_path / "version.txt").write_text("1")
    assert cached(tmp_path) == ["gpt2", "org/name", "org/sharded"]
    library = Library(Settings(home=tmp_path / "home"), tmp_path)
    assert found(library) == [("gpt2", "hf"), ("org/name", "hf"), ("org/sharded", "hf")]
    assert library.describe(library.resolve("org/name"), "cpu", None).fault is None


@pytest.mark.parametrize(
    "missing",
    [
        "config.json",
        "tokenizer.json",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ],
)
def test_a_snapshot_that_lacks_a_file_is_none(tmp_path: Path, missing: str) -> None:
    snapshot = write_cached(tmp_path, "org/name", shards=3)
    (snapshot / missing).unlink()
    assert cached(tmp_path) == []
    # Shards name their number, so one is missed before the index is there.
    (snapshot / "model.safetensors.index.json").unlink()
    assert cached(tmp_path) == []


@pytest.mark.parametrize("name", ["model-²-of-².safetensors", f"model-1-of-{'9' * 200}.safetensors"])
def test_a_shard_of_no_number_or_of_too_many_costs_its_own_snapshot_at_most(
    tmp_path: Path, name: str
) -> None:
    snapshot = write_cached(tmp_path, "org/odd")
    (snapshot / "model.safetensors").rename(snapshot / name)
    write_cached(tmp_path, "org/whole")
    assert cached(tmp_path)[-1:] == ["org/whole"]


def test_a_ref_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    reference = write_cached(tmp_path, "org/name").parents[1] / "refs" / "main"
    reference.unlink()
    os.mkfifo(reference)
    assert cached(tmp_path) == []


def test_a_dangling_link_makes_a_snapshot_none(tmp_path: Path) -> None:
    snapshot = write_cached(tmp_path, "org/name")
    (snapshot / "tokenizer_config.json").symlink_to("../../blobs/gone")
    assert cached(tmp_path) == []


@pytest.mark.parametrize("ref", ["", "b" * 40, "../../models--org--other/snapshots/x", "\xff"])
def test_a_ref_that_leads_nowhere_is_no_model(tmp_path: Path, ref: str) -> None:
    snapshot = write_cached(tmp_path, "org/name")
    (snapshot.parents[1] / "refs" / "main").write_text(ref, encoding="latin-1")
    assert cached(tmp_path) == []


def test_a_cache_is_looked_at_again_once_a_second(tmp_path: Path) -> None:
    clock = [100.0]
    cache = HfCache(tmp_path, now=lambda: clock[0])
    assert cache.models() == []
    snapshot = write_cached(tmp_path, "org/name")
    assert cache.models() == []
    clock[0] += hf_cache.LOOK_INTERVAL_S
    first = cache.models()
    assert [name for name, _ in first] == ["org/name"]
    clock[0] += hf_cache.LOOK_INTERVAL_S
    assert cache.models() is first
    (snapshot / "tokenizer.json").unlink()
    clock[0] += hf_cache.LOOK_INTERVAL_S
    assert cache.models() == []


def test_home_comes_before_the_cache(tmp_path: Path) -> None:
    write_model(tmp_path / "home" / "models" / "org" / "name")
    snapshot = write_cached(tmp_path / "hub", "org/name")
    library = Library(Settings(home=tmp_path / "home"), tmp_path / "hub")
    assert found(library) == [("org/name", "home")]
    assert library.shadowed() == {"org/name": [snapshot]}


# ---- removal --------------------------------------------------------------------------------------------


def model_at(home: Path, name: str, source: str = "home") -> LibraryModel:
    return LibraryModel(name, home / "models" / name, source, ModelSettings())


def test_a_removed_model_is_gone_whole_and_its_empty_publisher_too(tmp_path: Path) -> None:
    for name in ("org/one", "org/two", "plain"):
        write_model(tmp_path / "models" / name)
    for name in ("org/one", "plain"):
        removal.delete(removal.unlist(model_at(tmp_path, name), tmp_path))
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["org"]
    removal.delete(removal.unlist(model_at(tmp_path, "org/two"), tmp_path))
    assert list((tmp_path / "models").iterdir()) == []


def test_a_model_that_is_being_removed_is_not_listed(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "a")
    library = Library(Settings(home=tmp_path), tmp_path / "none")
    assert library.names() == ["a"]
    trash = removal.unlist(library.resolve("a"), tmp_path)
    assert (trash / "config.json").exists()
    assert library.names() == []


def test_what_a_killed_removal_left_goes_with_the_next(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path / "models" / name)
    removal.unlist(model_at(tmp_path, "a"), tmp_path)
    removal.delete(removal.unlist(model_at(tmp_path, "b"), tmp_path))
    assert list((tmp_path / "models").iterdir()) == []


def test_a_link_is_removed_and_its_target_stays(tmp_path: Path) -> None:
    target = write_model(tmp_path / "elsewhere")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a").symlink_to(target)
    assert removal.size_bytes(tmp_path / "models" / "a") == 0
    removal.delete(removal.unlist(model_at(tmp_path, "a"), tmp_path))
    assert list((tmp_path / "models").iterdir()) == []
    assert (target / "config.json").exists()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "hf",
            "lies in the Hugging Face cache, which others use too; `hf cache rm model/org/name` removes it",
        ),
        ("/data", "it lies in /data, which was given with --models; remove it there"),
        ("config", "the config file names its folder; take its path out of [models.'org/name']"),
    ],
)
def test_models_of_other_places_are_explained_and_kept(tmp_path: Path, source: str, why: str) -> None:
    refused = removal.refusal(model_at(tmp_path, "org/name", source))
    assert refused is not None
    assert refused.startswith("org/name is not mlxpool's to remove: ")
    assert refused.endswith(why)
    assert removal.refusal(model_at(tmp_path, "org/name")) is None


def test_an_unfinished_pull_can_be_removed_unless_it_runs(tmp_path: Path) -> None:
    stage = tmp_path / "models" / ".staging-org--name"
    (stage / "parts").mkdir(parents=True)
    (stage / "parts" / "x").write_bytes(bytes(10))
    assert removal.find_stage(tmp_path, "org/name") == stage
    assert removal.find_stage(tmp_path, "../org") is None
    with (
        staging.locked(stage.parent, "org/name", None),
        pytest.raises(staging.PullError, match=r"^another pull of org/name is running; wait for it to end$"),
    ):
        removal.delete_stage(tmp_path, "org/name")
    assert removal.delete_stage(tmp_path, "org/name") == (stage, 10)
    assert removal.find_stage(tmp_path, "org/name") is None


def test_a_stage_under_a_models_name_is_never_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / ".staging-org--name" / "model")
    library = Library(Settings(home=tmp_path), tmp_path / "none")
    assert library.names() == []
    with pytest.raises(ApiError):
        library.resolve(".staging-org--name/model")
