"""Which files of a repository are fetched, and when the disk says no."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpool.parent.hub import plan as plans
from mlxpool.parent.hub.names import check_repository, check_revision
from mlxpool.shared.staging import PullError

SIZES = {".safetensors": 1_000_000_000, ".json": 1_000}
BASE = ["config.json", "tokenizer.json", "tokenizer_config.json"]


def remote(path: str) -> plans.RemoteFile:
    size = next((size for ending, size in SIZES.items() if path.endswith(ending)), 10)
    return plans.RemoteFile(path, size, None, f"id-of-{path}")


def chosen(*paths: str) -> list[str]:
    return sorted(file.path for file in plans.choose("org/name", "c0", [remote(p) for p in paths]).files)


@pytest.mark.parametrize(
    ("weights", "left_out"),
    [
        (["model.safetensors"], ["pytorch_model.bin", "consolidated.safetensors", "model.gguf"]),
        (["model.safetensors"], ["model.fp16.safetensors", "adapter_model.safetensors", "onnx/model.onnx"]),
        (["model.safetensors"], ["original/model.safetensors", "vae/model-00001-of-00001.safetensors"]),
        # An index is for the shards; beside a whole file it would name what is not there.
        (["model.safetensors"], ["model.safetensors.index.json"]),
        (
            [
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            ],
            ["model.safetensors", "pytorch_model.bin.index.json", "consolidated.safetensors"],
        ),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            ["model.fp32-00001-of-00001.safetensors"],
        ),
        (["model.bf16.safetensors"], []),
        # What can only be streamed: colibri's containers, and converted experts.
        (["out-00001.safetensors", "out-mtp-00000.safetensors"], ["consolidated.safetensors"]),
        (["model.safetensors"], ["out-00001.safetensors"]),
        (
            ["experts.json", "experts/003.bin", "experts/004.bin", "dense-00001.safetensors"],
            ["out-00001.safetensors", "experts/.hidden"],
        ),
    ],
)
def test_one_set_of_weights_is_chosen(weights: list[str], left_out: list[str]) -> None:
    assert chosen(*BASE, *weights, *left_out) == sorted([*BASE, *weights])


def test_what_a_tokenizer_and_a_template_need_is_chosen_and_code_is_not() -> None:
    wanted = [
        *BASE, "model.safetensors", "generation_config.json", "chat_template.jinja", "tokenizer.model",
        "special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "qwen.tiktoken",
        "additional_chat_templates/rag.jinja", "1_Pooling/config.json", "2_Dense/model.safetensors",
    ]  # fmt: skip
    other = [
        ".gitattributes", "README.md", "LICENSE", "modeling_x.py", "training_args.bin", "figures/a.png",
        ".hidden.json", "runs/config.json", "rust_model.ot", "../config.json", "a/../config.json",
    ]  # fmt: skip
    assert chosen(*wanted, *other) == sorted(wanted)


def test_small_files_come_first() -> None:
    plan = plans.choose("org/name", "c0", [remote(p) for p in ["model.safetensors", *BASE]])
    assert [file.path for file in plan.files] == [*BASE, "model.safetensors"]
    assert (plan.commit, plan.total_bytes) == ("c0", 1_000_003_000)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["model.safetensors", "tokenizer.json"], "has no config.json: it is no model that MLX can load"),
        (
            ["config.json", "tokenizer.json", "m-q4.gguf"],
            "has only GGUF files; download one and `mlxpool import` it",
        ),
        (
            ["config.json", "tokenizer.json", "pytorch_model.bin"],
            "has only PyTorch weights; look for a conversion of it to MLX or safetensors",
        ),
        (
            ["config.json", "tokenizer.json", "adapter_model.safetensors"],
            "has no model*.safetensors (an adapter, or a part of a larger model?)",
        ),
        (["config.json", "tokenizer.json"], "has no weights"),
        (
            ["config.json", "model.safetensors"],
            "has no tokenizer: none of tokenizer.json, tokenizer.model, tokenizer_config.json",
        ),
    ],
)
def test_a_repository_without_a_model_for_us_is_refused(paths: list[str], message: str) -> None:
    with pytest.raises(PullError) as caught:
        chosen(*paths)
    assert str(caught.value) == f"org/name {message}"


def test_a_full_disk_is_told_with_numbers_before_the_first_byte() -> None:
    plan = plans.choose("org/name", "c0", [remote(p) for p in [*BASE, "model.safetensors"]])
    models = Path("/home/models")
    enough = plan.total_bytes + plans.HEADROOM_BYTES
    plans.check_room(plan, 0, enough, models)
    with pytest.raises(PullError) as caught:
        plans.check_room(plan, 0, enough - 1, models)
    assert str(caught.value) == (
        "not enough room under /home/models: org/name has 1.0 GB, 1.3 GB are free and 268.4 MB of these"
        " stay so"
    )
    plans.check_room(plan, 600_000_000, enough - 600_000_000, models)
    with pytest.raises(
        PullError, match=r"has 1\.0 GB, 600\.0 MB of them are here already, 668\.4 MB are free"
    ):
        plans.check_room(plan, 600_000_000, enough - 600_000_001, models)


@pytest.mark.parametrize("name", ["a/b", "mlx-community/Qwen3-8B-4bit", "o_1/m.v2", "1/2"])
def test_names_of_the_hub_are_taken(name: str) -> None:
    check_repository(name)


@pytest.mark.parametrize(
    "name",
    [
        "", "a", "a/", "/a", "a/b/c", "../a", "a/..", ".a/b", "a/.b", "a--b/c", "a/b--c", "a/b c", "a/b\n",
        "a/" + "b" * 97,
    ],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no model of the Hub; use org/name"):
        check_repository(name)


@pytest.mark.parametrize("revision", ["", "-x", "a..b", "a b", "a\nb", "x" * 201])
def test_what_can_be_no_revision_is_refused(revision: str) -> None:
    with pytest.raises(ValueError, match="is no revision; use a branch, a tag or a commit"):
        check_revision(revision)
    check_revision("refs/pr/1")
