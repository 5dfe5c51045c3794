"""What a model folder says, and how each way of being broken is told."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared import checkpoint
from mlxpool.shared.checkpoint import CheckpointError, Tensor
from mlxpool.shared.model_facts import model_facts
from tests.tools.model_folders import LLAMA_CONFIG, header_of, write_model, write_safetensors


def fault(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(folder)
    return str(caught.value)


def test_a_whole_folder_is_described_from_its_headers(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "m", {"a.weight": ("BF16", (4, 8)), "b": ("U8", ()), "c": ("F32", (0, 3))}
    )
    read = checkpoint.read(folder)
    assert read.model_type == "llama"
    assert read.config == LLAMA_CONFIG
    assert read.files == ("model.safetensors",)
    assert read.tensors == {
        "a.weight": Tensor("BF16", (4, 8), 64),
        "b": Tensor("U8", (), 1),
        "c": Tensor("F32", (0, 3), 0),
    }
    assert read.weights_bytes == 65


def shards(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "m", {"a": ("F16", (2,))}, file="model-1.safetensors")
    write_safetensors(folder / "model-2.safetensors", header_of({"b": ("F16", (3,))}))
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / checkpoint.INDEX_FILE).write_text(json.dumps(index))
    return folder


def test_shards_add_up(tmp_path: Path) -> None:
    read = checkpoint.read(shards(tmp_path))
    assert read.files == ("model-1.safetensors", "model-2.safetensors")
    assert read.weights_bytes == 10


def test_a_shard_that_the_index_lists_must_be_there(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    (folder / "model-2.safetensors").unlink()
    assert fault(folder) == (
        "model.safetensors.index.json: lists 'model-2.safetensors', which is not in the folder"
    )


def test_an_index_must_agree_with_the_shards(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    index = {"weight_map": {"a": "model-2.safetensors"}}
    (folder / checkpoint.INDEX_FILE).write_text(json.dumps(index))
    assert fault(folder).endswith("lists tensor 'a' in model-2.safetensors, which does not hold it")
    (folder / checkpoint.INDEX_FILE).write_text("[]")
    assert fault(folder).startswith("model.safetensors.index.json: no safetensors index: ")


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    write_safetensors(folder / "model-3.safetensors", header_of({"b": ("F16", (3,))}))
    assert fault(folder) == "model-3.safetensors: tensor 'b' is in model-2.safetensors already"


def test_missing_parts_are_named(tmp_path: Path) -> None:
    assert fault(tmp_path / "gone") == "gone: can't be listed: No such file or directory"
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    assert fault(folder) == (
        "m: no tokenizer: none of tokenizer.json, tokenizer.model, tokenizer_config.json"
    )
    (folder / "model.safetensors").unlink()
    assert fault(folder) == "m: no model*.safetensors file in the folder"
    (folder / "config.json").unlink()
    assert fault(folder) == "m: no config.json in the folder"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"{", "config.json: no JSON object: "),
        (b"[]", "config.json: no JSON object: "),
        (b"\xff", "config.json: no JSON object: "),
        (b"{}", "config.json: has no model_type"),
        (b'{"model_type": 3}', "config.json: has no model_type"),
    ],
)
def test_a_config_must_name_an_architecture(tmp_path: Path, config: bytes, message: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_bytes(config)
    assert fault(folder).startswith(message)


@pytest.mark.parametrize(("extra", "message"), [(-1, "1 byte shorter"), (3, "3 bytes longer")])
def test_a_file_of_another_length_than_its_header_says(tmp_path: Path, extra: int, message: str) -> None:
    folder = write_model(tmp_path / "m")
    header = header_of({"a": ("F16", (8,))})
    write_safetensors(folder / "model.safetensors", header, 16 + extra)
    assert fault(folder) == f"model.safetensors: {message} than its header says"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut short within its header: 0 bytes"),
        (b"\x01\x02", "cut short within its header: 2 bytes"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "cut short within its header: 10 bytes"),
        ((3).to_bytes(8, "little") + b"{]}", "its header is no safetensors header: "),
        ((2).to_bytes(8, "little") + b"[]", "its header is no safetensors header: "),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "its header is no safetensors header: "),
        ((4).to_bytes(8, "little") + b'"\xff"}', "its header is no safetensors header: "),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    assert fault(folder).startswith("model.safetensors: ")
    assert message in fault(folder)


def test_a_header_longer_than_the_formats_limit_is_not_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    with (folder / "model.safetensors").open("wb") as file:
        file.write((checkpoint.MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(checkpoint.MAX_HEADER_BYTES + 100)
    assert "model.safetensors: no safetensors file" in fault(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "Q4", "shape": [8], "data_offsets": [0, 16]}, "has the unknown type 'Q4'"),
        (
            {"dtype": "F16", "shape": [-8], "data_offsets": [0, 16]},
            "impossible shape or range: [-8], 0",
        ),
        ({"dtype": "F16", "shape": [8], "data_offsets": [16, 0]}, "impossible shape or range: [8], 16"),
        ({"dtype": "F16", "shape": [9], "data_offsets": [0, 16]}, "of F16 [9] can't be 16 bytes"),
        ({"dtype": "F16", "shape": [8], "data_offsets": [2, 18]}, "begins at 2 where 0 was due"),
    ],
)
def test_impossible_tensors_are_refused(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    folder = write_model(tmp_path / "m")
    write_safetensors(folder / "model.safetensors", {"a": entry}, 16)
    assert fault(folder).startswith("model.safetensors: tensor 'a' ")
    assert message in fault(folder)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    header = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
    }
    write_safetensors(folder / "model.safetensors", header, 6)
    assert fault(folder) == "model.safetensors: tensor 'b' begins at 2 where 4 was due"


def test_the_stamp_moves_with_every_change_of_a_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    first = checkpoint.stamp(folder)
    assert checkpoint.stamp(folder) == first
    os.utime(folder / "config.json", (1, 1))
    touched = checkpoint.stamp(folder)
    (folder / "tokenizer.json").write_text("{} ")
    grown = checkpoint.stamp(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert len({first, touched, grown, checkpoint.stamp(folder)}) == 4


def test_thirty_shards_are_read_within_ten_milliseconds(tmp_path: Path) -> None:
    # An 80-layer model: 9 tensors a layer over 30 shards.
    names = [f"model.layers.{layer}.part_{part}.weight" for layer in range(80) for part in range(9)]
    folder = write_model(tmp_path / "m", file="model-0.safetensors")
    for shard in range(30):
        spec = dict.fromkeys(names[shard::30], ("BF16", (4, 4)))
        write_safetensors(folder / f"model-{shard}.safetensors", header_of(spec))
    checkpoint.read(folder)
    times_s = []
    for _ in range(7):
        begun = time.perf_counter()
        checkpoint.read(folder)
        times_s.append(time.perf_counter() - begun)
    assert min(times_s) < 0.010


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_pipe_where_a_file_is_due_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert fault(folder) == f"{name}: can't be read: not a regular file"


def test_a_config_that_says_more_layers_than_any_model_has_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", config={**LLAMA_CONFIG, "num_hidden_layers": 10**9})
    with pytest.raises(CheckpointError, match="says 1000000000 layers; no model has more than 4096"):
        model_facts(checkpoint.read(folder))
