"""A GGUF becomes the model that it was written from: weights, geometry, rope, quantisation, shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from mlx_lm.models import gemma3_text, llama, qwen2, qwen3
from mlx_lm.utils import load_model

from mlxpool.shared import checkpoint
from mlxpool.shared.gguf import parts
from mlxpool.shared.gguf.formats import FORMATS
from mlxpool.shared.gguf.header import GgufError
from mlxpool.shared.gguf.plan import Dtype, plan
from mlxpool.worker.gguf import values, write
from mlxpool.worker.gguf.convert import convert
from tests.tools import gguf_files
from tests.tools.gguf_files import FFN, HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, Model, random_weights
from tests.tools.starter_fixture import starter_gguf

IDS = mx.array([[1, 250, 7, 7, 99, 31]])
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": FFN,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip


def original(architecture: str, **changed: Any) -> Any:
    """mlx-lm's model of that family as its makers would publish it, not as a GGUF holds it."""
    fields = COMMON | changed
    if architecture == "llama":
        return llama.Model(llama.ModelArgs(model_type="llama", **fields))
    if architecture == "qwen2":
        del fields["head_dim"]
        return qwen2.Model(qwen2.ModelArgs(model_type="qwen2", tie_word_embeddings=True, **fields))
    if architecture == "qwen3":
        return qwen3.Model(qwen3.ModelArgs(model_type="qwen3", tie_word_embeddings=True, **fields))
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text", sliding_window=16, query_pre_attn_scalar=HEAD, **fields
        )
    )


def logits(model: Any, weights: dict[str, Any] | None = None) -> np.ndarray[Any, Any]:
    if weights is not None:
        loaded = {name: mx.array(value) for name, value in weights.items()}
        model.load_weights(list(model.sanitize(loaded).items()), strict=True)
    return np.array(model(IDS))


def imported(path: Path, tmp_path: Path, dtype: Dtype = "float32") -> Any:
    """The model loaded from the folder that an import writes."""
    out = tmp_path / f"out-{dtype}"
    convert(path, out, dtype, lambda done, total: None)
    checkpoint.read(out)
    model, _ = load_model(out)
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_each_familys_import_computes_what_the_original_does(tmp_path: Path, architecture: str) -> None:
    weights = random_weights(architecture)
    pattern = {}
    if architecture == "gemma3":
        # mlx-lm's Gemma needs as many layers as its pattern is long.
        pattern = {"gemma3.attention.sliding_window_pattern": 2}
    path = gguf_files.write(tmp_path / "m.gguf", Model(architecture, weights, pattern))
    changed = {"sliding_window_pattern": 2} if pattern else {}
    expected = logits(original(architecture, **changed), weights)
    np.testing.assert_allclose(logits(imported(path, tmp_path)), expected, atol=2e-5)


def test_an_output_of_its_own_is_not_tied(tmp_path: Path) -> None:
    head = np.random.default_rng(9).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    weights = random_weights("llama") | {"lm_head.weight": head}
    path = gguf_files.write(tmp_path / "m.gguf", Model("llama", weights))
    expected = logits(original("llama", tie_word_embeddings=False), weights)
    np.testing.assert_allclose(logits(imported(path, tmp_path)), expected, atol=2e-5)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_rope_factors_are_told_from_their_tensor(tmp_path: Path, factor: float) -> None:
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = original("llama", rope_scaling=scaling, rope_theta=500000.0)
    plain = 500000.0 ** (np.arange(0, HEAD, 2) / HEAD)
    factors = (np.array(model.layers[0].self_attn.rope._freqs) / plain).astype(np.float32)
    assert factors.max() == pytest.approx(factor)
    weights = random_weights("llama")
    path = gguf_files.write(
        tmp_path / "m.gguf",
        Model("llama", weights, {"llama.rope.freq_base": 500000.0}, extra={"rope_freqs.weight": factors}),
    )
    assert plan(parts.read_all(path, with_long_lists=False), "float32").config["rope_scaling"] == scaling
    np.testing.assert_allclose(logits(imported(path, tmp_path)), logits(model, weights), atol=2e-5)


def test_a_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    weights = random_weights("qwen3")
    scaled = {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 4.0}
    path = gguf_files.write(tmp_path / "m.gguf", Model("qwen3", weights, scaled))
    expected = logits(original("qwen3", rope_scaling={"type": "linear", "factor": 4.0}), weights)
    np.testing.assert_allclose(logits(imported(path, tmp_path)), expected, atol=2e-5)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_native_keeps_the_files_own_numbers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "ROWS_BYTES", 20 * 4 * HIDDEN)
    form = GGMLQuantizationType[name]
    weights = random_weights("llama")
    path = gguf_files.write(tmp_path / "m.gguf", Model("llama", weights, format=form))
    out = tmp_path / "out"
    convert(path, out, "native", lambda done, total: None)
    config = json.loads((out / "config.json").read_text())
    bits = 8 if name == "Q8_0" else 4
    assert config["quantization"] == {"group_size": 32, "bits": bits}
    stored = mx.load(str(out / "model.safetensors"))
    module = "model.layers.1.mlp.down_proj"
    scales, biases = (stored[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    got = np.array(mx.dequantize(stored[f"{module}.weight"], scales, biases, 32, bits))
    np.testing.assert_array_equal(got, dequantize(quantize(weights[f"{module}.weight"], form), form))
    assert stored["model.norm.weight"].dtype == mx.float16
    load_model(out)


def test_native_without_anything_to_keep_is_refused(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", Model("llama", random_weights("llama")))
    with pytest.raises(GgufError, match="native would keep nothing; take bfloat16"):
        plan(parts.read_all(path, with_long_lists=False), "native")


def test_sixteen_bits_are_rounded_as_mlx_rounds(tmp_path: Path) -> None:
    weights = random_weights("llama")
    # Halfway between two numbers of bfloat16, and of float16: the even one is taken.
    weights["model.norm.weight"][:4] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
    path = gguf_files.write(tmp_path / "m.gguf", Model("llama", weights))
    for dtype in (mx.bfloat16, mx.float16):
        name: Any = str(dtype).removeprefix("mlx.core.")
        out = tmp_path / name
        convert(path, out, name, lambda done, total: None)
        stored = mx.load(str(out / "model.safetensors"))
        for tensor in ("model.embed_tokens.weight", "model.norm.weight"):
            assert mx.array_equal(stored[tensor], mx.array(weights[tensor]).astype(dtype)), tensor
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == name


def test_a_number_beyond_float16_names_its_tensor(tmp_path: Path) -> None:
    weights = random_weights("llama")
    weights["model.norm.weight"][3] = 1e6
    path = gguf_files.write(tmp_path / "m.gguf", Model("llama", weights))
    with pytest.raises(GgufError, match=r"output_norm\.weight holds numbers beyond float16's; take bfloat16"):
        convert(path, tmp_path / "out", "float16", lambda done, total: None)


def test_formats_are_the_packages_and_rows_can_be_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1)
    for number, form in FORMATS.items():
        kind = GGMLQuantizationType(number)
        assert (form.name, form.values, form.size_bytes) == (kind.name, *GGML_QUANT_SIZES[kind])
        width = form.values * (2 if form.values > 1 else 64)
        raw = random.integers(0, 64, (5, width // form.values * form.size_bytes), dtype=np.uint8)
        path = tmp_path / f"{form.name}.gguf"
        path.write_bytes(raw.tobytes())
        source = _tensor(path, (5, width), number, raw.nbytes)
        monkeypatch.setattr(values, "ROWS_BYTES", 2 * 4 * width)
        with path.open("rb") as file:
            got = list(values.plain(file, _piece(source), "float32"))
        assert len(got) == 3, form
        np.testing.assert_array_equal(
            np.frombuffer(b"".join(got), "<f4").reshape(5, width), dequantize(raw, kind)
        )


def _tensor(path: Path, shape: tuple[int, ...], number: int, size_bytes: int) -> Any:
    from mlxpool.shared.gguf.header import TensorInfo

    return TensorInfo("t", shape, number, path, 0, size_bytes)


def _piece(source: Any) -> Any:
    from mlxpool.shared.gguf.plan import Piece

    return Piece("t.weight", source, "none", 0, 4 * source.elements)


def test_a_large_model_is_cut_into_files_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "SHARD_BYTES", 60_000)
    weights = random_weights("llama")
    path = gguf_files.write(tmp_path / "m.gguf", Model("llama", weights))
    told: list[tuple[int, int]] = []
    convert(path, tmp_path / "out", "float32", lambda done, total: told.append((done, total)))
    found = checkpoint.read(tmp_path / "out")
    assert len(found.files) > 2
    assert found.files[0].startswith("model-00001-of-0000")
    assert told[0] == (0, found.weights_bytes)
    assert told[-1] == (found.weights_bytes, found.weights_bytes)
    stored: dict[str, mx.array] = {}
    for name in found.files:
        stored |= mx.load(str(tmp_path / "out" / name))
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        np.testing.assert_array_equal(np.array(stored[name]), weights[name])


def test_parts_are_one_model(tmp_path: Path) -> None:
    weights = random_weights("llama")
    first = {name: value for name, value in weights.items() if "layers.1" not in name}
    rest = {name: value for name, value in weights.items() if name not in first}
    gguf_files.write(tmp_path / "m-00001-of-00002.gguf", Model("llama", first))
    second = gguf_files.write(tmp_path / "m-00002-of-00002.gguf", Model("llama", rest))
    assert parts.stem(second) == "m"
    np.testing.assert_allclose(
        logits(imported(second, tmp_path)), logits(original("llama"), weights), atol=2e-5
    )
    second.unlink()
    with pytest.raises(GgufError, match=r"of 2 parts 1 are missing, first m-00002-of-00002\.gguf"):
        parts.read_all(tmp_path / "m-00001-of-00002.gguf", with_long_lists=False)


@pytest.mark.starter
def test_the_starters_weights_are_what_mlx_reads_in_the_file(starter_folder: Path) -> None:
    loaded: Any = mx.load(str(starter_gguf()), format="gguf")
    stored = mx.load(str(starter_folder / "model.safetensors"))
    for stem, module in (
        ("token_embd", "model.embed_tokens"),
        ("blk.0.attn_q", "model.layers.0.self_attn.q_proj"),
        ("blk.29.ffn_down", "model.layers.29.mlp.down_proj"),
        ("output_norm", "model.norm"),
    ):
        weight = loaded[f"{stem}.weight"]
        if f"{stem}.scales" in loaded and f"{module}.scales" not in stored:
            scales, biases = (loaded[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            bits = weight.shape[-1] * 32 // (scales.shape[-1] * 32)
            weight = mx.dequantize(weight, scales, biases, 32, bits)
        assert mx.array_equal(stored[f"{module}.weight"], weight), stem
