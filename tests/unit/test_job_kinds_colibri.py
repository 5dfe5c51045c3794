"""The kind "colibri-convert": what it finds wrong before anything runs, and what its job makes."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mlxpool.parent.cli.colibri_convert import convert_command
from mlxpool.parent.jobs import boot
from mlxpool.parent.jobs.kinds import colibri_convert as kind
from mlxpool.shared.colibri import artifact, records
from mlxpool.worker.jobs import colibri_convert as job
from tests import tiny_files, tiny_glm
from tests.unit.job_world import Home, home  # noqa: F401  # a fixture

CONFIG = tiny_glm.config(num_hidden_layers=3, indexer_types=["full"] * 3, n_routed_experts=4)


@pytest.fixture
def m(home: Home) -> Home:  # noqa: F811
    tiny_glm.write_experts(home.root / "models" / "m", CONFIG, tiny_glm.weights(CONFIG))
    return home


FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"bits": "8", "mode": "mxfp4", "group_size": 64},
        [
            "bits: 8, but mode mxfp4 has 4 bits in groups of 32; leave it out, or use mode affine",
            "group_size: 64, but mode mxfp4 has 4 bits in groups of 32; leave it out, or use mode affine",
        ],
    ),
    (
        {"bits": "none", "mode": "mxfp4", "group_size": 64},
        [
            "group_size: 64, but nothing is packed with bits none; leave it out",
            "mode: mxfp4, but nothing is packed with bits none; leave it out",
        ],
    ),
    (
        {"name": "a/b"},
        ["name: 'a/b' can't be a model's name; use at most 96 characters, without / \\ : * and "],
    ),
    ({"name": "m"}, ["name: there is a model 'm' already; choose another name, or `mlxpool rm m"]),
]


@pytest.mark.parametrize(("config", "faults"), FAULTS)
def test_configurations_that_make_no_sense_are_all_named(
    m: Home, config: dict[str, Any], faults: list[str]
) -> None:
    found = m.faults("colibri-convert", model="m", **config)
    assert len(found) == len(faults), found
    for one, wanted in zip(found, faults, strict=True):
        assert one.startswith(wanted)


def test_models_that_can_not_be_converted_are_refused(m: Home) -> None:
    dense = m.root / "models" / "dense"
    dense.mkdir()
    (dense / "config.json").write_text('{"model_type": "llama"}')
    (dense / "tokenizer.json").write_text("{}")
    matrix = tiny_files.Stored("F32", (2, 2), np.zeros((2, 2), np.float32))
    tiny_files.write_safetensors(dense / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": matrix})
    assert m.faults("colibri-convert", model="dense") == [
        "model: dense has no routed experts; it is no mixture of experts"
    ]
    tiny_glm.write_stacked(m.root / "models" / "packed", CONFIG, tiny_glm.weights(CONFIG))
    assert m.faults("colibri-convert", model="packed", bits="4") == [
        "bits: packed is quantised already, and its weights stay as they are; leave it out"
    ]
    assert m.faults("colibri-convert", model="packed") == []
    tiny_glm.write_container(m.root / "models" / "container", CONFIG, tiny_glm.weights(CONFIG))
    assert m.faults("colibri-convert", model="container") == [
        "model: container is served as it is; there is nothing to convert"
    ]


def test_a_disk_without_room_is_a_fault(m: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 1_000_000))
    (fault,) = m.faults("colibri-convert", model="m")
    assert fault.startswith("name: there is not enough room under ")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, (4, 64, "affine", False)),
        ({"bits": "8"}, (8, 64, "affine", True)),
        ({"group_size": 32}, (4, 32, "affine", True)),
        ({"mode": "mxfp4"}, (4, 32, "mxfp4", True)),
        ({"bits": "none"}, (None, 0, "affine", True)),
    ],
)
def test_defaults_are_filled_in(config: dict[str, Any], wanted: tuple[int | None, int, str, bool]) -> None:
    task = kind.make_task(kind.ColibriConvertConfig(model="m", **config), "/from", "/to")
    assert (task.bits, task.group_size, task.mode, task.given) == wanted


def test_a_job_makes_a_model_of_records_in_the_home(m: Home) -> None:
    result = m.work(job, "colibri-convert", model="m", bits="8")
    folder = m.root / "models" / "m-records"
    assert result["path"] == str(folder)
    assert (result["layers"], result["draft"], result["kept_bytes"]) == (3, True, 0)
    found = artifact.read(folder)
    assert (found.form, found.layers[0].packing["up_proj"].bits) == ("records", 8)
    assert m.here.library.find("m-records") is not None
    assert m.hidden() == []
    assert m.told.shares[-1] == pytest.approx(0.98)


def test_what_a_conversion_can_go_on_with_outlives_the_server(m: Home) -> None:
    stages = [m.root / "models" / f".staging-{name}" for name in ("half", "other")]
    for stage in stages:
        stage.mkdir()
    (stages[0] / records.PROGRESS_FILE).write_text("{}")
    boot.clean_stages(m.root)
    assert [stage.exists() for stage in stages] == [True, False]


def test_the_command_converts_without_a_server_and_says_what_it_made(m: Home, tmp_path: Path) -> None:
    def said(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(convert_command, [*words, "--home", str(m.root)])
        return done.exit_code, done.output

    target = tmp_path / "deep" / "records"
    code, output = said("m", str(target))
    assert code == 0, output
    assert output.splitlines()[-1].startswith(f"{target}: ")
    assert "in 3 layers" in output
    assert artifact.read(target).form == "records"
    code, output = said("nowhere", str(tmp_path / "x"))
    assert code == 2
    assert "'nowhere' is no folder, and no model 'nowhere'" in output
    code, output = said("m", str(target))
    assert code == 1
    assert "is a model already, and nothing is written over" in output
    code, output = said("m", str(tmp_path / "x"), "--bits", "none", "--mode", "mxfp4")
    assert code == 2
    assert "--mode: mxfp4, but nothing is packed with bits none" in output
