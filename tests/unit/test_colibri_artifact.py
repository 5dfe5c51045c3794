"""What a folder holds of a mixture of experts: the forms that are read, and what is said of others."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpool.shared import checkpoint
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact, folder
from mlxpool.shared.colibri.layout import Quantised
from tests import tiny_files, tiny_glm
from tests.tiny_files import Stored

Small = dict[str, Any]
# Small enough to be written in a moment, with draft layer and one expert's layer per group of four.
SMALL: Small = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "indexer_types": ["full", "full", "shared"],
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of each form, made when it is first asked for. Tests that change one copy it."""
    root = tmp_path_factory.mktemp("forms")
    config = tiny_glm.config(**SMALL)
    numbers = tiny_glm.weights(config)
    writers: dict[str, Callable[[Path], Path]] = {
        "stacked": lambda to: tiny_glm.write_stacked(to, config, numbers, mtp=True),
        "mxfp4": lambda to: tiny_glm.write_stacked(to, config, numbers, mode="mxfp4"),
        "floats": lambda to: tiny_glm.write_stacked(to, config, numbers, bits=None),
        "experts": lambda to: tiny_glm.write_experts(to, config, numbers),
        "fp8": lambda to: tiny_glm.write_experts(to, config, numbers, fp8=True),
        "row": lambda to: tiny_glm.write_container(to, config, numbers),
        "grouped": lambda to: tiny_glm.write_container(to, config, numbers, scheme="grouped", indexer=False),
        "bare": lambda to: tiny_glm.write_container(to, config, numbers, mtp=False),
    }

    def folder(name: str) -> Path:
        if not (root / name).exists():
            writers[name](root / name)
        return root / name

    return folder


@pytest.fixture
def copy(forms: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(forms(name), tmp_path / name))


def rewrite(path: Path, change: Callable[[dict[str, Stored]], None]) -> None:
    """Change a file's tensors, its other bytes as they were."""
    header = checkpoint.read_whole_header(path)
    raw = path.read_bytes()
    tensors = {
        name: Stored(
            one.dtype,
            one.shape,
            np.frombuffer(raw, np.uint8, one.size_bytes, header.offsets[name]),
        )
        for name, one in header.tensors.items()
    }
    change(tensors)
    tiny_files.write_safetensors(path, tensors)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def home(folder: Path, tensor: str) -> Path:
    return next(path for path in folder.glob("*.safetensors") if tensor in checkpoint.read_header(path))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        artifact.read(folder)
    said = str(refused.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("name", "form", "packing", "record", "on_cpu", "draft"),
    [
        # Three matrices of 8192 numbers, half a byte each, and their scales: per group 64 × 2 or 128 × 1 of
        # two bytes twice, or of one byte and twice as many groups; per row 64 or 128 of four bytes.
        ("stacked", "stacked", Quantised("affine", 4, 64), 3 * (4096 + 512), 0, Quantised("affine", 4, 64)),
        ("mxfp4", "stacked", Quantised("mxfp4", 4, 32), 3 * (4096 + 256), 0, None),
        ("floats", "stacked", Quantised("float", 16), 3 * 16384, 3 * 32768, None),
        ("experts", "experts", Quantised("float", 16), 3 * 16384, 3 * 32768, Quantised("float", 16)),
        ("row", "container", Quantised("row", 4), 3 * 4096 + 1024, 0, Quantised("row", 8)),
        ("grouped", "container", Quantised("affine", 4, 64), 3 * 4096 + 1536, 0, Quantised("row", 8)),
    ],
)
def test_each_form_is_known_by_its_headers(
    forms: Callable[[str], Path],
    name: str,
    form: str,
    packing: Quantised,
    record: int,
    on_cpu: int,
    draft: Quantised | None,
) -> None:
    found = artifact.read(forms(name))
    assert found.form == form
    assert [layout.layer for layout in found.layers] == [1, 2]
    assert [layout.module for layout in found.layers] == [
        "model.layers.1.mlp.switch_mlp",
        "model.layers.2.mlp.switch_mlp",
    ]
    assert {layout.experts for layout in found.layers} == {4}
    assert found.layers[0].packing["up_proj"] == packing
    assert found.layers[0].record_bytes == found.layers[0].held_bytes == record
    assert artifact.on_backend(found, "cpu").layers[1].held_bytes == (on_cpu or record)
    assert artifact.on_backend(found, "metal") == found
    assert (found.mtp and found.mtp.packing["up_proj"]) == draft
    assert found.mtp is None or (found.mtp.layer, found.mtp.module) == (3, "mtp.mlp.switch_mlp")
    assert found.has_indexer is (name != "grouped")
    assert found.top_k == 2


def test_each_piece_is_where_its_file_holds_it(forms: Callable[[str], Path]) -> None:
    folder = forms("experts")
    layout = artifact.read(folder).layers[1]
    for piece in layout.pieces:
        for expert in range(layout.experts):
            file, offset = piece.places.at(expert)
            header = checkpoint.read_whole_header(folder / file)
            assert header.offsets[f"model.layers.2.mlp.experts.{expert}.{piece.name}"] == offset
    stacked = artifact.read(forms("stacked")).layers[1].pieces[0]
    tensor = f"model.layers.2.mlp.switch_mlp.{stacked.name}"
    file, offset = stacked.places.at(3)
    held = checkpoint.read_whole_header(forms("stacked") / file)
    assert offset == held.offsets[tensor] + 3 * held.tensors[tensor].size_bytes // 4


def test_a_layers_experts_lie_in_more_than_one_file(forms: Callable[[str], Path]) -> None:
    layouts = artifact.read(forms("experts")).layouts.values()
    pieces = [piece for layout in layouts for piece in layout.pieces]
    assert any(len({piece.places.at(expert)[0] for expert in range(4)}) > 1 for piece in pieces)


def test_every_other_tensor_is_dense_and_the_draft_layers_are_apart(forms: Callable[[str], Path]) -> None:
    for name in ("stacked", "experts", "row"):
        found = artifact.read(forms(name))
        held = {one for path in forms(name).glob("*.safetensors") for one in checkpoint.read_header(path)}
        others = {one for one in held if ".mlp.experts." not in one and ".mlp.switch_mlp." not in one}
        assert found.dense.keys() | found.mtp_dense.keys() == others
        assert {one for one in others if one.startswith("model.layers.3.")} == found.mtp_dense.keys()
        assert "model.layers.3.eh_proj.weight" in found.mtp_dense
        assert "model.layers.1.mlp.shared_experts.up_proj.weight" in found.dense
        place = found.dense["model.norm.weight"]
        header = checkpoint.read_whole_header(forms(name) / place.file)
        assert place.offset == header.offsets["model.norm.weight"]


def test_a_folder_needs_no_index_and_a_draft_layer_is_no_must(
    copy: Callable[[str], Path], forms: Callable[[str], Path]
) -> None:
    folder = copy("experts")
    whole = artifact.read(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert artifact.read(folder).layers == whole.layers
    assert artifact.read(forms("bare")).mtp is None
    assert artifact.read(forms("bare")).mtp_dense == {}


def test_cheap_looks_tell_a_container(forms: Callable[[str], Path], tmp_path: Path) -> None:
    assert folder.is_container(forms("row"))
    assert not folder.is_container(forms("stacked"))
    assert not folder.is_container(tmp_path)
    assert not any(folder.is_records(forms(name)) for name in ("row", "stacked"))


def test_a_missing_shard_is_named_with_what_it_held(copy: Callable[[str], Path]) -> None:
    folder = copy("experts")
    lost = home(folder, "model.layers.2.mlp.experts.1.up_proj.weight")
    lost.unlink()
    assert lost.name in refusal(folder)
    assert "layer 1, expert" in refusal(folder) or "layer 2, expert" in refusal(folder)


def test_without_an_index_the_lost_expert_is_named(copy: Callable[[str], Path]) -> None:
    folder = copy("row")
    gone = "model.layers.2.mlp.experts.3.up_proj.weight"

    def drop(tensors: dict[str, Stored]) -> None:
        del tensors[gone]

    rewrite(home(folder, gone), drop)
    assert refusal(folder) == "layer 2, expert 3: up_proj.weight is in none of the 6 files"


def test_a_shard_cut_short_is_told_by_layer_and_expert(copy: Callable[[str], Path]) -> None:
    for name, tensor in (
        ("experts", "model.layers.2.mlp.experts.2.gate_proj.weight"),
        ("stacked", "model.layers.2.mlp.switch_mlp.gate_proj.weight"),
    ):
        folder = copy(name)
        path = home(folder, tensor)
        header = checkpoint.read_whole_header(path)
        # Within the third expert's numbers of a stacked tensor, or in the middle of the only one's.
        share = 5 / 8 if name == "stacked" else 1 / 2
        os.truncate(path, header.offsets[tensor] + int(header.tensors[tensor].size_bytes * share))
        said = refusal(folder)
        assert path.name in said
        assert "shorter than its header says: cut within layer 2, expert 2" in said


def test_an_expert_of_another_shape_is_named(copy: Callable[[str], Path]) -> None:
    folder = copy("experts")
    odd = "model.layers.1.mlp.experts.2.down_proj.weight"

    def turn(tensors: dict[str, Stored]) -> None:
        tensors[odd] = tensors[odd]._replace(shape=(64, 128))

    path = home(folder, odd)
    rewrite(path, turn)
    assert refusal(folder) == (
        f"{path.name}: layer 1, expert 2: down_proj.weight is BF16 [64, 128] "
        "where expert 0's is BF16 [128, 64]"
    )


def test_numbers_that_disagree_with_the_config_are_named(copy: Callable[[str], Path]) -> None:
    folder = copy("experts")
    change_config(folder, n_routed_experts=5)
    assert refusal(folder) == "layer 1, expert 4: gate_proj.weight is in none of the 5 files"
    change_config(folder, n_routed_experts=3)
    assert "layer 1, expert 3: config.json says 3 experts" in refusal(folder)
    change_config(folder, n_routed_experts=4, hidden_size=256)
    assert refusal(folder) == "layer 1: gate_proj is of 64 × 128 where 64 × 256 is due"
    change_config(folder, hidden_size=128, first_k_dense_replace=0)
    assert refusal(folder) == "layer 0: its experts are in none of the files of experts"
    stacked = copy("stacked")
    change_config(stacked, n_routed_experts=8)
    assert "gate_proj.weight is of 4 experts where 8 are due" in refusal(stacked)


def test_fp8_experts_are_sent_to_the_converter(forms: Callable[[str], Path]) -> None:
    assert refusal(forms("fp8")) == (
        "layer 1: gate_proj.weight is F8_E4M3, which can't be streamed as it is: `mlxpool colibri convert` "
        "makes records of it that can"
    )


def test_a_dense_model_has_nothing_to_stream(copy: Callable[[str], Path]) -> None:
    folder = copy("floats")
    for path in folder.glob("*.safetensors"):
        rewrite(
            path,
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "switch_mlp" in name] and None,
        )
    (folder / "model.safetensors.index.json").unlink()
    assert refusal(folder) == "floats: holds no routed experts"


@pytest.mark.parametrize(
    ("bytes_of", "said"),
    [
        (2048, "is of colibri's format int2 (2 bits per row), which can't be streamed here"),
        (64 * 2 * 24, "is of colibri's format int3-g64, which can't be streamed here"),
        (64 * 98, "is of colibri's format e8-iq3-lattice, which can't be streamed here"),
        (5000, "has 5000 bytes and 256 of scales: no format that is known makes that of 64 × 128"),
    ],
)
def test_formats_of_colibri_that_are_not_read_are_named(
    copy: Callable[[str], Path], bytes_of: int, said: str
) -> None:
    folder = copy("row")
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"

    def repack(tensors: dict[str, Stored]) -> None:
        for expert in range(4):
            if name.format(expert) in tensors:
                tensors[name.format(expert)] = Stored("U8", (bytes_of,), np.zeros(bytes_of, np.uint8))

    for path in folder.glob("out-0*.safetensors"):
        rewrite(path, repack)
    assert said in refusal(folder)
    assert refusal(folder).startswith("layer 1: up_proj.weight ")


def test_a_stamp_of_a_format_is_believed_where_it_agrees(copy: Callable[[str], Path]) -> None:
    folder = copy("row")
    tensor = "model.layers.1.mlp.experts.0.up_proj.weight"
    path = home(folder, tensor)

    def stamped(format_name: str) -> None:
        held: dict[str, Stored] = {}
        rewrite(path, held.update)
        said = json.dumps({tensor: format_name})
        tiny_files.write_safetensors(path, held, {"colibri.fmt": said})

    stamped("int4-row")
    assert artifact.read(folder).layers[0].packing["up_proj"] == Quantised("row", 4)
    stamped("int4-grouped")
    assert "is said to be 'int4-grouped', which its bytes aren't" in refusal(folder)
    stamped("int4-rans256-g0")
    assert "is of colibri's format 'int4-rans256-g0', which can't be streamed here" in refusal(folder)


def test_what_config_says_of_one_module_goes_before_what_it_says_of_all(copy: Callable[[str], Path]) -> None:
    folder = copy("mxfp4")
    said = json.loads((folder / "config.json").read_text())["quantization"]
    general = {"group_size": 64, "bits": 8}
    own = {
        f"model.layers.{layer}.mlp.switch_mlp.{projection}": said
        for layer in (1, 2)
        for projection in ("gate_proj", "up_proj", "down_proj")
    }
    change_config(folder, quantization=general | own)
    assert artifact.read(folder).layers[1].packing["gate_proj"] == Quantised("mxfp4", 4, 32)
    change_config(folder, quantization=general)
    assert "layer 1: gate_proj" in refusal(folder)
    change_config(folder, quantization={"mode": "lloyd", "bits": 4, "group_size": 64})
    assert refusal(folder) == "layer 1: gate_proj: config.json's quantization mode 'lloyd' isn't known"


def test_other_architectures_are_found_by_names_alone(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    tensors = {}
    for layer in range(2):
        for projection, shape in (
            ("gate_proj", (3, 32, 64)),
            ("up_proj", (3, 32, 64)),
            ("down_proj", (3, 64, 32)),
        ):
            path = f"model.layers.{layer}.mlp.experts.{projection}"
            tensors[f"{path}.weight"] = Stored("F32", shape, draw.random(shape, np.float32))
            tensors[f"{path}.bias"] = Stored("F32", shape[:2], draw.random(shape[:2], np.float32))
        # As many rows as there are experts, yet none of them.
        shared = f"model.layers.{layer}.mlp.shared_expert.gate_proj.weight"
        tensors[shared] = Stored("F32", (3, 64), draw.random((3, 64), np.float32))
    tiny_files.write_safetensors(tmp_path / "model.safetensors", tensors)
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_local_experts": 3,
        "hidden_size": 64,
        "experts_per_token": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = artifact.read(tmp_path)
    assert [layout.module for layout in found.layers] == [f"model.layers.{n}.mlp.experts" for n in range(2)]
    assert [part.part for part in found.layers[0].parts] == ["weight", "bias"] * 3
    assert found.layers[0].record_bytes == 3 * 32 * 64 * 4 + (32 + 32 + 64) * 4
    assert set(found.dense) == {f"model.layers.{n}.mlp.shared_expert.gate_proj.weight" for n in range(2)}


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.layers.0.mlp.switch_mlp", (0, 8, 8), "layer 0: is of 0 experts; a layer has 1 to 65536"),
        (
            "model.layers.0.mlp.switch_mlp",
            (10**12, 0, 8),
            "layer 0: is of 1000000000000 experts; a layer has",
        ),
        ("model.layers.0.mlp.switch_mlp", (2, 0, 8), "weight is of shape [0, 8], not a matrix"),
        (f"model.layers.{'9' * 5000}.mlp.switch_mlp", (2, 8, 8), "holds no routed experts"),
        (f"model.layers.0.mlp.experts.{'9' * 5000}", (8, 8), "holds no routed experts"),
    ],
)
def test_headers_that_nobody_writes_are_refused_in_a_line(
    tmp_path: Path, name: str, shape: tuple[int, ...], said: str
) -> None:
    nothing = np.zeros(0 if 0 in shape else shape, np.float32)
    tensors = {f"{name}.{one}_proj.weight": Stored("F32", shape, nothing) for one in ("gate", "up", "down")}
    tiny_files.write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_hidden_layers": 1}')
    assert said in refusal(tmp_path)


def test_json_without_end_is_refused_in_a_line(copy: Callable[[str], Path]) -> None:
    folder = copy("stacked")
    nested = "[" * 100_000 + "]" * 100_000
    (folder / "config.json").write_text(f'{{"model_type": "glm_moe_dsa", "x": {nested}}}')
    assert refusal(folder).startswith("config.json: no JSON object: ")
    header = f'{{"x": {nested}}}'.encode()
    (folder / "config.json").write_text(json.dumps(tiny_glm.config(**SMALL)))
    for path in folder.glob("*.safetensors"):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "its header is no safetensors header: " in refusal(folder)


@pytest.mark.parametrize("mode", [["affine"], {}, 4])
def test_a_packing_of_no_sense_is_refused_by_name(copy: Callable[[str], Path], mode: object) -> None:
    folder = copy("stacked")
    change_config(folder, quantization={"mode": mode, "bits": 4, "group_size": 64})
    assert refusal(folder).startswith("layer 1: gate_proj: config.json's quantization mode ")


@pytest.mark.parametrize("kind", ["fifo", "loop", "folder"])
def test_what_only_has_a_shards_name_is_refused_at_once(copy: Callable[[str], Path], kind: str) -> None:
    folder = copy("row")
    path = folder / "out-00009.safetensors"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.mkdir()
    assert refusal(folder).startswith("out-00009.safetensors: can't be ")


def test_overlapping_tensors_and_one_in_two_files_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("row")
    path = sorted(folder.glob("out-0*.safetensors"))[0]
    shutil.copy(path, folder / "out-00009.safetensors")
    assert f"is in {path.name} already" in refusal(folder)
    (folder / "out-00009.safetensors").unlink()
    raw = path.read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    header[names[1]] |= {key: header[names[0]][key] for key in ("dtype", "shape")}
    said = json.dumps(header).encode().ljust(header_bytes)
    path.write_bytes(raw[:8] + said + raw[8 + header_bytes :])
    assert "begins at" in refusal(folder)


def test_the_stamp_changes_with_any_file(copy: Callable[[str], Path]) -> None:
    folder = copy("row")
    before = artifact.read(folder).stamp
    os.utime(folder / "out-mtp-00000.safetensors", ns=(1, 1))
    assert artifact.read(folder).stamp != before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_group": 0}, "n_group is 0; use a whole number from 1 to "),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0; use a whole number from 1 to "),
        ({"rope_parameters": []}, "rope_parameters is []; use an object with rope_theta"),
        ({"num_nextn_predict_layers": 99}, "num_nextn_predict_layers is 99; use a whole number from 0 to 16"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1000000000; use a whole number"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0; use a whole number from 1 to "),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5; use a whole number from 1 to "),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; this architecture knows 'sigmoid'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; use true or false"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing; use a number above 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; use a whole number from 1 to "),
        ({"num_hidden_layers": 7.5}, "num_hidden_layers is 7.5; use a whole number from 1 to "),
        ({"num_hidden_layers": "seven"}, "num_hidden_layers is 'seven'; use a whole number from 1 to "),
        ({"hidden_size": 0}, "hidden_size is 0; use a whole number from 1 to "),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; use a whole number from 0 to "),
    ],
)
def test_what_a_worker_would_refuse_is_refused_by_the_headers(
    copy: Callable[[str], Path], change: dict[str, Any], said: str
) -> None:
    change_config(folder := copy("row"), **change)
    assert refusal(folder).startswith(f"config.json: {said}")


def test_experts_in_a_layer_that_has_none_are_refused(copy: Callable[[str], Path]) -> None:
    change_config(folder := copy("row"), first_k_dense_replace=2)
    assert refusal(folder).startswith("layer 1: has experts where config.json has none")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 7.5}, "num_hidden_layers is 7.5; use a whole number, 1 or more"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; the model's shape"),
        ({"hidden_size": 0}, "hidden_size is 0; use a whole number, 1 or more"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; use a whole number, 1 or more"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; use a whole number, 0 or more"),
    ],
)
def test_numbers_of_other_architectures_are_told_by_key_and_value(
    copy: Callable[[str], Path], change: dict[str, Any], said: str
) -> None:
    change_config(folder := copy("stacked"), model_type="deepseek_v3", **change)
    assert refusal(folder).startswith(f"config.json: {said}")


def test_a_real_models_headers_are_read_in_seconds(tmp_path: Path) -> None:
    """The container of GLM-5.2: 118,000 tensors in 76 files of 380 GB, all hole."""
    hidden, inner, experts = 6144, 2048, 256
    config = tiny_glm.config(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_hidden_layers=78,
        indexer_types=["full"] * 78,
        n_routed_experts=experts,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [
        (f"experts.{expert}.{projection}.weight", hidden if projection == "down_proj" else inner)
        for expert in range(experts)
        for projection in ("gate_proj", "up_proj", "down_proj")
    ]
    for layer in range(3, 79):
        header: dict[str, Any] = {}
        end = 0
        bits = 8 if layer == 78 else 4
        for name, rows in names:
            full = f"model.layers.{layer}.mlp.{name}"
            for one, dtype, size in (
                (full, "U8", hidden * inner * bits // 8),
                (f"{full}.qs", "F32", 4 * rows),
            ):
                shape = size if dtype == "U8" else rows
                header[one] = {"dtype": dtype, "shape": [shape], "data_offsets": [end, end + size]}
                end += size
        said = json.dumps(header).encode()
        with (tmp_path / f"out-{layer:05}.safetensors").open("wb") as file:
            file.write(len(said).to_bytes(8, "little") + said)
            file.truncate(8 + len(said) + end)
    began = time.process_time()
    found = artifact.read(tmp_path)
    took_s = time.process_time() - began
    assert len(found.layers) == 75
    assert {layout.slot_bytes for layout in found.layers} == {18_939_904}
    assert found.mtp is not None
    assert found.mtp.slot_bytes == 37_814_272
    # A second on a machine of 2020, four times that allowed for one that is busy.
    assert took_s < 4
