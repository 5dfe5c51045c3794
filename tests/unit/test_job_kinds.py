"""What kinds that compute find wrong with a configuration before anything runs."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxpool.parent.jobs.kinds import estimates, names, quantize
from mlxpool.parent.jobs.kinds.kind import Fault
from tests.tools import tiny_adapters
from tests.tools.tiny_fixture import TinyModels
from tests.unit.job_world import KINDS, Home, home  # noqa: F401  # a fixture

PAIR = {"prompt": "p", "completion": "c"}
SECRET = "hunter2"


def write_lines(path: Path, *lines: Any) -> str:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def m(home: Home, tiny: TinyModels) -> Home:  # noqa: F811
    home.add(tiny("llama"), "m")
    return home


@pytest.mark.parametrize(
    "name",
    [
        "a/b",
        "../x",
        ".x",
        "",
        " x",
        "x ",
        "a:b",
        "a*",
        "a\\b",
        "a\x00b",
        "a\nb",
        "x" * 97,
        "é" * 101,
        "\ud800",
        "-rf",
        "a\u202eb",
    ],
)
def test_a_name_that_is_no_folders_name_is_refused(name: str) -> None:
    problem = names.name_problem(name)
    assert problem is not None
    assert "can't be a model's name" in problem


@pytest.mark.parametrize("name", ["m-8bit", "Modell 8 bit", "模型", "x" * 96, "a.b"])
def test_a_name_of_a_model_is_taken_as_it_is(name: str) -> None:
    assert names.name_problem(name) is None


def test_a_name_that_is_taken_says_how_to_free_it(m: Home) -> None:
    (fault,) = m.faults("quantize", model="m", name="m")
    assert fault.startswith(
        "name: there is a model 'm' already; choose another name, or `mlxpool rm m --home "
    )
    (m.root / "models" / "half").symlink_to("nowhere")
    assert "there is a model 'half' already" in m.faults("quantize", model="m", name="half")[0]


QUANTIZE_FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"bits": 4, "recipe": "mixed_3_6"},
        ["recipe: recipe and bits both say how many bits a layer gets; give one of them"],
    ),
    (
        {"bits": 4, "recipe": "mixed_3_6", "target_bpw": 4.5},
        [
            "recipe: recipe and bits both say how many bits a layer gets; give one of them",
            "target_bpw: target_bpw and bits both say how many bits a layer gets; give one of them",
        ],
    ),
    (
        {"mode": "mxfp4", "bits": 8, "group_size": 64},
        [
            "bits: 8, but mode mxfp4 has 4 bits in groups of 32; leave it out, or use mode affine",
            "group_size: 64, but mode mxfp4 has 4 bits in groups of 32; leave it out, or use mode affine",
        ],
    ),
    (
        {"mode": "nvfp4", "target_bpw": 4},
        ["target_bpw: mode nvfp4 has 4 bits in groups of 16, and no target_bpw; use mode affine"],
    ),
    ({"group_size": 16}, ["group_size: 16 is nvfp4's alone; mode affine takes 32, 64 or 128"]),
    ({"target_bpw": 2.0}, ["target_bpw: 2 can't be met: this model can have 3.10 to 9.08 in groups of 64"]),
    ({"target_bpw": 15}, ["target_bpw: 15 can't be met: this model can have 3.10 to 9.08 in groups of 64"]),
    (
        {"name": "a/b"},
        ["name: 'a/b' can't be a model's name; use at most 96 characters, without / \\ : * and "],
    ),
]


@pytest.mark.parametrize(("config", "faults"), QUANTIZE_FAULTS)
def test_combinations_that_make_no_sense_are_all_named(
    m: Home, config: dict[str, Any], faults: list[str]
) -> None:
    found = m.faults("quantize", model="m", **config)
    assert len(found) == len(faults), found
    for one, wanted in zip(found, faults, strict=True):
        assert one.startswith(wanted)


def test_a_model_that_is_quantised_or_unknown_or_broken_is_not_quantised(m: Home, tiny: TinyModels) -> None:
    m.add(tiny("quantised"), "q")
    (m.add(tiny("llama"), "b") / "config.json").write_text("{")
    assert m.faults("quantize", model="q") == [
        "model: q is quantised already; quantise what it was made from"
    ]
    assert m.faults("quantize", model="mm")[0].startswith(
        "model: no model 'mm' on this server; did you mean m"
    )
    assert m.faults("quantize", model="b")[0].startswith("model: b can't be loaded: config.json: no JSON")


def test_groups_that_divide_no_layers_width_are_refused_with_the_widths(m: Home) -> None:
    assert m.faults("quantize", model="m", group_size=128) == []  # its down projections are 128 wide
    found = names.read_model(m.here.library.resolve("m"))
    assert not isinstance(found, names.Fault)
    replace = msgspec.structs.replace
    tensors = {
        name: replace(tensor, shape=(*tensor.shape[:-1], 48)) if len(tensor.shape) == 2 else tensor
        for name, tensor in found.tensors.items()
    }
    config = quantize.QuantizeConfig(model="m", group_size=32)
    (fault,) = quantize.layer_faults(config, replace(found, tensors=tensors))
    assert fault.message == "32 divides no layer's width of this model (they are 48)"


def test_a_disk_without_room_is_told_before_anything_runs(m: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9, 50_000_000))
    for kind, config in (("quantize", {"model": "m"}), ("finetune", {"model": "m", "data": "d"})):
        if kind == "finetune":
            (m.root / "datasets").mkdir()
            write_lines(m.root / "datasets" / "d.jsonl", *[PAIR] * 8)
        (fault,) = m.faults(kind, **config)
        assert fault.startswith("name: there is not enough room under ")
        assert fault.endswith("MB are needed, 50.0 MB are free")


def test_the_size_of_a_result_is_known_beforehand(m: Home) -> None:
    found = names.read_model(m.here.library.resolve("m"))
    assert not isinstance(found, names.Fault)
    # As tests/unit/test_job_kinds_work.py finds it written.
    assert estimates.quantised_bytes(found, 4, "affine", 32, None) == 70_400


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json\n", "is no JSON object"),
        ("[" * 500_000 + "\n", "is no JSON object"),
        ("[1]\n", "is no JSON object"),
        ("{}\n", "has no text"),
        ({"prompt": "p"}, "has no completion"),
        ({"prompt": "p", "completion": 7}, "has a completion that is no text, or is empty"),
        ({"text": ""}, "has a text that is no text, or is empty"),
        ('{"text": "\\ud800"}\n', "is no JSON object"),
        ({"messages": []}, "has no list of messages"),
        (
            {"messages": [{"role": ["user"], "content": "x"}]},
            "has a message without a role that is known (the 1.)",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "has a message whose content is no text (the 1.)"),
    ],
)
def test_a_bad_line_is_told_by_number_and_reason_alone(
    m: Home, tmp_path: Path, line: Any, reason: str
) -> None:
    data = write_lines(tmp_path / "d.jsonl", *[PAIR] * 8, "\n", line, {"text": SECRET, "n": 1})
    (fault,) = m.faults("finetune", model="m", data=data)
    assert fault.startswith(f"data: d.jsonl: line 10 {reason}. A line is ")
    assert SECRET not in fault


def test_the_first_bad_lines_are_named_and_the_others_counted(m: Home, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", *[{"text": 7}] * 9)
    (fault,) = m.faults("finetune", model="m", data=data)
    assert fault.count("has a text that is no text") == 5
    assert "; and 4 more lines. A line is " in fault


def test_every_fault_of_a_training_is_named_at_once(m: Home, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", *[PAIR] * 4)
    faults = m.faults(
        "finetune", model="m", data=data, batch_size=4, iters=2, grad_accumulation=4, layers=9, name="a+b",
        keys=["q_prj"], resume_adapter="x",
    )  # fmt: skip
    assert [fault.partition(":")[0] for fault in faults] == [
        "grad_accumulation", "layers", "keys", "name", "resume_adapter", "batch_size"
    ]  # fmt: skip
    assert "9, but the model has 2; 0 trains all of them" in faults[1]
    assert faults[5] == (
        "batch_size: 4, but there is too little to fill it: 3 lines (1 of 4 are held back for validation)"
    )


def test_conversations_need_a_template_and_texts_do_not(m: Home, tmp_path: Path) -> None:
    config = m.root / "models" / "m" / "tokenizer_config.json"
    body = json.loads(config.read_text())
    del body["chat_template"]
    config.write_text(json.dumps(body))
    pairs = write_lines(tmp_path / "d.jsonl", *[PAIR] * 8)
    assert m.faults("finetune", model="m", data=pairs) == [
        'data: has conversations, and the model no chat template; give it {"text"} lines'
    ]
    assert m.faults("finetune", model="m", data=write_lines(tmp_path / "t.jsonl", *[{"text": "t"}] * 8)) == []


def test_data_is_a_dataset_by_name_or_a_regular_file_by_its_path(m: Home, tmp_path: Path) -> None:
    (m.root / "datasets").mkdir()
    write_lines(m.root / "datasets" / "songs.jsonl", *[PAIR] * 8)
    assert m.faults("finetune", model="m", data="songs") == []
    for data, message in (
        ("song", "no dataset 'song' here (did you mean songs?); a file is named by its absolute path"),
        ("../datasets/songs", "no dataset '../datasets/songs' here"),
        (str(tmp_path), f"'{tmp_path}' can't be read: "),
        ("/nowhere/x.jsonl", "'/nowhere/x.jsonl' can't be read: No such file"),
        ("/a\x00b", "'/a\\x00b' can't be read: no path"),
        ("x" * 300, "no dataset 'xxx"),
    ):
        (fault,) = m.faults("finetune", model="m", data=data)
        assert fault.startswith(f"data: {message}")
    nothing = write_lines(tmp_path / "nothing.jsonl")
    assert m.faults("finetune", model="m", data=nothing)[0].endswith(" is empty")
    os.mkfifo(tmp_path / "pipe")
    assert "can't be read" in m.faults("finetune", model="m", data=str(tmp_path / "pipe"))[0]


def test_an_evaluation_looks_back_no_further_than_the_model(m: Home, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("abc")
    assert m.faults("evaluate", model="m", file=str(text), context=5000, stride=6000, adapter="x") == [
        "context: 5000, but the model's own is 4096; at most that",
        "stride: 6000 is more than the context of 5000; at most that",
        "adapter: no adapter 'x' here; there are no adapters here yet",
    ]
    assert m.faults("evaluate", model="m", file=str(text)) == []


def test_a_model_named_with_an_adapter_is_not_taken_for_the_model_alone(m: Home, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc")
    tiny_adapters.make(m.root / "adapters" / "a")
    file = str(tmp_path / "t.txt")
    assert m.faults("evaluate", model="m:a", file=file) == [
        "model: 'm:a' is 'm' with an adapter; give 'm' as it is"
    ]
    assert m.faults("evaluate", model="m:none", file=file) == m.faults(
        "evaluate", model="m", adapter="a", file=file
    )
    # Its answers are asked for by name, through the server.
    assert not isinstance(names.find_model("m:a", m.here.library, adapted=True), Fault)


def test_every_field_of_every_kind_says_what_it_is() -> None:
    for kind in KINDS.values():
        (_,), shapes = msgspec.json.schema_components([kind.config])
        fields = shapes[kind.config.__name__]["properties"]
        assert fields
        assert [name for name, shape in fields.items() if not shape.get("description")] == []
        assert set(kind.positional) <= set(fields)


def test_memory_is_asked_for_by_the_weights_and_what_is_computed(m: Home, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", *[PAIR] * 8)
    kind = KINDS["finetune"]

    def needs(**more: Any) -> int:
        config = msgspec.convert({"model": "m", "data": data, **more}, kind.config)
        needs = kind.needs(config, m.here)
        assert needs.gpu
        return int(needs.memory_bytes)

    assert needs() > 160_000_000 + 369_920
    assert needs(batch_size=8) > needs(batch_size=2)
    assert needs(grad_checkpoint=True) < needs()
    # A short line takes what it takes, however long lines might be.
    assert needs(max_seq_length=100_000) == needs()
