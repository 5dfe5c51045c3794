"""experts.json: what is believed of it, and what is refused before anything is read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact, records
from mlxpool.shared.colibri.layout import ALIGN_BYTES, Quantised
from tests import tiny_glm

CONFIG = tiny_glm.config(num_hidden_layers=2, n_routed_experts=4, indexer_types=["full"] * 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_glm.write_records(tmp_path / "records", CONFIG, tiny_glm.weights(CONFIG))


def change(folder: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    said = json.loads((folder / records.INDEX_FILE).read_text())
    how(said)
    (folder / records.INDEX_FILE).write_text(json.dumps(said))


def without(layer: dict[str, Any], projection: str) -> None:
    """The layer's records as they would be if they had no such projection."""
    end = 0
    layer["fields"] = [field for field in layer["fields"] if field["projection"] != projection]
    for field in layer["fields"]:
        field["offset"], end = end, end + field["size_bytes"]
    layer.update(record_bytes=end, stride_bytes=records.record_stride(end))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        artifact.read(folder)
    return str(refused.value)


def test_records_are_read_back_as_they_were_written(folder: Path) -> None:
    found = artifact.read(folder)
    assert found.form == "records"
    assert [layout.layer for layout in found.layers] == [1]
    assert found.mtp is not None
    assert found.mtp.module == "mtp.mlp.switch_mlp"
    layout = found.layers[0]
    assert layout.packing["up_proj"] == Quantised("affine", 4, 64)
    assert layout.pieces[0].places.at(2)[1] % ALIGN_BYTES == 0
    assert "model.layers.1.self_attn.embed_q.weight" in found.dense
    assert "model.layers.2.eh_proj.weight" in found.mtp_dense
    index = records.read_index(folder)
    (folder / records.INDEX_FILE).write_bytes(records.encode(index))
    assert records.read_index(folder) == index


def test_the_stamp_covers_the_experts_own_files(folder: Path) -> None:
    before = artifact.read(folder).stamp
    os.utime(folder / "experts/001.bin", ns=(1, 1))
    assert artifact.read(folder).stamp != before


def test_a_file_cut_short_is_told_by_its_first_lost_expert(folder: Path) -> None:
    path = folder / "experts/001.bin"
    stride = path.stat().st_size // 4
    # What follows the last record fills up its last block, and may be missing.
    record = records.read_index(folder).layers[0].record_bytes
    os.truncate(path, 3 * stride + record)
    assert artifact.read(folder).layers[0].experts == 4
    os.truncate(path, 2 * stride + 5)
    assert refusal(folder) == (
        f"experts/001.bin: {stride + record - 5} bytes short: layer 1, expert 2 is not whole"
    )
    path.unlink()
    assert refusal(folder) == "experts/001.bin: can't be read: No such file or directory"


def test_the_dense_part_must_be_what_was_written(folder: Path) -> None:
    path = folder / "dense-00001.safetensors"
    with path.open("ab") as file:
        file.write(b"more")
    assert refusal(folder).startswith("dense-00001.safetensors: has ")
    path.unlink()
    assert refusal(folder) == "dense-00001.safetensors: can't be read: No such file or directory"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            lambda said: said.update(version=2),
            "is of format 'mlxpool-experts', version 2; this mlxpool reads",
        ),
        (lambda said: said.update(format="other"), "is of format 'other'"),
        (lambda said: said.pop("layers"), "experts.json: no index of experts: "),
        (lambda said: said.update(model_type="qwen3_moe"), "is of a qwen3_moe, config.json of a glm_moe_dsa"),
        (lambda said: said["layers"].append(said["layers"][0]), "layer 1 is there twice"),
        (lambda said: said["layers"][0].update(file="../x.bin"), "'../x.bin' is no file of this folder"),
        (lambda said: said["layers"][0].update(experts=5), "has 5 experts and 4 hashes"),
        (lambda said: said["layers"][0].update(stride_bytes=4096), "4096 apart"),
        (lambda said: said["layers"][0]["fields"][1].update(offset=0), "gate_proj.scales of 1024 bytes at 0"),
        (lambda said: said["layers"][0]["fields"][1].update(dtype="Q7"), "gate_proj.scales can't be of Q7"),
        (lambda said: said["layers"][0]["packing"].pop("up_proj"), "how up_proj is packed is not said"),
        (
            lambda said: said["layers"][0]["packing"]["up_proj"].update(bits=8),
            "layer 1: up_proj.scales is BF16 [128, 4] where 8 bits in groups of 64 make it [128, 2]",
        ),
        (
            lambda said: said["layers"][0]["packing"]["up_proj"].update(scheme="float", bits=32),
            "layer 1: up_proj.weight is U32, and said to be of plain numbers",
        ),
        (
            lambda said: said["layers"][0]["packing"]["up_proj"].update(bits=0),
            "layer 1: up_proj: its index's 0 bits in groups of 64 aren't known",
        ),
        (
            lambda said: without(said["layers"][0], "up_proj"),
            "layer 1: up_proj: has no weight in its records",
        ),
        (
            lambda said: said["layers"][0].update(experts=3, xxh3=["0"] * 3),
            "layer 1: has 3 experts where config.json says 4",
        ),
        (
            lambda said: [field["shape"].reverse() for field in said["layers"][0]["fields"]],
            "layer 1: gate_proj.scales is BF16 [4, 128] where ",
        ),
        (lambda said: said["layers"][0].update(file="x\0y"), "'x\\x00y' is no file of this folder"),
        (lambda said: said["layers"][0].update(file="experts/\0"), "'experts/\\x00' is no file of this"),
        (
            lambda said: said["layers"][0].update(file="experts/1\n"),
            "'experts/1\\n' is no file of this folder",
        ),
        (lambda said: said["layers"][0].update(file="experts/../x"), "'experts/../x' is no file of this"),
        (
            lambda said: said["layers"][0].update(file="config.json"),
            "'config.json' is no file of this folder",
        ),
        (
            lambda said: said["layers"][0].update(file="/etc/passwd"),
            "'/etc/passwd' is no file of this folder",
        ),
        (
            lambda said: said["layers"][1].update(file="experts/001.bin"),
            "layers 1 and 2 are both in experts/",
        ),
        (lambda said: said["dense"][0].update(name="dense-\0.safetensors"), "\\x00.safetensors' is no file"),
        (lambda said: said["dense"][0].update(name="experts/001.bin"), "'experts/001.bin' is no file of"),
        (
            lambda said: said["layers"][0].update(module="model.layers.0.mlp.switch_mlp"),
            "layer 1: its module is 'model.layers.0.mlp.switch_mlp' where 'model.layers.1.mlp.switch_mlp' is",
        ),
        (
            lambda said: said["layers"][1].update(module="model.layers.1.mlp.switch_mlp"),
            "layer 2: its module is 'model.layers.1.mlp.switch_mlp' where 'mtp.mlp.switch_mlp' is due",
        ),
        (lambda said: said["layers"][1].update(layer=3), "layer 3: config.json says 2 layers and a draft"),
        (lambda said: said["dense"].pop(), "lists other dense-*.safetensors than are there"),
    ],
)
def test_an_index_that_contradicts_itself_or_the_folder_is_refused(
    folder: Path, how: Callable[[dict[str, Any]], Any], said: str
) -> None:
    change(folder, how)
    assert re.search(re.escape(said), refusal(folder))


@pytest.mark.parametrize("name", [records.INDEX_FILE, "experts/001.bin", "dense-00001.safetensors"])
def test_what_only_has_a_files_name_is_refused_as_what_it_is(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert re.fullmatch(rf"{re.escape(name)}: .*no(t a)? regular file", refusal(folder))


def test_damaged_text_is_told_in_one_line(folder: Path) -> None:
    (folder / records.INDEX_FILE).write_bytes(b'{"format": "mlxpool-experts", "version": 1, \xff')
    assert refusal(folder).startswith("experts.json: no index of experts: ")
    assert "\n" not in refusal(folder)
    nested = b"[" * 100_000 + b"]" * 100_000
    (folder / records.INDEX_FILE).write_bytes(b'{"format": "mlxpool-experts", "x": ' + nested + b"}")
    assert refusal(folder).startswith("experts.json: no index of experts: ")
