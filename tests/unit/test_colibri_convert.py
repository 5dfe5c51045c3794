"""Converting checkpoints into records: what is written, what is refused, what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import glm_moe_dsa

from mlxpool.shared import staging
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri import records
from mlxpool.shared.colibri.layout import Quantised
from mlxpool.shared.colibri.records import Recipe
from mlxpool.worker.colibri.convert import state, verify
from mlxpool.worker.colibri.convert.terms import ConvertError
from tests import tiny_glm
from tests.unit.colibri_convert_world import FOUR, KEPT, Told, contents, experts, run, stage
from tests.unit.colibri_world import resident

CONFIG = tiny_glm.config()
SMALL = tiny_glm.config(num_hidden_layers=3, indexer_types=["full"] * 3, n_routed_experts=4)
# torch would be imported for seconds, as in every job's process.
KILLED = """import sys; sys.modules["torch"] = None
from tests.unit.colibri_convert_world import main; main(*sys.argv[1:])"""
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def numbers() -> tiny_glm.Weights:
    return tiny_glm.weights(CONFIG)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, numbers: tiny_glm.Weights) -> Path:
    """bfloat16, one tensor per expert. Not to be changed."""
    return tiny_glm.write_experts(tmp_path_factory.mktemp("published") / "model", CONFIG, numbers)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, published: Path) -> Path:
    """Its records of 4 bits. Not to be changed."""
    target = tmp_path_factory.mktemp("converted") / "model"
    run(published, target)
    return target


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory, numbers: tiny_glm.Weights) -> Path:
    """The same numbers as MLX packs them. Not to be changed."""
    folder = tmp_path_factory.mktemp("stacked") / "model"
    return tiny_glm.write_stacked(folder, CONFIG, numbers, mtp=True)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two layers of four experts, and the draft layer."""
    return tiny_glm.write_experts(tmp_path / "small", SMALL, tiny_glm.weights(SMALL))


def arrays(folder: Path, pattern: str) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for path in sorted(folder.glob(pattern)):
        found |= mx.load(str(path))  # type: ignore[arg-type]
    return found


def same(one: mx.array, other: mx.array) -> bool:
    return one.dtype == other.dtype and bool(mx.array_equal(one, other, equal_nan=True))


def test_experts_packed_one_by_one_are_those_packed_together(converted: Path, stacked: Path) -> None:
    made, packed = experts(converted), experts(stacked)
    main = {key: part for key, part in made.items() if key[0] < 7}
    assert len(main) == 6 * 16 * 9
    assert main == {key: part for key, part in packed.items() if key[0] < 7}


def test_everything_else_is_named_and_packed_as_mlx_lm_does(converted: Path, stacked: Path) -> None:
    made, packed = arrays(converted, "dense-*.safetensors"), arrays(stacked, "model*.safetensors")
    wanted = {name for name in packed if ".switch_mlp." not in name and ".layers.7." not in name}
    assert {name for name in made if ".layers.7." not in name} == wanted
    assert [name for name in wanted if not same(made[name], packed[name])] == []


def test_the_draft_layer_is_packed_in_8_bits(converted: Path, numbers: tiny_glm.Weights) -> None:
    found = artifacts.read(converted)
    assert found.mtp is not None
    assert set(found.mtp.packing.values()) == {Quantised("affine", 8, 64)}
    assert found.mtp.module == "mtp.mlp.switch_mlp"
    dense = arrays(converted, "dense-*.safetensors")
    name = "model.layers.7.eh_proj"
    matrix = mx.array(numbers[f"{name}.weight"]).astype(mx.bfloat16)
    packed, scales, biases = mx.quantize(matrix, group_size=64, bits=8)
    assert same(dense[f"{name}.weight"], packed)
    assert same(dense[f"{name}.scales"], scales)
    assert same(dense[f"{name}.biases"], biases)
    told = found.config["quantization"][name]
    assert told == {"group_size": 64, "bits": 8, "mode": "affine"}
    assert "model.layers.7.self_attn.embed_q.scales" in dense
    assert dense["model.layers.7.mlp.gate.weight"].dtype == mx.bfloat16


def test_a_model_of_records_answers_as_the_one_packed_by_mlx(converted: Path, stacked: Path) -> None:
    tokens = mx.array([list(b"What does a record of an expert hold?")])
    assert tokens.size > CONFIG["index_topk"]
    assert mx.array_equal(resident(converted)(tokens), resident(stacked)(tokens))


def test_fp8_in_blocks_is_what_mlx_lm_reads_in_it(tmp_path: Path) -> None:
    # Rows and columns that do not fill their last block.
    config = tiny_glm.config(moe_intermediate_size=192, num_hidden_layers=3, indexer_types=["full"] * 3)
    source = tiny_glm.write_experts(tmp_path / "fp8", config, tiny_glm.weights(config), fp8=True)
    run(source, tmp_path / "records")
    stock = glm_moe_dsa.Model(glm_moe_dsa.ModelArgs.from_dict(config))
    wanted = stock.sanitize(arrays(source, "model*.safetensors"))
    made, dense = experts(tmp_path / "records"), arrays(tmp_path / "records", "dense-*.safetensors")
    for layer in (1, 2):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            packed = mx.quantize(
                wanted[f"model.layers.{layer}.mlp.switch_mlp.{projection}.weight"], group_size=64, bits=4
            )
            for part, array in zip(("weight", "scales", "biases"), packed, strict=True):
                each = np.array(array.view(mx.uint8)).reshape(16, -1)
                for expert in range(16):
                    assert made[layer, expert, f"{projection}.{part}"] == each[expert].tobytes()
    name = "model.layers.1.self_attn.embed_q"
    assert same(dense[f"{name}.weight"], mx.quantize(wanted[f"{name}.weight"], group_size=64, bits=4)[0])
    assert (
        "quant_method"
        not in json.loads((tmp_path / "records" / "config.json").read_text())["quantization_config"]
    )


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_what_mlx_has_packed_is_taken_byte_for_byte(
    tmp_path: Path, numbers: tiny_glm.Weights, mode: str
) -> None:
    source = tiny_glm.write_stacked(tmp_path / "packed", CONFIG, numbers, mtp=True, mode=mode)
    run(source, tmp_path / "records")
    assert experts(tmp_path / "records") == experts(source)
    was, now = artifacts.read(source), artifacts.read(tmp_path / "records")
    assert [layout.packing for layout in now.layers] == [layout.packing for layout in was.layers]
    assert now.config["quantization"] == was.config["quantization"]
    dense, before = arrays(tmp_path / "records", "dense-*.safetensors"), arrays(source, "model*.safetensors")
    assert all(same(array, before[name]) for name, array in dense.items())
    assert len(dense) == len([name for name in before if ".switch_mlp." not in name])


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_bits_none_keeps_the_numbers(
    tmp_path: Path, numbers: tiny_glm.Weights, dtype: tiny_glm.FloatType
) -> None:
    source = tiny_glm.write_experts(tmp_path / "plain", CONFIG, numbers, dtype=dtype)
    run(source, tmp_path / "records", KEPT, given=True)
    assert experts(tmp_path / "records") == experts(source)
    found = artifacts.read(tmp_path / "records")
    assert "quantization" not in found.config
    assert found.layers[0].packing["up_proj"] == Quantised("float", 32 if dtype == "F32" else 16)


def test_gate_and_up_in_one_tensor_are_told_apart(tmp_path: Path, published: Path, converted: Path) -> None:
    loaded = arrays(published, "model*.safetensors")
    for layer in range(1, 8):
        prefix = f"model.layers.{layer}.mlp.experts"
        taken = {
            projection: [loaded.pop(f"{prefix}.{expert}.{projection}.weight") for expert in range(16)]
            for projection in ("gate_proj", "up_proj", "down_proj")
        }
        both = [mx.concatenate(pair) for pair in zip(taken["gate_proj"], taken["up_proj"], strict=True)]
        loaded[f"{prefix}.gate_up_proj"] = mx.stack(both)
        loaded[f"{prefix}.down_proj"] = mx.stack(taken["down_proj"])
    fused = tmp_path / "fused"
    shutil.copytree(published, fused, ignore=shutil.ignore_patterns("model*"))
    mx.save_safetensors(str(fused / "model.safetensors"), loaded)
    run(fused, tmp_path / "records")
    assert experts(tmp_path / "records") == experts(converted)


def test_mxfp4_and_8_bits_are_packed_as_asked(tmp_path: Path, small: Path) -> None:
    run(small, tmp_path / "mx", Recipe(4, 32, "mxfp4"))
    run(small, tmp_path / "eight", Recipe(8, 32, "affine"))
    assert artifacts.read(tmp_path / "mx").layers[0].packing["up_proj"] == Quantised("mxfp4", 4, 32)
    assert artifacts.read(tmp_path / "eight").layers[0].packing["up_proj"] == Quantised("affine", 8, 32)
    matrix = arrays(small, "model*.safetensors")["model.layers.1.mlp.experts.3.up_proj.weight"]
    for folder, packed in (
        ("mx", mx.quantize(matrix, group_size=32, bits=4, mode="mxfp4")),
        ("eight", mx.quantize(matrix, group_size=32, bits=8)),
    ):
        made = experts(tmp_path / folder)
        assert made[1, 3, "up_proj.weight"] == np.array(packed[0]).tobytes()


def test_progress_only_grows_and_ends_whole(tmp_path: Path, small: Path) -> None:
    told = Told()
    run(small, tmp_path / "records", told=told)
    assert told.stages == ["read", "write", "verify", "publish"]
    assert told.shares == sorted(told.shares)
    assert stage(tmp_path / "records").exists() is False
    assert not (tmp_path / "records" / records.PROGRESS_FILE).exists()


def test_a_conversion_killed_anywhere_goes_on_to_the_same_bytes(
    tmp_path: Path, published: Path, converted: Path
) -> None:
    target = tmp_path / "records"
    kept = []
    for share in (0.2, 0.5, 0.9):
        argv = [sys.executable, "-c", KILLED, str(published), str(target), str(share)]
        ended = subprocess.run(argv, cwd=REPOSITORY, check=False, timeout=120, capture_output=True)
        assert ended.returncode == -9, ended.stderr.decode()
        assert not target.exists()
        said = (stage(target) / records.PROGRESS_FILE).read_bytes()
        kept.append(len(msgspec.json.decode(said, type=state.Progress).layers))
    assert 0 < kept[0] < kept[1] < kept[2] == 7
    done = run(published, target)
    assert done.kept_bytes == done.experts_bytes + done.dense_bytes
    assert contents(target) == contents(converted)


class Killed(BaseException):
    """Stands for a kill between two calls to the system."""


def test_an_end_before_any_rename_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_glm.config(num_hidden_layers=2, indexer_types=["full"] * 2, n_routed_experts=4)
    small = tiny_glm.write_experts(tmp_path / "small", config, tiny_glm.weights(config))
    run(small, tmp_path / "whole", verify=False)
    wanted, rename, target = contents(tmp_path / "whole"), os.rename, tmp_path / "records"
    for at in range(100):
        made = 0

        def breaking(one: Any, other: Any, at: int = at) -> None:
            nonlocal made
            made += 1
            if made > at:
                raise Killed
            rename(one, other)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", breaking)
            try:
                run(small, target, verify=False)
                break
            except Killed:
                assert not target.exists()
        run(small, target, verify=False)
        assert contents(target) == wanted
        shutil.rmtree(target)
    # Progress at first; file and progress of two layers and a dense one; index, config, the folder.
    assert made == 1 + 2 * 3 + 2 + 1


def test_other_parameters_are_not_mixed_in(tmp_path: Path, small: Path) -> None:
    target = tmp_path / "records"
    with pytest.raises(Killed):
        run(small, target, told=Told(_stop_at(0.4)))
    with pytest.raises(ConvertError, match=r"begun with 4 bits in groups of 64 \(affine\), this is 8 bits"):
        run(small, target, Recipe(8, 64, "affine"))
    with pytest.raises(
        ConvertError, match=r"this is 4 bits in groups of 32 \(affine\); go on with what it was"
    ):
        run(small, target, Recipe(4, 32, "affine"))
    other = tiny_glm.write_experts(tmp_path / "other", SMALL, tiny_glm.weights(SMALL, seed=8))
    with pytest.raises(ConvertError, match=rf"begun from {small}, not {other}"):
        run(other, target)
    (first, *_) = sorted(small.glob("model*.safetensors"))
    os.utime(first, ns=(1, 1))
    with pytest.raises(ConvertError, match=rf"{first.name} of the source has changed"):
        run(small, target)


def _stop_at(share: float) -> Any:
    def act(reached: float, told: str) -> None:
        if reached >= share and told != "read":
            raise Killed

    return act


def test_a_finished_layer_that_was_damaged_is_written_again(tmp_path: Path, small: Path) -> None:
    target = tmp_path / "records"
    with pytest.raises(Killed):
        run(small, target, told=Told(_stop_at(0.73)))
    file = stage(target) / "experts" / "002.bin"
    _flip(file, 5 * 1024)
    done = run(small, target)
    layer = records.read_index(target).layers[1]
    assert layer.file == "experts/002.bin"
    assert done.kept_bytes == done.experts_bytes + done.dense_bytes - 4 * layer.stride_bytes
    run(small, tmp_path / "again")
    assert contents(target) == contents(tmp_path / "again")


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_verifying_names_the_layer_and_expert_of_a_flipped_byte(tmp_path: Path, converted: Path) -> None:
    folder = Path(shutil.copytree(converted, tmp_path / "copy"))
    index = records.read_index(folder)
    layer = index.layers[2]
    assert verify.index_faults(folder, index, lambda _: None) == []
    _flip(folder / layer.file, layer.stride_bytes * 11 + layer.record_bytes - 1)
    assert verify.index_faults(folder, index, lambda _: None) == [
        "experts/003.bin: layer 3, expert 11 is not as it was written"
    ]
    os.truncate(folder / layer.file, layer.stride_bytes * 15 + 100)
    assert verify.index_faults(folder, index, lambda _: None)[1] == (
        f"experts/003.bin: layer 3, expert 15 is cut short by {layer.record_bytes - 100} bytes"
    )
    _flip(folder / "dense-00001.safetensors", 100_000)
    assert verify.index_faults(folder, index, lambda _: None)[-1] == (
        "dense-00001.safetensors is not as it was written"
    )


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path, small: Path) -> None:
    target = tmp_path / "records"
    with pytest.raises(
        ConvertError, match=r"not enough room under .*: 6[0-9]\.\d MB are still needed, 1\.0 MB are free, 6"
    ):
        run(small, target, free_bytes=1_000_000)
    assert not stage(target).exists()
    # What is done already needs no room a second time.
    with pytest.raises(Killed):
        run(small, target, told=Told(_stop_at(0.9)))
    run(small, target, free_bytes=64_000_000)


def test_places_that_would_harm_are_refused(tmp_path: Path, small: Path) -> None:
    before = contents(small)
    with pytest.raises(ConvertError, match="is the source itself"):
        run(small, small)
    with pytest.raises(ConvertError, match="is inside the source"):
        run(small, small / "records")
    (tmp_path / "link").symlink_to(small)
    with pytest.raises(ConvertError, match="is inside the source"):
        run(small, tmp_path / "link" / "deep" / "records")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConvertError, match="is there already, and nothing is written over"):
        run(small, tmp_path / "there")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(ConvertError, match="dangling is there already, and nothing is written over"):
        run(small, tmp_path / "dangling")
    (tmp_path / "there" / "config.json").write_text("{}")
    with pytest.raises(ConvertError, match="is a model already"):
        run(small, tmp_path / "there")
    with pytest.raises(ConvertError, match="is no folder"):
        run(tmp_path / "nowhere", tmp_path / "records")
    assert contents(small) == before


def test_a_source_that_is_cut_meanwhile_is_named(tmp_path: Path, small: Path) -> None:
    file, offset = artifacts.read(small).layers[1].pieces[0].places.at(3)

    def cut(_share: float, told: str) -> None:
        if told == "write":
            os.truncate(small / file, offset + 10)

    with pytest.raises(ConvertError, match=rf"^layer 2, expert \d could not be read from {file}: the"):
        run(small, tmp_path / "records", told=Told(cut))
    assert not (tmp_path / "records").exists()


def test_a_stage_of_something_else_is_not_written_into(tmp_path: Path, small: Path) -> None:
    target = tmp_path / "records"
    stage(target).mkdir()
    (stage(target) / "progress.json.part").write_text("{")  # ours, from a kill before the first word
    run(small, target)
    shutil.rmtree(target)
    stage(target).mkdir()
    (stage(target) / "plan.json").write_text("{}")
    with pytest.raises(ConvertError, match=r"staging-records was begun by something else; remove it first"):
        run(small, target)


def test_files_of_an_older_plan_do_not_stay(tmp_path: Path, small: Path) -> None:
    target = tmp_path / "records"
    with pytest.raises(Killed):
        run(small, target, told=Told(_stop_at(0.6)))
    for name in ("dense-00009.safetensors", "experts/000.bin", "experts/001.bin.part"):
        (stage(target) / name).write_bytes(b"old")
    run(small, target)
    assert [path for path in contents(target) if path.endswith((".bin", ".part"))] == [
        "experts/001.bin", "experts/002.bin", "experts/003.bin",
    ]  # fmt: skip
    assert sorted(path.name for path in target.glob("dense-*")) == ["dense-00001.safetensors"]


def test_two_conversions_to_one_place_do_not_meet(tmp_path: Path, small: Path) -> None:
    target = tmp_path / "records"
    with (
        staging.locked(tmp_path, "records", None),
        pytest.raises(ConvertError, match="another process is making .*records; wait for it to end"),
    ):
        run(small, target)
    run(small, target)
    assert sorted(path.name for path in tmp_path.iterdir() if "records" in path.name) == ["records"]


def test_a_source_that_is_not_whole_is_named_by_layer_and_expert(tmp_path: Path, small: Path) -> None:
    files = sorted(small.glob("model-*"))
    target = tmp_path / "records"
    place = next(
        layout for layout in artifacts.read(small).layers[0].pieces if layout.name == "down_proj.weight"
    ).places
    file, offset = place.at(2)
    os.truncate(small / file, offset + 10)
    with pytest.raises(CheckpointError, match=rf"^{file}: .* shorter .*: layer 1, expert 2 .* is not whole"):
        run(small, target)
    (small / file).unlink()
    with pytest.raises(
        CheckpointError, match=rf"^{file} is missing: it holds layer 1.* and \d+ more tensors"
    ):
        run(small, target)
    (small / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CheckpointError, match=rf"^{file} is missing, and {files[0].name} says that there are 5"
    ):
        run(small, target)
    for number, other in enumerate(one for one in files if one.exists()):
        other.rename(small / f"part-{number}.safetensors")
    with pytest.raises(ConvertError, match=r"^layer 1 has no experts in any file, and glm_moe_dsa"):
        run(small, target)
    assert not stage(target).exists()


def test_experts_that_differ_from_their_neighbours_are_named(tmp_path: Path) -> None:
    numbers = tiny_glm.weights(SMALL)
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    source = tiny_glm.write_experts(tmp_path / "odd", SMALL, {**numbers, name: numbers[name][:64]})
    with pytest.raises(
        CheckpointError, match=r"layer 2, expert 3: its up_proj is BF16 \[64, 256\], expert 0's"
    ):
        run(source, tmp_path / "records")
    without = {key: value for key, value in numbers.items() if key != name}
    source = tiny_glm.write_experts(tmp_path / "without", SMALL, without)
    with pytest.raises(CheckpointError, match=r"^layer 2, expert 3: its up_proj is in no file"):
        run(source, tmp_path / "records")
    fewer = {key: value for key, value in numbers.items() if ".layers.2.mlp.experts." not in key}
    source = tiny_glm.write_experts(tmp_path / "fewer", SMALL, fewer)
    with pytest.raises(CheckpointError, match=r"layer 2 has a router .* but its experts are in no file"):
        run(source, tmp_path / "records")
    lacks = {key: value for key, value in numbers.items() if key != "model.layers.1.self_attn.o_proj.weight"}
    source = tiny_glm.write_experts(tmp_path / "lacks", SMALL, lacks)
    with pytest.raises(
        ConvertError, match=r"^model.layers.1.self_attn.o_proj.weight is in no file, and glm_moe"
    ):
        run(source, tmp_path / "records")


def test_what_can_not_be_converted_says_what_can(tmp_path: Path, stacked: Path, small: Path) -> None:
    container = tiny_glm.write_container(tmp_path / "container", SMALL, tiny_glm.weights(SMALL))
    with pytest.raises(ConvertError, match="is colibri's own container, which is served as it is"):
        run(container, tmp_path / "records")
    with pytest.raises(ConvertError, match="packed already, .*; leave --bits out to keep its bits"):
        run(stacked, tmp_path / "records", FOUR, given=True)
    with pytest.raises(ConvertError, match="gate_proj is 256 wide, which groups of 96 do not divide"):
        run(small, tmp_path / "records", Recipe(4, 96, "affine"))
    run(small, tmp_path / "records")
    with pytest.raises(ConvertError, match="is of records already"):
        run(tmp_path / "records", tmp_path / "again")


MOE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
NEXT = {
    **MOE, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 32,
    "partial_rotary_factor": 0.5, "full_attention_interval": 2,
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "config"), [("qwen3_moe", MOE), ("qwen3_next", NEXT)])
def test_other_families_become_what_mlx_lm_makes_of_them(
    tmp_path: Path, model_type: str, config: dict[str, Any]
) -> None:
    source = _published(tmp_path / "source", {**config, "model_type": model_type})
    run(source, tmp_path / "records", Recipe(4, 32, "affine"))
    from mlx_lm.utils import load_model, quantize_model

    model, _ = quantize_model(*load_model(source), group_size=32, bits=4)
    wanted = dict(tree_flatten(model.parameters()))
    made, dense = experts(tmp_path / "records"), arrays(tmp_path / "records", "dense-*.safetensors")
    assert dense.keys() == {name for name in wanted if ".switch_mlp." not in name}
    assert [name for name, array in dense.items() if not same(array, wanted[name])] == []
    for layer in range(4):
        array = wanted[f"model.layers.{layer}.mlp.switch_mlp.down_proj.weight"]
        for expert in range(4):
            assert made[layer, expert, "down_proj.weight"] == np.array(array[expert]).tobytes()
    resident(tmp_path / "records")(mx.array([[1, 2, 3]]))


def _published(folder: Path, config: dict[str, Any]) -> Path:
    """Random weights of an mlx-lm class under the names that its publisher uses."""
    from mlx_lm.utils import _get_classes

    made, arguments = _get_classes(config)
    mx.random.seed(3)
    model = made(arguments.from_dict(config))
    weights: dict[str, mx.array] = {}
    for name, value in tree_flatten(model.parameters()):
        if ".switch_mlp." in name:
            prefix, rest = name.split("switch_mlp.")
            for expert in range(config["num_experts"]):
                weights[f"{prefix}experts.{expert}.{rest}"] = value[expert].astype(mx.bfloat16)
        else:
            weights[name] = value.astype(mx.bfloat16)
    for name in [name for name in weights if name.endswith("conv1d.weight")]:
        weights[name] = weights[name].moveaxis(1, 2)
    if config["model_type"] == "qwen3_next":
        # Its draft layer, whose layer 0 is not the model's.
        weights["mtp.layers.0.mlp.experts.0.up_proj.weight"] = mx.zeros((32, 64), dtype=mx.bfloat16)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder
