"""Pulls from a hub that speaks the Hub's API: whole, cut, killed, lied to, refused."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mlxpool.parent.library import Library
from mlxpool.shared import checkpoint
from mlxpool.shared.config import Settings
from mlxpool.shared.staging import MANIFEST_FILE, Manifest
from tests.tools.fake_hub import GOOD_TOKEN, OTHER_TOKEN, FakeHub, Fault
from tests.tools.hub_models import MEBIBYTE, PullProcess, environment, pull, refusal, write_random_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as served:
        yield served


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "source")


def names(home: Path) -> list[str]:
    return Library(Settings(home=home)).names()


def published(home: Path) -> dict[str, bytes]:
    folder = home / "models" / "org" / "name"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_FILE}


def until_part_has(home: Path, size: int) -> Path:
    """Wait until the weights are what is missing, and that much of them is here; the part they are in."""
    parts = home / "models" / ".staging-org--name" / "parts"
    deadline = time.monotonic() + 60
    while True:
        found = list(parts.glob("*")) if parts.exists() else []
        if len(found) == 1 and found[0].name.endswith(WEIGHTS) and found[0].stat().st_size == size:
            return found[0]
        assert time.monotonic() < deadline, found
        time.sleep(0.005)


def original(source: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in source.iterdir()}


def test_a_model_is_pulled_whole_and_served_under_its_own_name(
    hub: FakeHub, home: Path, source: Path
) -> None:
    (source / "README.md").write_text("not needed")
    (source / "pytorch_model.bin").write_bytes(bytes(100))
    commit = hub.add("org/name", source).revisions["main"]
    folder = home / "models" / "org" / "name"
    assert pull(hub, home, "org/name") == {"model": "org/name", "path": str(folder), "was_there": False}
    wanted = {name: original(source)[name] for name in ("config.json", "tokenizer.json", WEIGHTS)}
    assert published(home) == wanted
    assert names(home) == ["org/name"]
    assert checkpoint.read(folder).model_type == "llama"
    manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=Manifest)
    assert (manifest.model, manifest.revision, manifest.commit) == ("org/name", "main", commit)
    assert {name: (file.size_bytes, file.sha256) for name, file in manifest.files.items()} == {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in wanted.items()
    }
    assert sorted(path.name for path in (home / "models").iterdir()) == ["org"]
    asked = len(hub.asked)
    assert pull(hub, home, "org/name")["was_there"] is True
    assert len(hub.asked) == asked


def test_the_hub_is_asked_for_the_model_and_for_nothing_else(hub: FakeHub, home: Path, source: Path) -> None:
    commit = hub.add("org/name", source, "private").revisions["main"]
    pull(hub, home, "org/name", HF_TOKEN=GOOD_TOKEN)
    files = {f"/org/name/resolve/{commit}/{name}" for name in original(source)}
    assert {asked.path for asked in hub.asked} == {"/api/models/org/name", *files}
    # The token goes to the hub it is for, and not on to where that sends us.
    assert {(asked.at_cdn, asked.authorized) for asked in hub.asked} == {(False, True), (True, False)}


def test_a_pull_that_is_killed_within_a_file_fetches_only_the_rest(
    hub: FakeHub, home: Path, source: Path
) -> None:
    hub.add("org/name", source)
    size = (source / WEIGHTS).stat().st_size
    hub.faults[WEIGHTS] = Fault(hold_after=3 * MEBIBYTE)
    killed = PullProcess(hub, home, "org/name")
    until_part_has(home, 3 * MEBIBYTE)
    assert names(home) == []
    killed.kill()
    assert names(home) == []
    hub.sent.clear()
    pull(hub, home, "org/name")
    assert published(home) == original(source)
    assert hub.gets(WEIGHTS) == [0, 3 * MEBIBYTE]
    assert hub.sent[WEIGHTS] == size - 3 * MEBIBYTE
    assert (hub.sent["config.json"], hub.sent["tokenizer.json"]) == (0, 0)


def test_a_pull_dies_with_who_started_it(hub: FakeHub, home: Path, source: Path) -> None:
    hub.add("org/name", source)
    hub.faults[WEIGHTS] = Fault(hold_after=MEBIBYTE)
    process = PullProcess(hub, home, "org/name")
    assert hub.holding.wait(60)
    assert process.cut_tether() == -9
    assert names(home) == []


def test_a_connection_that_is_cut_is_taken_up_where_it_broke(hub: FakeHub, home: Path, source: Path) -> None:
    hub.add("org/name", source)
    hub.faults[WEIGHTS] = Fault(cut_after=MEBIBYTE, times=2)
    pull(hub, home, "org/name")
    assert published(home) == original(source)
    assert hub.gets(WEIGHTS) == [0, MEBIBYTE, 2 * MEBIBYTE]
    assert hub.sent[WEIGHTS] == (source / WEIGHTS).stat().st_size


def test_a_server_that_ignores_ranges_is_read_from_the_start(hub: FakeHub, home: Path, source: Path) -> None:
    hub.add("org/name", source)
    hub.faults[WEIGHTS] = Fault(cut_after=MEBIBYTE)
    hub.repositories["org/name"].ranges = False
    pull(hub, home, "org/name")
    assert published(home) == original(source)
    assert hub.gets(WEIGHTS) == [0, MEBIBYTE]


def test_a_hub_with_passing_trouble_is_asked_again(hub: FakeHub, home: Path, source: Path) -> None:
    hub.add("org/name", source)
    hub.faults[WEIGHTS] = Fault(status=503)
    pull(hub, home, "org/name")
    assert published(home) == original(source)


@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json"])
def test_a_flipped_byte_is_refused_and_nothing_is_published(
    hub: FakeHub, home: Path, source: Path, file: str
) -> None:
    hub.add("org/name", source)
    hub.faults[file] = Fault(flip=1)
    said = refusal(hub, home, "org/name")
    assert said.startswith(f"{file} of org/name arrived with another content than the Hub lists (not ")
    assert said.endswith("…); nothing was published: pull again")
    assert names(home) == []
    assert not (home / "models" / "org").exists()
    pull(hub, home, "org/name")
    assert published(home) == original(source)


def test_a_part_that_rotted_is_fetched_anew(hub: FakeHub, home: Path, source: Path) -> None:
    hub.add("org/name", source)
    hub.faults[WEIGHTS] = Fault(hold_after=3 * MEBIBYTE)
    killed = PullProcess(hub, home, "org/name")
    part = until_part_has(home, 3 * MEBIBYTE)
    killed.kill()
    content = bytearray(part.read_bytes())
    content[MEBIBYTE] ^= 1
    part.write_bytes(content)
    pull(hub, home, "org/name")
    assert published(home) == original(source)
    assert hub.gets(WEIGHTS) == [0, len(content), 0]


def test_a_repository_that_changed_keeps_what_has_not(hub: FakeHub, home: Path, source: Path) -> None:
    repository = hub.add("org/name", source)
    hub.faults[WEIGHTS] = Fault(hold_after=2 * MEBIBYTE)
    killed = PullProcess(hub, home, "org/name")
    until_part_has(home, 2 * MEBIBYTE)
    killed.kill()
    repository.files["tokenizer.json"] = b'{"new": 1}'
    commit = repository.commit()
    pull(hub, home, "org/name")
    assert published(home) == {**original(source), "tokenizer.json": b'{"new": 1}'}
    assert hub.gets(WEIGHTS) == [0, 2 * MEBIBYTE]
    manifest = msgspec.json.decode((home / "models/org/name" / MANIFEST_FILE).read_bytes(), type=Manifest)
    assert manifest.commit == commit


def test_a_revision_is_what_was_asked_for(hub: FakeHub, home: Path, source: Path) -> None:
    repository = hub.add("org/name", source)
    repository.files["tokenizer.json"] = b'{"old": 1}'
    old = repository.commit("v1")
    pull(hub, home, "--revision", "v1", "org/name")
    assert published(home)["tokenizer.json"] == b'{"old": 1}'
    assert pull(hub, home, "--revision", old[:8], "org/name")["was_there"] is True
    assert refusal(hub, home, "--revision", "main", "org/name") == (
        f"org/name is here already (commit {old[:12]}), not revision 'main'; `mlxpool rm org/name` removes"
        " it, then pull again"
    )


def test_a_repository_whose_weights_are_not_whole_is_fetched_but_not_published(
    hub: FakeHub, home: Path, source: Path
) -> None:
    repository = hub.add("org/name", source)
    repository.files[WEIGHTS] = repository.files[WEIGHTS][:-10]
    repository.commit()
    assert refusal(hub, home, "org/name") == (
        "org/name is here whole, but can't be loaded (model.safetensors: 10 bytes shorter than its header"
        " says), so it was not published; `mlxpool rm org/name` removes what was fetched"
    )
    assert names(home) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_pull_that_is_killed_at_random_moments_never_shows_half_a_model(
    hub: FakeHub, home: Path, source: Path
) -> None:
    hub.add("org/name", source)
    size = sum(len(content) for content in original(source).values())
    chance = random.Random(7)
    kills = 0
    for _ in range(60):
        process = PullProcess(hub, home, "org/name")
        time.sleep(chance.uniform(0.2, 0.8))
        was_alive = process.process.poll() is None
        process.kill()
        kills += was_alive
        assert names(home) in ([], ["org/name"])
        if names(home):
            assert published(home) == original(source)
            shutil.rmtree(home / "models" / "org")
    assert kills > 20
    hub.sent.clear()
    pull(hub, home, "org/name")
    assert published(home) == original(source)
    assert hub.sent.total() <= size + 4096
    assert sorted(path.name for path in (home / "models").iterdir()) == ["org"]


def test_what_the_disk_cannot_hold_is_refused_before_the_first_byte(
    hub: FakeHub, home: Path, source: Path
) -> None:
    hub.add("org/name", source).claimed[WEIGHTS] = 10**16
    said = refusal(hub, home, "org/name")
    assert said.startswith(f"not enough room under {home / 'models'}: org/name has 10000.0 TB, ")
    assert said.endswith(" are free and 268.4 MB of these stay so")
    assert not [asked for asked in hub.asked if "/resolve/" in asked.path]


LOGIN = "set HF_TOKEN to a token"
REFUSALS = [
    (
        "org/missing",
        {},
        "there is no model org/missing at {hub}; if it is private, " + LOGIN + " that may see it",
    ),
    ("org/missing", {"HF_TOKEN": GOOD_TOKEN}, "if it is private, your token may not see it"),
    ("org/private", {}, "there is no model org/private at {hub}; if it is private, " + LOGIN),
    ("org/gated", {}, "accept its licence at {hub}/org/gated with your account, " + LOGIN + " of it"),
    (
        "org/gated",
        {"HF_TOKEN": OTHER_TOKEN},
        "accept its licence at {hub}/org/gated with the account of your",
    ),
    (
        "org/gated",
        {"HF_TOKEN": "hf_wrong"},
        "the Hub does not accept your token; set HF_TOKEN to a valid one",
    ),
    ("org/portal", {}, "{hub} answers, but not as the Hub does; check the network (does it want a login?)"),
    (
        "org/broken",
        {},
        "the Hub answered 500 for org/broken: Internal error Internal error; pull again later",
    ),
    ("org/gated", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids to ask the Hub; unset it and pull again"),
]


@pytest.mark.parametrize(("name", "env", "expected"), REFUSALS)
def test_what_the_hub_refuses_is_said_with_what_to_do(
    hub: FakeHub, home: Path, source: Path, name: str, env: dict[str, str], expected: str
) -> None:
    for access in ("private", "gated", "portal", "broken"):
        hub.add(f"org/{access}", source, access)
    said = refusal(hub, home, name, **env)
    assert expected.format(hub=hub.url) in said
    assert "hf_" not in said
    assert "\n" not in said
    assert names(home) == []


def test_a_licence_that_was_accepted_opens_a_gated_model(hub: FakeHub, home: Path, source: Path) -> None:
    hub.add("org/name", source, "gated")
    pull(hub, home, "org/name", HF_TOKEN=GOOD_TOKEN)
    assert published(home) == original(source)


def test_the_token_of_a_login_is_used(hub: FakeHub, home: Path, source: Path, tmp_path: Path) -> None:
    hub.add("org/name", source, "private")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(GOOD_TOKEN)
    pull(hub, home, "org/name", HF_HOME=str(tmp_path / "hf"))
    assert published(home) == original(source)


def test_an_unknown_revision_is_told(hub: FakeHub, home: Path, source: Path) -> None:
    hub.add("org/name", source)
    assert refusal(hub, home, "--revision", "v9", "org/name") == (
        f"org/name has no revision 'v9'; {hub.url}/org/name/tree/main lists those there are"
    )


def test_without_a_network_it_says_what_could_not_be_reached(home: Path) -> None:
    hub = FakeHub()
    hub.close()
    said = refusal(hub, home, "org/name")
    assert said.startswith(f"{hub.url} can't be reached (")
    assert said.endswith(
        "; check the network, and HF_ENDPOINT where it is set. What has been fetched is kept"
    )


def test_two_pulls_of_one_model_are_one(hub: FakeHub, home: Path, source: Path) -> None:
    hub.add("org/name", source)
    hub.faults[WEIGHTS] = Fault(hold_after=MEBIBYTE)
    first = PullProcess(hub, home, "org/name")
    assert hub.holding.wait(60)
    second = PullProcess(hub, home, "org/name")
    assert second.process.stdout is not None
    waits = '{"type":"stage","name":"wait","progress":0.0,"message":"for another pull of it"}\n'
    assert second.process.stdout.readline() == waits
    hub.release()
    assert first.end()[1][-1]["result"]["was_there"] is False
    assert second.end()[1][-1]["result"]["was_there"] is True
    assert hub.sent[WEIGHTS] == (source / WEIGHTS).stat().st_size


def test_the_hugging_face_cache_is_served_once_a_download_is_whole(
    hub: FakeHub, tmp_path: Path, source: Path
) -> None:
    hub.add("org/name", source)
    hub.faults[WEIGHTS] = Fault(hold_after=MEBIBYTE)
    cache = tmp_path / "hf" / "hub"
    # The Hub's own client fills the cache; xet is another protocol, which the fake hub does not speak.
    env = environment(hub, tmp_path, HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_XET="1")
    code = "from huggingface_hub import snapshot_download; snapshot_download('org/name')"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert hub.holding.wait(60)
        assert Library(Settings(home=tmp_path / "home"), cache).names() == []
        hub.release()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    (model,) = Library(Settings(home=tmp_path / "home"), cache).models()
    assert (model.name, model.source) == ("org/name", "hf")
    assert checkpoint.read(model.path).model_type == "llama"
    assert os.readlink(model.path / WEIGHTS).startswith("../../blobs/")
