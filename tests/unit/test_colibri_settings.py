"""A streamed model in the library: what its settings and what was tuned make of its plan and its launch."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxpool.parent import streaming
from mlxpool.parent.adapters import Shelf
from mlxpool.parent.jobs.kinds.kind import Fault
from mlxpool.parent.jobs.kinds.names import read_model
from mlxpool.parent.library import Description, Library
from mlxpool.parent.pool.specs import make_cache_launch, make_launch, make_spec
from mlxpool.shared.colibri import artifact, tuned
from mlxpool.shared.colibri.forecast import Demand, forecast, hit_rate, touched
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.tuned import Tuned
from mlxpool.shared.config import Colibri, ModelSettings, Settings
from mlxpool.shared.control import Launch
from tests import tiny_glm
from tests.tools import tiny_adapters

from .test_library import write_model

CONFIG = tiny_glm.config()


@pytest.fixture(scope="module")
def weights() -> tiny_glm.Weights:
    return tiny_glm.weights(CONFIG)


@pytest.fixture
def home(tmp_path: Path, weights: tiny_glm.Weights) -> Path:
    """With a container "glm" and a dense model "dense" in it."""
    tiny_glm.write_container(tmp_path / "models" / "glm", CONFIG, weights)
    write_model(tmp_path / "models" / "dense")
    return tmp_path


def described(home: Path, name: str = "glm", colibri: Colibri | None = None, **own: Any) -> Description:
    library = Library(
        Settings(home=home, models={name: ModelSettings(**own)}, colibri=colibri or Colibri()), home / "none"
    )
    return library.describe(library.resolve(name), "cpu", 2**30)


def launched(home: Path, **own: Any) -> Launch:
    library = Library(Settings(home=home, models={"glm": ModelSettings(**own)}), home / "none")
    model = library.resolve("glm")
    found = library.describe(model, "cpu", 2**30)
    return make_launch(model, found, "s", None, make_cache_launch(Settings(home=home), 0), home / "adapters")


def stream(home: Path, **own: Any) -> StreamLaunch:
    told = launched(home, **own).stream
    assert told is not None
    return told


def test_a_streamed_model_is_found_planned_and_told_how(home: Path) -> None:
    found = described(home, slots=3, context=512)
    assert (found.fault, found.model_type) == (None, "glm_moe_dsa")
    assert found.plan is not None
    assert found.stream is not None
    assert found.plan.planned_bytes == found.stream.planned_bytes
    assert found.size_bytes == sum(path.stat().st_size for path in (home / "models/glm").iterdir())
    told = launched(home, slots=3, context=512)
    assert (told.batch, told.context, told.kv_pool_bytes) == (1, 512, 512 * (7 * 96 + 4 * 64) * 4)
    runtime = found.stream.bytes_of("runtime_reserve", "safety_reserve")
    assert told.memory_limit_bytes == found.stream.planned_bytes - runtime
    assert told.stream == StreamLaunch(
        slots=3,
        working_slots=8,
        chunk=512,
        reserve_bytes=found.stream.bytes_of("allocator_reserve"),
        planned_bytes=found.plan.planned_bytes,
        usage_folder=str(home / "colibri/usage"),
    )
    assert msgspec.json.decode(msgspec.json.encode(told), type=Launch) == told


def test_a_model_that_can_be_held_is_streamed_only_where_it_is_told_to(home: Path) -> None:
    assert described(home, "dense").stream is None
    assert described(home, "dense", experts="resident").fault is None


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        (
            "glm",
            {"experts": "resident"},
            'experts = "resident": a glm_moe_dsa of this form is always streamed; slots = 16 holds all of '
            "its experts in memory",
        ),
        (
            "glm",
            {"batch": 4},
            "batch = 4: where experts are streamed one row is decoded at a time; use batch = 1",
        ),
        (
            "glm",
            {"adapters": "mine"},
            "adapters = 'mine': a model whose experts are streamed takes none; unset it",
        ),
        (
            "glm",
            {"slots": 17},
            "slots = 17: this model's layers have 16 experts each; use slots = 16, which holds all of "
            "them in memory, or fewer",
        ),
        ("dense", {"experts": "stream"}, 'experts = "stream": dense: holds no routed experts'),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(
    home: Path, name: str, own: dict[str, Any], message: str
) -> None:
    found = described(home, name, **own)
    assert (found.fault, found.plan, found.stream) == (message, None, None)
    assert make_spec(Library(Settings(home=home), home / "none").resolve(name), found, 4).fault == message


def test_slots_for_all_models_are_refused_where_a_model_has_fewer_experts(home: Path) -> None:
    shared = Colibri(slots=64)
    assert (described(home, colibri=shared).fault or "").startswith("slots = 64: this model's layers have 16")
    found = described(home, colibri=shared, slots=16).stream
    assert found is not None
    assert (found.slots, found.working_slots) == (16, 0)


def test_drafting_without_a_draft_layer_is_refused(home: Path, weights: tiny_glm.Weights) -> None:
    tiny_glm.write_container(home / "models" / "bare", CONFIG, weights, mtp=False)
    assert described(home, "bare", mtp="on").fault == (
        'mtp = "on": the folder holds no draft layer; use mtp = "off"'
    )
    assert described(home, "bare", mtp="auto").fault is None


def test_a_plan_too_large_is_refused_before_weights_are_read(home: Path) -> None:
    library = Library(Settings(home=home), home / "none")
    model = library.resolve("glm")
    spec = make_spec(model, library.describe(model, "cpu", 2**28), 4)
    assert spec.too_large is not None
    assert spec.too_large.startswith("model 'glm' does not fit in 268.4 MB by ")
    assert spec.too_large.endswith("; a budget of 588.7MB would do")


def test_a_changed_folder_is_planned_anew_also_where_its_experts_lie_deeper(
    home: Path, weights: tiny_glm.Weights
) -> None:
    library = Library(Settings(home=home), home / "none")
    model = library.resolve("glm")
    first = library.describe(model, "cpu", 2**30)
    assert library.describe(model, "cpu", 2**30) is first
    shard = next((home / "models/glm").glob("out-*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    fault = library.describe(model, "cpu", 2**30).fault
    assert fault is not None
    assert fault.startswith(shard.name)


def test_converted_experts_deeper_in_a_folder_are_seen_to_change(
    home: Path, weights: tiny_glm.Weights
) -> None:
    folder = home / "models" / "records"
    tiny_glm.write_records(folder, CONFIG, weights)
    library = Library(Settings(home=home), home / "none")
    model = library.resolve("records")
    found = library.describe(model, "cpu", 2**30)
    assert found.fault is None
    assert found.size_bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    layer = folder / "experts" / "003.bin"
    os.truncate(layer, layer.stat().st_size // 2)
    assert "experts/003.bin" in (library.describe(model, "cpu", 2**30).fault or "")


def test_a_snapshot_of_a_container_in_the_cache_of_others_is_a_model(
    tmp_path: Path, weights: tiny_glm.Weights
) -> None:
    repository = tmp_path / "cache" / "models--org--glm"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    tiny_glm.write_container(repository / "snapshots" / ("a" * 40), CONFIG, weights)
    library = Library(Settings(home=tmp_path), tmp_path / "cache")
    assert library.names() == ["org/glm"]
    assert library.describe(library.resolve("org/glm"), "cpu", 2**30).stream is not None


def test_neither_adapters_nor_jobs_take_a_model_that_is_streamed(home: Path) -> None:
    library = Library(Settings(home=home), home / "none")
    fault = read_model(library.resolve("glm"))
    assert fault == Fault("model", "glm's experts are streamed; this job needs a model in memory")
    tiny_adapters.make(home / "adapters" / "mine")
    (one,) = Shelf(home / "adapters").available(home / "models/glm")
    assert (one.fits, one.reason) == (False, "the model's experts are streamed, which goes with no adapter")


async def test_headers_are_read_on_a_thread_before_they_are_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    read = streaming.read

    def noted(folder: Path, *, only: bool) -> streaming.Streamed:
        readers.append(threading.current_thread().name)
        return read(folder, only=only)

    monkeypatch.setattr(streaming, "read", noted)
    library = Library(Settings(home=home), home / "none")
    await library.look()
    await library.look()
    assert library.describe(library.resolve("glm"), "cpu", 2**30).fault is None
    assert len(readers) == 1
    assert readers[0] != threading.main_thread().name


# ---- what was tuned -------------------------------------------------------------------------------------


def keep(home: Path, **found: Any) -> None:
    fingerprint = tuned.fingerprint(artifact.read(home / "models/glm"))
    tuned.keep(home, fingerprint, "cpu", Tuned(**found))


def test_how_likely_drafts_must_be_is_told_to_the_worker(home: Path) -> None:
    assert (stream(home, mtp="on").draft_confidence, stream(home).drafts) == (0.0, 0)
    told = stream(home, mtp="on", draft_confidence=0.7)
    assert (told.drafts, told.draft_confidence) == (3, 0.7)


def test_what_was_tuned_counts_where_nothing_was_chosen(home: Path) -> None:
    assert stream(home).slots == 16
    keep(home, slots=5, io="buffered", prefetch=False, mtp=True, queue_depth=3)
    told = stream(home)
    assert (told.slots, told.io, told.prefetch, told.overlap, told.drafts) == (5, "buffered", False, True, 3)
    assert (told.queue_depth, told.mtp_slots, told.mtp_working_slots) == (3, 5, 12)
    chosen = stream(home, slots=6, io="direct", prefetch=True, mtp="off", queue_depth=1)
    assert (chosen.slots, chosen.io, chosen.prefetch, chosen.drafts) == (6, "direct", True, 0)
    assert chosen.queue_depth == 1


def test_a_library_that_looks_already_follows_what_is_tuned(home: Path) -> None:
    library = Library(Settings(home=home), home / "none")
    model = library.resolve("glm")
    before = library.describe(model, "cpu", 2**30)
    keep(home, slots=2)
    after = library.describe(model, "cpu", 2**30)
    assert before.stream is not None
    assert after.stream is not None
    assert (before.stream.slots, after.stream.slots) == (16, 2)


def test_what_was_tuned_is_found_by_config_and_sizes_not_by_place(
    home: Path, weights: tiny_glm.Weights
) -> None:
    keep(home, slots=5)
    fingerprint = tuned.fingerprint(artifact.read(home / "models/glm"))
    os.rename(home / "models/glm", home / "moved")
    moved = artifact.read(home / "moved")
    assert tuned.fingerprint(moved) == fingerprint
    assert tuned.read(home).of(fingerprint, "metal") == Tuned()
    tiny_glm.write_container(home / "other", tiny_glm.config(rms_norm_eps=1e-6), weights)
    assert tuned.fingerprint(artifact.read(home / "other")) != fingerprint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "tuned.json is damaged: "),
        ('{"version": 1, "entries": {"a": {"slots": 0}}}', "tuned.json is damaged: "),
        ('{"version": 9, "entries": {}}', "tuned.json is of version 9, not 1"),
        ("\udcff", "tuned.json is damaged: "),
        ('{"x": ' + "[" * 100_000, "tuned.json is damaged: "),
    ],
)
def test_a_damaged_file_counts_as_none_and_is_replaced(home: Path, text: str, problem: str) -> None:
    (home / "colibri").mkdir()
    tuned.path(home).write_bytes(text.encode(errors="surrogateescape"))
    kept = tuned.read(home)
    assert kept.entries == {}
    assert (kept.problem or "").startswith(problem)
    assert stream(home).slots == 16
    keep(home, slots=4)
    assert (stream(home).slots, tuned.read(home).problem) == (4, None)
    assert os.listdir(home / "colibri") == ["tuned.json"]


# ---- forecasts ------------------------------------------------------------------------------------------


def test_hits_follow_the_published_curve() -> None:
    assert [hit_rate(slots, 256) for slots in (0, 12, 31, 51, 256)] == [0.0, 0.24, 0.51, 0.63, 1.0]
    # By share of the experts: 6 of 128 are as good as 12 of 256.
    assert hit_rate(6, 128) == 0.24
    rates = [hit_rate(slots, 256) for slots in range(257)]
    assert rates == sorted(rates)
    assert hit_rate(300, 256) == hit_rate(4, 4) == 1.0


def test_speed_is_what_the_misses_cost_and_what_computing_costs() -> None:
    demand = Demand(layers=75, top_k=8, experts=256, record_bytes=20_000_000, memory_bytes=20 * 10**9)
    at = forecast(demand, slots=12, chunk=2048, disk_bytes_per_s=4e9)
    assert at.reads == pytest.approx(600 * 0.76)
    assert at.read_bytes == pytest.approx(600 * 0.76 * 20e6)
    assert at.tokens_per_s == pytest.approx(4e9 / at.read_bytes)
    slower = forecast(demand, 12, 2048, 4e9, memory_bytes_per_s=100e9)
    assert 1 / slower.tokens_per_s == pytest.approx(1 / at.tokens_per_s + 0.2)
    # A long prompt asks for every expert, and finds 12 of 256 in memory.
    assert at.first_chunk_s == pytest.approx(75 * 244 * 20e6 / 4e9, rel=1e-6)
    assert touched(1, 8, 256) == pytest.approx(8)
    held = forecast(demand, 256, 2048, 4e9)
    assert (held.reads, held.tokens_per_s, held.first_chunk_s) == (0.0, float("inf"), 0.0)
