"""The plan of a streamed model: every line in bytes, and what is said where it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact, needs
from mlxpool.shared.colibri.geometry import indexer_types
from mlxpool.shared.colibri.layout import Artifact
from mlxpool.shared.colibri.plan import StreamPlan, Wishes, plan
from mlxpool.shared.units import format_size, parse_size, size_to_ask_for
from tests import sparse_glm, tiny_glm

from .test_cli import Command, mlxpool  # noqa: F401  # the fixture

GIB = 2**30
PAGE = 16 * 1024


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """GLM-5.2 in two forms, about 400 GB by its sizes."""
    root = tmp_path_factory.mktemp("real")
    return {
        "container": sparse_glm.container(root / "container"),
        "stacked": sparse_glm.stacked(root / "stacked"),
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with few layers."""
    return sparse_glm.container(tmp_path_factory.mktemp("small") / "glm", num_hidden_layers=6)


@pytest.fixture(scope="module")
def artifacts(real: dict[str, Path]) -> dict[str, Artifact]:
    return {form: artifact.read(folder) for form, folder in real.items()}


def lines(made: StreamPlan) -> dict[str, int]:
    return {item.name: item.bytes for item in made.items}


def planned(found: Artifact, limit: int | None, backend: Backend = "cpu", **wishes: Any) -> StreamPlan:
    held = artifact.on_backend(found, backend)
    return plan(held, Wishes(**wishes), backend=backend, limit_bytes=limit)


TABLE = {
    "resident": 10_877_286_144,
    "main_slab": 2_632_646_656,
    "mtp_slab": 945_356_800,
    "target_kv": 736_100_352,
    "indexer_kv": 0,
    "mtp_kv": 9_437_184,
    "reconstructed_kv": 537_395_200,
    "rows": 4_508_672,
    "allocator_reserve": 4_294_967_296,
    "runtime_reserve": 536_870_912,
    "safety_reserve": 536_870_912,
}


@pytest.mark.parametrize("backend", ["cpu", "metal"])
def test_the_reference_setting_of_glm_comes_out_to_the_byte(
    artifacts: dict[str, Artifact], backend: Backend
) -> None:
    made = planned(artifacts["container"], 25 * GIB, backend, context=4096, slots=1, drafts=3)
    assert lines(made) == TABLE
    assert made.planned_bytes == 21_111_440_128
    assert (made.working_slots, made.unique_experts, made.mtp_slots, made.mtp_working_slots) == (
        64,
        32,
        1,
        24,
    )
    assert (made.verdict, made.generation_limit, made.has_indexer) == ("fits", 4096, False)
    # What 19,200 experts, the draft layer's and all that is dense take on disk.
    assert made.artifact_bytes == 383_725_745_920


def test_the_command_prints_the_lines_and_their_sum(
    mlxpool: Command,  # noqa: F811
    real: dict[str, Path],
    tmp_path: Path,
) -> None:
    options = ["--memory-budget", "25GiB", "--context", "4096", "--mtp", "on", "--slots", "1"]
    home = ["--home", str(tmp_path)]
    shown = mlxpool("colibri", "plan", str(real["container"]), *options, *home)
    assert shown.code == 0
    for number in (*TABLE.values(), 21_111_440_128):
        assert number == 0 or f" {number:,} " in shown.out
    told = json.loads(mlxpool("colibri", "plan", str(real["container"]), *options, *home, "--json").out)
    assert {item["name"]: item["bytes"] for item in told["items"]} == TABLE
    assert (told["planned_bytes"], told["slots"], told["limit_bytes"]) == (21_111_440_128, 1, 25 * GIB)
    assert [speed["measured"] for speed in told["forecasts"]] == [False] * 3


def test_the_command_refuses_a_budget_that_holds_no_slot_and_says_what_would_do(
    mlxpool: Command,  # noqa: F811
    small: Path,
    tmp_path: Path,
) -> None:
    ask = ["colibri", "plan", str(small), "--home", str(tmp_path), "--context", "256", "--memory-budget"]
    said = mlxpool(*ask, "6GB", "--mtp", "on")
    assert said.code == 1
    assert said.err.startswith("mlxpool: does not fit in 6.0 GB by ")
    assert said.err.endswith(' or mtp = "off" would do\n')
    budget = said.err.split("a budget of ")[1].split()[0]
    assert f": needs {format_size(parse_size(budget))} at context 256, " in said.err
    assert f" by {format_size(parse_size(budget) - 6 * 10**9)}: " in said.err
    assert mlxpool(*ask, budget, "--mtp", "on").code == 0
    told = json.loads(mlxpool(*ask, "6GB", "--mtp", "on", "--json").out)
    assert told["planned_bytes"] == told["fitting_bytes"] == told["short_by_bytes"] + 6 * 10**9
    assert told["planned_bytes"] == sum(item["bytes"] for item in told["items"])
    assert 0 <= parse_size(budget) - told["fitting_bytes"] < 10**8
    assert mlxpool(*ask, str(told["fitting_bytes"]), "--mtp", "on").code == 0
    assert mlxpool(*ask, str(told["fitting_bytes"] - 1), "--mtp", "on").code == 1
    assert mlxpool(*ask, "6GB", "--mtp", "off").code == 0


def test_the_command_says_what_is_wrong_with_a_folder(
    mlxpool: Command,  # noqa: F811
    tmp_path: Path,
) -> None:
    said = mlxpool("colibri", "plan", str(tmp_path / "none"), "--home", str(tmp_path))
    no_folder = f"mlxpool: {str(tmp_path / 'none')!r} is no folder; name the folder that a model lies in\n"
    assert (said.code, said.err) == (1, no_folder)
    (tmp_path / "none").mkdir()
    said = mlxpool("colibri", "plan", str(tmp_path / "none"), "--home", str(tmp_path))
    assert (said.code, said.err) == (1, "mlxpool: none: no config.json in the folder\n")
    folder = sparse_glm.container(tmp_path / "cut", num_hidden_layers=4)
    (folder / "out-mtp-00000.safetensors").unlink()
    said = mlxpool("colibri", "plan", str(folder), "--mtp", "on", "--home", str(tmp_path))
    assert said.code == 1
    assert said.err == 'mlxpool: mtp = "on": the folder holds no draft layer; use mtp = "off"\n'
    said = mlxpool("colibri", "plan", str(folder), "--slots", "257", "--home", str(tmp_path))
    assert said.code == 1
    assert said.err.startswith(
        "mlxpool: slots = 257: this model's layers have 256 experts each; use slots = 256"
    )


@pytest.mark.parametrize("given", ["/", "", "."])
def test_a_folder_that_is_given_without_a_name_has_one_in_messages(
    mlxpool: Command,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    said = mlxpool("colibri", "plan", given, "--home", str(tmp_path / "home"))
    name = "/" if given == "/" else tmp_path.name
    assert (said.code, said.err) == (1, f"mlxpool: {name}: no config.json in the folder\n")


def test_a_model_that_is_held_whole_is_shown_without_a_disk(
    mlxpool: Command,  # noqa: F811
    tmp_path: Path,
) -> None:
    config = tiny_glm.config()
    folder = tiny_glm.write_container(tmp_path / "glm", config, tiny_glm.weights(config))
    ask = ["colibri", "plan", str(folder), "--home", str(tmp_path / "home"), "--context", "256"]
    whole = mlxpool(*ask).out
    assert "forecast " in whole
    assert "no disk is waited for" in whole
    assert "tok/s" not in whole
    assert "forecast hit rate" in (few := mlxpool(*ask, "--slots", "4").out)
    assert few.count("tok/s at most from a disk") == 3
    assert few.count("sparse attention") == 1


def test_attention_is_called_sparse_where_the_architecture_knows_it(
    mlxpool: Command,  # noqa: F811
    tmp_path: Path,
) -> None:
    from . import colibri_families

    folder = colibri_families.write("qwen3_moe", tmp_path / "other")
    shown = mlxpool("colibri", "plan", str(folder), "--home", str(tmp_path / "home"))
    assert (shown.code, "sparse attention" in shown.out) == (0, False)


def row(out: int, into: int, bits: int) -> int:
    return out * into * bits // 8 + 4 * out


def affine(out: int, into: int) -> int:
    return out * into // 2 + 2 * 2 * out * into // 64


def pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def test_another_container_comes_out_as_counted_by_hand(tmp_path: Path) -> None:
    """Smaller in every number, experts of 8 bits."""
    numbers = {
        "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 768,
        "num_hidden_layers": 20, "num_attention_heads": 16, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "kv_lora_rank": 256, "q_lora_rank": 512, "qk_rope_head_dim": 32, "qk_nope_head_dim": 96,
        "v_head_dim": 128, "first_k_dense_replace": 1, "n_shared_experts": 2,
    }  # fmt: skip
    found = artifact.read(sparse_glm.container(tmp_path / "other", bits=8, **numbers))
    made = planned(found, 20 * 10**9, context=10_000, slots=5, drafts=2)
    hidden, heads = 2048, 16

    def layer(bits: int) -> int:
        attention = [
            (512, hidden),
            (heads * 128, 512),
            (288, hidden),
            (heads * 224, 256),
            (hidden, heads * 128),
        ]
        return sum(row(*shape, bits) for shape in attention) + 4 * (2 * hidden + 512 + 256)

    def shared(bits: int) -> int:
        return 2 * row(1536, hidden, bits) + row(hidden, 1536, bits)

    router = 4 * (64 * hidden + 64)
    dense = 2 * row(5120, hidden, 4) + row(hidden, 5120, 4)
    main = 2 * row(32_000, hidden, 8) + 4 * hidden + 20 * layer(4) + dense + 19 * (shared(4) + router)
    mtp = layer(8) + shared(8) + router + row(hidden, 2 * hidden, 8) + 3 * 4 * hidden
    slot = 2 * pages(row(768, hidden, 8)) + pages(row(hidden, 768, 8))
    # Three rows verify two drafts; the caches grow in steps of 256 tokens.
    assert lines(made) == {
        "resident": main + mtp,
        "main_slab": (2 * 6 * 3 + 19 * 5) * slot,
        "mtp_slab": (6 * 2 + 5) * slot,
        "target_kv": 10_240 * 20 * 288 * 4,
        "indexer_kv": 0,
        "mtp_kv": 10_240 * 288 * 4,
        "reconstructed_kv": heads * 10_003 * (128 + 128) * 4,
        "rows": 5 * (32_000 + hidden) * 4,
        "allocator_reserve": 20 * 10**9 // 6,
        "runtime_reserve": 512 * 2**20,
        "safety_reserve": (sum(list(lines(made).values())[:8])) // 16,
    }
    assert made.unique_experts == 18


def test_stacked_weights_of_mlx_come_out_as_counted_by_hand(artifacts: dict[str, Artifact]) -> None:
    made = planned(artifacts["stacked"], 64 * GIB, "metal", context=8192, slots=12)
    hidden, inner, heads = 6144, 2048, 64
    attention = affine(2048, hidden) + affine(heads * 256, 2048) + affine(576, hidden)
    attention += heads * (affine(512, 192) + affine(256, 512)) + affine(hidden, heads * 256)
    norms = 2 * (2 * hidden + 2048 + 512)
    shared = 2 * affine(inner, hidden) + affine(hidden, inner)
    indexer = affine(32 * 128, 2048) + affine(128, hidden) + affine(32, hidden) + 2 * 2 * 128
    router = 2 * 256 * hidden + 4 * 256
    slot = 21_233_664
    assert lines(made) == {
        "resident": 2 * affine(154_880, hidden)
        + 2 * hidden
        + 78 * (attention + norms)
        + 21 * indexer
        + 3 * (2 * affine(12_288, hidden) + affine(hidden, 12_288))
        + 75 * (shared + router),
        "main_slab": (2 * 8 + 75 * 12) * slot,
        "mtp_slab": 0,
        "target_kv": 8192 * 78 * 576 * 2,
        "indexer_kv": 8192 * 21 * 128 * 2,
        "mtp_kv": 0,
        "reconstructed_kv": heads * 8193 * 512 * 2,
        "rows": (154_880 + hidden) * 4,
        "allocator_reserve": 4 * GIB,
        "runtime_reserve": GIB // 2,
        "safety_reserve": GIB // 2,
    }
    assert (made.record_bytes, made.slot_bytes, made.hit_rate) == (slot, 75 * slot, 0.24)


def test_what_prefill_expands_does_not_grow_with_all_heads(artifacts: dict[str, Artifact]) -> None:
    found = artifacts["stacked"]
    expanded = [
        lines(planned(found, None, "metal", context=context))["reconstructed_kv"]
        for context in (4096, 16_384, 131_072, 1_048_576)
    ]
    # A key and a value of 256 each in 64 heads, then three blocks, then three heads with their latents.
    head = (1_048_576 + 1) * (2 * 256 + 2 * 512) * 2
    assert expanded == [4097 * 64 * 512 * 2, 3 * 2**28, 3 * 131_073 * 1536 * 2, 3 * head]


def test_slots_are_as_many_as_fit_and_no_more(artifacts: dict[str, Artifact]) -> None:
    found = artifacts["stacked"]
    made = planned(found, 64 * GIB, "metal", context=4096)
    assert made.slots == 32
    assert made.planned_bytes <= 64 * GIB
    # One more would cost some of the context.
    assert planned(found, 64 * GIB, "metal", context=4096, slots=33).verdict == "fits_with_context"
    assert planned(found, 64 * GIB, "metal", context=4096, most_slots=20).slots == 20


def test_where_everything_fits_nothing_is_kept_for_what_does_not(artifacts: dict[str, Artifact]) -> None:
    made = planned(artifacts["container"], 512 * GIB, context=4096, drafts=3)
    assert (made.slots, made.working_slots, made.mtp_slots, made.mtp_working_slots) == (256, 0, 256, 0)
    assert made.hit_rate == 1.0


def test_a_chosen_budget_lowers_the_context_and_the_usual_one_refuses(artifacts: dict[str, Artifact]) -> None:
    held = artifact.on_backend(artifacts["container"], "cpu")
    for explicit, verdict in ((True, "fits_with_context"), (False, "does_not_fit")):
        made = plan(held, Wishes(), backend="cpu", limit_bytes=20 * GIB, limit_is_explicit=explicit)
        assert made.verdict == verdict
        assert (made.slots, made.context) == (1, made.fitting_context if explicit else 32_768)
        assert planned(held, 20 * GIB, context=made.fitting_context).verdict == "fits"
        assert planned(held, 20 * GIB, context=made.fitting_context + 1).context == made.fitting_context
    assert (
        f"; a budget of {size_to_ask_for(made.fitting_bytes)} or context = {made.fitting_context} would do"
        in (made.explanation)
    )


def test_a_context_that_the_model_has_not_is_lowered_in_so_many_words(artifacts: dict[str, Artifact]) -> None:
    own = artifacts["container"].config["max_position_embeddings"]
    made = planned(artifacts["container"], 900 * GIB, context=own + 1)
    assert (made.verdict, made.context, made.asked_context) == ("fits", own, own + 1)
    told = f"at context {own} ({own + 1} was asked for, which is more than the model has), "
    assert told in made.explanation
    assert (told in made.memory_plan.explanation, made.memory_plan.asked_context) == (True, own + 1)
    assert planned(artifacts["container"], 900 * GIB, context=own).asked_context == 0


def test_few_slots_are_planned_and_warned_of(artifacts: dict[str, Artifact]) -> None:
    few = planned(artifacts["container"], 25 * GIB, context=4096)
    assert (few.slots, few.is_slow) == (6, True)
    said = "; fewer than 8 slots read most experts of every token; a budget of 29.0GB leaves"
    assert few.explanation.endswith(f"{said} room for 8")
    assert planned(artifacts["container"], few.roomy_bytes, context=4096).slots == 8
    assert planned(artifacts["container"], few.roomy_bytes - 1, context=4096).slots == 7
    assert not planned(artifacts["container"], 32 * GIB, context=4096).is_slow


def test_a_long_context_that_leaves_few_slots_is_told_which_would_leave_more(
    artifacts: dict[str, Artifact],
) -> None:
    long = planned(artifacts["stacked"], 28 * GIB, "metal")
    assert (long.verdict, long.context, long.slots) == ("fits", 32_768, 6)
    budget = size_to_ask_for(long.roomy_bytes)
    assert long.explanation.endswith(
        f"; context = {long.roomy_context} or a budget of {budget} leaves room for 8"
    )
    assert planned(artifacts["stacked"], 28 * GIB, "metal", context=long.roomy_context).slots == 8
    assert planned(artifacts["stacked"], 28 * GIB, "metal", context=long.roomy_context + 256).slots == 7


def test_slots_that_do_not_fit_are_told_how_many_would(artifacts: dict[str, Artifact]) -> None:
    asked = planned(artifacts["stacked"], 48 * GIB, "metal", slots=40)
    assert asked.verdict == "does_not_fit"
    assert asked.explanation.endswith(f" or slots = {asked.fitting_slots} would do")
    for slots, verdict in ((asked.fitting_slots, "fits"), (asked.fitting_slots + 1, "fits_with_context")):
        assert planned(artifacts["stacked"], 48 * GIB, "metal", slots=slots).verdict == verdict


def test_a_model_that_is_all_in_memory_takes_the_same_of_any_budget(tiny: dict[str, Artifact]) -> None:
    """So that a reload with another budget lets its worker be."""
    plans = [planned(tiny["stacked"], limit) for limit in (2 * GIB, 8 * GIB, 64 * GIB, None)]
    assert {made.planned_bytes for made in plans} == {plans[0].planned_bytes}
    assert {(made.slots, made.chunk) for made in plans} == {(16, 256)}
    # Where experts are read a wider chunk reads each of them for more tokens.
    assert planned(tiny["stacked"], None, slots=15).chunk == 2048


def test_a_chosen_reserve_is_shared_out_and_holds_the_process(artifacts: dict[str, Artifact]) -> None:
    made = lines(planned(artifacts["container"], 25 * GIB, context=4096, slots=1, reserve_bytes=4 * GIB))
    reserve = [made[name] for name in ("allocator_reserve", "runtime_reserve", "safety_reserve")]
    assert sum(reserve) == 4 * GIB
    assert reserve[1:] == pytest.approx([0.4 * GIB, 0.4 * GIB], rel=1e-6)
    with pytest.raises(CheckpointError, match="reserve = 1000 is less than a worker's process takes"):
        planned(artifacts["container"], 25 * GIB, reserve_bytes=1000)


# ---- tiny folders: forms, backends, bad numbers ---------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    root = tmp_path_factory.mktemp("tiny")
    config = tiny_glm.config()
    weights = tiny_glm.weights(config)
    tiny_glm.write_stacked(root / "stacked", config, weights)
    tiny_glm.write_experts(root / "experts", config, weights, dtype="BF16")
    tiny_glm.write_container(root / "container", config, weights)
    return {form: artifact.read(root / form) for form in ("stacked", "experts", "container")}


def test_plain_numbers_are_widened_on_the_cpu_and_packed_ones_nowhere(tiny: dict[str, Artifact]) -> None:
    for form, ratio in (("experts", 2), ("stacked", 1), ("container", 1)):
        wide, narrow = (lines(planned(tiny[form], None, one, slots=4)) for one in ("cpu", "metal"))
        for name in ("target_kv", "indexer_kv", "main_slab", "reconstructed_kv"):
            assert wide[name] == ratio * narrow[name], (form, name)
    # The router's bias is in float32 already.
    wide, narrow = (lines(planned(tiny["experts"], None, one))["resident"] for one in ("cpu", "metal"))
    assert wide == 2 * narrow - 6 * 16 * 4


def test_a_draft_layer_brings_its_indexer_and_leaves_what_it_shares(tiny: dict[str, Artifact]) -> None:
    made = lines(planned(tiny["experts"], None, "metal", drafts=3, context=256))
    assert made["mtp_kv"] == 256 * (64 + 32 + 64) * 2
    assert lines(planned(tiny["container"], None, drafts=3, context=256))["mtp_kv"] == 256 * (64 + 32) * 4


def test_the_same_plan_in_the_shape_of_other_models(tiny: dict[str, Artifact]) -> None:
    made = planned(tiny["container"], GIB, slots=4, drafts=3)
    other = made.memory_plan
    parts = (
        other.weights_bytes, other.overhead_bytes, other.grammar_bytes, other.prefill_bytes,
        other.allocator_bytes, other.kv_pool_bytes,
    )  # fmt: skip
    assert sum(parts) == other.planned_bytes == made.planned_bytes
    assert other.overhead_bytes + other.grammar_bytes >= 460_000_000
    assert (other.context, other.explanation) == (made.context, made.explanation)
    # A latent and its rotated part on 7 layers and the draft layer, an indexer's key on 4, in float32.
    assert other.kv_bytes_per_token == (96 * 8 + 64 * 4) * 4


@pytest.mark.parametrize("form", ["stacked", "experts", "container"])
def test_what_stays_takes_what_the_plan_says(tiny: dict[str, Artifact], form: str) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlxpool.worker.colibri.load import build

    model = build(artifact.on_backend(tiny[form], "cpu"), "cpu")
    arrays = [array for _, array in tree_flatten(model.parameters())]
    mx.eval(arrays)
    assert sum(array.nbytes for array in arrays) == lines(planned(tiny[form], None))["resident"]


@pytest.mark.parametrize(("kind", "bits"), [("qwen3_moe", 4), ("deepseek_v3", 4), ("gpt_oss", None)])
def test_what_stays_of_other_mixtures_takes_what_the_plan_says(
    tmp_path: Path, kind: str, bits: int | None
) -> None:
    from mlx.utils import tree_flatten

    from mlxpool.worker.colibri.load import build

    from . import colibri_families

    found = artifact.read(colibri_families.write(kind, tmp_path / kind, bits))
    made = planned(found, None, slots=3)
    arrays = [
        array for _, array in tree_flatten(build(artifact.on_backend(found, "cpu"), "cpu").parameters())
    ]
    assert sum(array.nbytes for array in arrays) == lines(made)["resident"]
    # A token asks for 2 of 8; a sweep has two halves.
    assert (made.working_slots, made.unique_experts, made.drafts) == (4, 2, 0)
    assert lines(made)["mtp_slab"] == lines(made)["indexer_kv"] == 0


def test_blocks_of_the_worker_are_as_large_as_the_plan_counts_them() -> None:
    from mlxpool.worker.colibri import blocks, passes

    assert blocks.SCORES_BYTES == needs.SCORE_BLOCK_BYTES
    assert blocks.EXPANDED_BYTES == needs.EXPANDED_BYTES
    assert passes.BLOCK_BYTES == needs.ROUTED_BLOCK_BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": None}, "config.json: kv_lora_rank is missing"),
        ({"v_head_dim": 0}, "config.json: v_head_dim is 0; use a whole number from 1 to "),
        ({"num_attention_heads": 10**12}, "config.json: num_attention_heads is 1000000000000; use "),
        ({"qk_nope_head_dim": "64"}, "config.json: qk_nope_head_dim is '64'; use "),
        ({"index_head_dim": True}, "config.json: index_head_dim is True; use "),
        ({"num_experts_per_tok": 17}, "config.json: routes a token to 17 of 16 experts"),
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"num_hidden_layers": 5000}, "config.json: says 5000 layers; no model has more than 4096"),
        ({"indexer_types": ["full"]}, 'config.json: indexer_types must be a list of "full" or "shared"'),
    ],
)
def test_a_config_without_sense_is_refused_by_its_key(
    tiny: dict[str, Artifact], change: dict[str, Any], message: str
) -> None:
    found = tiny["stacked"]
    config = {key: value for key, value in {**found.config, **change}.items() if value is not None}
    with pytest.raises(CheckpointError) as refused:
        planned(msgspec.structs.replace(found, config=config), None)
    assert str(refused.value).startswith(message)


def test_indexers_are_where_the_config_says() -> None:
    full = [0, 1, 2, *range(6, 78, 4)]
    for said in (
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "".join("F" if layer in full else "S" for layer in range(78))},
        {"indexer_types": ["full" if layer in full else "shared" for layer in range(78)]},
    ):
        assert [at for at, kind in enumerate(indexer_types(said, 78)) if kind == "full"] == full
    assert set(indexer_types({}, 78)) == {"full"}
    with pytest.raises(CheckpointError, match="index_topk_freq makes the first layer a shared one"):
        indexer_types({"index_topk_freq": 4, "index_skip_topk_offset": 0}, 78)


# ---- laws -----------------------------------------------------------------------------------------------

limits = st.integers(2**28, 600 * GIB)
contexts = st.integers(1, 200_000)
LAWS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def any_plan(artifacts: dict[str, Artifact], tiny: dict[str, Artifact]) -> Callable[..., StreamPlan]:
    held = [artifact.on_backend(found, "cpu") for found in (*artifacts.values(), *tiny.values())]

    def made(which: int, limit: int | None, context: int | None, drafts: int, **wishes: Any) -> StreamPlan:
        found = held[which]
        drafts = drafts if found.mtp is not None else 0
        return plan(found, Wishes(context=context, drafts=drafts, **wishes), backend="cpu", limit_bytes=limit)

    return made


@LAWS
@given(which=st.integers(0, 4), limit=limits, context=contexts, drafts=st.integers(0, 5))
def test_a_plan_that_fits_is_within_its_limit_and_the_sum_of_its_lines(
    any_plan: Callable[..., StreamPlan], which: int, limit: int, context: int, drafts: int
) -> None:
    made = any_plan(which, limit, context, drafts)
    assert made.planned_bytes == sum(item.bytes for item in made.items) == made.memory_plan.planned_bytes
    assert all(item.bytes >= 0 for item in made.items)
    assert 1 <= made.slots <= made.experts
    assert made.slots == made.experts or made.working_slots >= made.unique_experts
    assert 1 <= made.chunk <= min(2048, made.context)
    if made.verdict == "does_not_fit":
        assert made.short_by_bytes > 0
        assert any_plan(which, made.fitting_bytes, context, drafts).verdict == "fits"
    else:
        assert made.planned_bytes <= limit
        assert made.context <= context


@LAWS
@given(
    which=st.integers(0, 4),
    limit=limits,
    more=st.integers(0, 2**36),
    context=contexts,
    drafts=st.integers(0, 3),
)
def test_more_memory_never_means_fewer_slots_or_less_context(
    any_plan: Callable[..., StreamPlan], which: int, limit: int, more: int, context: int, drafts: int
) -> None:
    less, larger = (any_plan(which, one, context, drafts) for one in (limit, limit + more))
    assert larger.context >= less.context or less.verdict == "does_not_fit"
    if less.verdict == "fits":
        assert larger.verdict == "fits"
        assert larger.slots >= less.slots


@LAWS
@given(which=st.integers(0, 4), slots=st.integers(1, 300), context=contexts, more=st.integers(0, 100_000))
def test_a_longer_context_never_takes_less(
    any_plan: Callable[..., StreamPlan], which: int, slots: int, context: int, more: int
) -> None:
    shorter, longer = (any_plan(which, None, one, 3, slots=slots) for one in (context, context + more))
    assert shorter.planned_bytes <= longer.planned_bytes
