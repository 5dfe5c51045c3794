"""Adapters by their names and headers alone: sets, files, and whether one fits a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxpool.parent.adapters import Shelf
from mlxpool.parent.library import Library
from mlxpool.shared import adapters, checkpoint
from mlxpool.shared.adapters import AdapterError, Fit
from mlxpool.shared.checkpoint import Tensor
from mlxpool.shared.config import ConfigError, Settings, load
from mlxpool.shared.errors import ApiError
from mlxpool.worker.engine import grouping
from mlxpool.worker.engine.admission import KvCost, LayerKv
from tests.tools import tiny_adapters
from tests.tools.tiny_adapters import LAYERS
from tests.tools.tiny_fixture import TinyModels

LAYER = "model.layers.0.self_attn.q_proj"


def tensor(*shape: int, dtype: str = "F32") -> Tensor:
    return Tensor(dtype, shape, 4)


def described(lora: Any = None, tensors: dict[str, Tensor] | None = None, **config: Any) -> adapters.Adapter:
    """An adapter of a config and tensors that are right but for what is given."""
    parameters = {"rank": 4, "scale": 2.0} if lora is None else lora
    body = json.dumps({"lora_parameters": parameters, **config}).encode()
    pair = {f"{LAYER}.lora_a": tensor(64, 4), f"{LAYER}.lora_b": tensor(4, 32)}
    return adapters.described(body, pair if tensors is None else tensors)


@pytest.mark.parametrize(
    ("text", "ids"), [("none", ()), ("a", ("a",)), ("b+a", ("a", "b")), ("a.b-c_", ("a.b-c_",))]
)
def test_every_spelling_of_a_set_is_one(text: str, ids: tuple[str, ...]) -> None:
    assert adapters.read_set(text) == ids


@pytest.mark.parametrize(
    "text",
    [
        "",
        "+",
        "a+",
        "a+a",
        "none+a",
        ".a",
        "..",
        "a/b",
        "a:b",
        "a b",
        "ä",
        "a\n",
        "a" * 101,
        "+".join("abcdefghi"),
    ],
)
def test_what_names_no_set_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"id|twice|together|joined"):
        adapters.read_set(text)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"lora": {"rank": True, "scale": 1}}, "rank is True"),
        ({"lora": {"rank": 0, "scale": 1}}, "rank is 0"),
        ({"lora": {"rank": 10**9, "scale": 1}}, "rank is 1000000000, but"),
        ({"lora": {"rank": 4}}, "scale is None"),
        ({"lora": {"rank": 4, "scale": 10**400}}, "scale is 1000"),
        ({"lora": {"rank": 4, "scale": "2"}}, "scale is '2'"),
        ({"lora": []}, "no lora_parameters"),
        ({"fine_tune_type": "full"}, "fine_tune_type is 'full'.*fuse it"),
        ({"fine_tune_type": ["lora"]}, "fine_tune_type is"),
        ({"tensors": {}}, "holds no tensors"),
        ({"tensors": {"x.weight": tensor(1)}}, "'x.weight' is no layer's"),
        ({"tensors": {"lora_a": tensor(1, 4)}}, "'lora_a' is no layer's"),
        ({"tensors": {"x.lora_a": tensor(8, 4)}}, "'x' has no lora_b"),
        ({"tensors": {"x.lora_a": tensor(8, 4, dtype="I32")}}, "of type I32"),
        ({"tensors": {"x.lora_a": tensor(8, 4), "x.lora_b": tensor(3, 8)}}, "no low-rank pair"),
        ({"tensors": {"x.lora_a": tensor(0, 4), "x.lora_b": tensor(4, 8)}}, "no low-rank pair"),
        ({"tensors": {"x.lora_a": tensor(4), "x.lora_b": tensor(4)}}, "no low-rank pair"),
    ],
)
def test_what_makes_no_adapter_is_said(how: dict[str, Any], says: str) -> None:
    with pytest.raises(AdapterError, match=says):
        described(**how)


def test_a_config_says_which_model_was_trained() -> None:
    made = described(mlxpool_base="smollm2-135m", model="/somewhere", batch_size=4)
    assert (made.rank, made.scale, made.base, list(made.layers)) == (4, 2.0, "smollm2-135m", [LAYER])
    assert described(mlxpool_base=3).base is None


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        ({f"{LAYER}.weight": tensor(32, 64)}, True),
        ({f"{LAYER}.weight": tensor(64, 32)}, False),
        ({f"{LAYER}.weight": tensor(32, 8, dtype="U32"), f"{LAYER}.scales": tensor(32, 2)}, True),
        ({f"{LAYER}.weight": tensor(32, 9, dtype="U32"), f"{LAYER}.scales": tensor(32, 2)}, False),
        ({"model.layers.0.self_attn.k_proj.weight": tensor(32, 64)}, False),
        ({"transformer.h.0.attn.weight": tensor(32, 64)}, None),
    ],
)
def test_an_adapter_fits_by_the_names_and_sizes_of_layers(
    model: dict[str, Tensor], fits: bool | None
) -> None:
    found = adapters.fit(described(), model)
    assert found.fits is fits
    assert (found == Fit(True)) is bool(fits)


def test_experts_fit_stacked_and_are_unknown_where_files_have_one_each() -> None:
    layer = "model.layers.0.mlp.switch_mlp.up_proj"
    pair = {f"{layer}.lora_a": tensor(2, 4, 64), f"{layer}.lora_b": tensor(2, 32, 4)}
    made = described(tensors=pair)
    assert adapters.fit(made, {f"{layer}.weight": tensor(2, 32, 64)}).fits is True
    assert adapters.fit(made, {f"{layer}.weight": tensor(2, 64, 32)}).fits is False
    assert adapters.fit(made, {"model.layers.0.mlp.experts.0.up_proj.weight": tensor(32, 64)}).fits is None


def test_the_shelf_reads_a_replaced_adapter_and_a_changed_model_anew(
    tiny: TinyModels, tmp_path: Path
) -> None:
    shelf = Shelf(tmp_path / "adapters")
    assert (shelf.ids(), shelf.available(tiny("llama"))) == ([], [])
    tiny_adapters.make(shelf.root / "a")
    (shelf.root / ".staged").mkdir()
    (shelf.root / "none").mkdir()
    models = [tiny("llama"), tiny("quantised")]
    assert shelf.fitting(models) == {model: ["a"] for model in models}
    tiny_adapters.make(shelf.root / "a", rank=2, mlxpool_base="llama")
    (found,) = shelf.available(tiny("llama"))
    assert (found.rank, found.base, found.layers, found.fits) == (2, "llama", 6, True)
    (shelf.root / "a" / "adapters.safetensors").write_bytes(b"short")
    (found,) = shelf.available(tiny("llama"))
    assert (found.fits, found.rank) == (False, None)
    assert "adapters.safetensors" in (found.reason or "")
    assert shelf.available(tmp_path / "no model")[0].fits is False


def test_headers_of_models_are_read_once_however_many_models_and_adapters_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []
    for number in range(12):
        models.append(tmp_path / "models" / f"m{number}")
        weights = {f"{name}.weight": np.zeros(shape[::-1], np.float32) for name, shape in LAYERS.items()}
        models[-1].mkdir(parents=True)
        save_file(weights, models[-1] / "model.safetensors")
        (models[-1] / "config.json").write_text('{"model_type": "llama"}')
        if number:
            (models[-1] / "tokenizer.json").write_text("{}")
    shelf = Shelf(tmp_path / "adapters")
    for name in ("a", "b"):
        tiny_adapters.make(shelf.root / name)
    read: list[str] = []
    whole = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda folder: read.append(folder.name) or whole(folder))
    for _ in range(3):
        # The first one can't be loaded: that is remembered as well.
        assert shelf.fitting(models) == {model: [] if model == models[0] else ["a", "b"] for model in models}
    assert sorted(read) == sorted(model.name for model in models)
    read.clear()
    tiny_adapters.make(shelf.root / "c")
    (models[0] / "tokenizer.json").write_text("{}")
    assert [shelf.fitting([model])[model] for model in models[:2]] == [["a", "b", "c"]] * 2
    assert read == ["m0", "m1"]


def test_a_name_with_an_adapter_is_resolved_where_both_are_there(tiny: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m").symlink_to(tiny("llama"))
    tiny_adapters.make(tmp_path / "adapters" / "a")
    aliases = {"boss": "m:a", "short": "m", "m:late*": "m", "lost": "m:b"}
    library = Library(Settings(home=tmp_path, aliases=aliases), tmp_path / "hf")
    said = {
        name: library.resolved(name).adapter for name in ("m", "m:a", "m:none", "boss", "short:a", "m:latest")
    }
    assert said == {"m": None, "m:a": "a", "m:none": "none", "boss": "a", "short:a": "a", "m:latest": None}
    assert {library.resolve(name).name for name in said} == {"m"}
    for name in ("m:b", "m:a+b", "m:", ":a", "x:a", "boss:a", "lost", "m:../a", "m:" + "a+" * 300):
        with pytest.raises(ApiError) as refused:
            library.resolved(name)
        assert refused.value.code == "model_not_found"


def test_the_setting_is_read_like_a_request(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[models."m"]\nadapters = "b+a"\n')
    assert load(file, {}).model("m").adapters == "b+a"
    for wrong in ('"a+a"', "1", '""', '["a"]'):
        file.write_text(f'[models."m"]\nadapters = {wrong}\n')
        with pytest.raises(ConfigError, match="adapters"):
            load(file, {})


def test_only_groups_of_one_kind_become_one() -> None:
    cost = KvCost((LayerKv(8),))
    groups = [[10], [11], [12]]
    assert grouping.to_merge(groups, cost, 1 << 20) == (0, 1)
    assert grouping.to_merge(groups, cost, 1 << 20, kinds=["a", "", "a"]) == (0, 2)
    assert grouping.to_merge(groups, cost, 1 << 20, kinds=["a", "", "b"]) is None


def test_headers_are_read_as_a_checkpoints(tmp_path: Path) -> None:
    folder = tiny_adapters.make(tmp_path / "a")
    made = adapters.read(folder)
    held = checkpoint.read_header(folder / adapters.WEIGHTS_FILE)
    assert made.size_bytes == sum(one.size_bytes for one in held.values())
