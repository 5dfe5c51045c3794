"""GLM-5.2 at its real size without its bytes: headers are written, and files are made as long as they say.

A folder of 400 GB by its sizes takes a few megabytes on the disk. Plans are made of headers alone, so they
come out as of the real folder. `container` is colibri's own form, one scale per row; `stacked` is MLX's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 154_880,
    "hidden_size": 6144,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_theta": 8_000_000.0, "rope_type": "default"},
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [1, 2, 3],
}

_ELEMENT_BYTES = {"U8": 1, "F32": 4, "BF16": 2, "U32": 4}
_SHARDS = 40

Tensor = tuple[str, str, tuple[int, ...]]


def container(folder: Path, bits: int = 4, **overrides: Any) -> Path:
    """int4 per row with embedding, head and the draft layer in int8; no indexer. bits: of the experts."""
    config = {**CONFIG, **overrides}
    main = list(_container_main(config, bits))
    files = {f"out-{at:05d}": main[at::_SHARDS] for at in range(_SHARDS)}
    files["out-mtp-00000"] = list(_container_layer(config, config["num_hidden_layers"], 8, 8, draft=True))
    return _write(folder, config, files)


def stacked(folder: Path, **overrides: Any) -> Path:
    """MLX's affine 4 bits in groups of 64, with indexers and without a draft layer."""
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    config = {**CONFIG, "quantization": quantization, **overrides}
    tensors = list(_stacked(config))
    count = _SHARDS
    files = {f"model-{at + 1:05d}-of-{count:05d}": tensors[at::count] for at in range(count)}
    return _write(folder, config, files)


def _attention(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    yield "q_a_proj", q_rank, hidden
    yield "q_b_proj", heads * (nope + rope), q_rank
    yield "kv_a_proj_with_mqa", kv_rank + rope, hidden
    yield "kv_b_proj", heads * (nope + v), kv_rank
    yield "o_proj", hidden, heads * v


def _mlp(hidden: int, inner: int) -> Iterator[tuple[str, int, int]]:
    yield "gate_proj", inner, hidden
    yield "up_proj", inner, hidden
    yield "down_proj", hidden, inner


def _row(name: str, out: int, into: int, bits: int) -> Iterator[Tensor]:
    yield f"{name}.weight", "U8", (out * into * bits // 8,)
    yield f"{name}.weight.qs", "F32", (out,)


def _norms(config: dict[str, Any], prefix: str) -> Iterator[Tensor]:
    yield f"{prefix}.input_layernorm.weight", "F32", (config["hidden_size"],)
    yield f"{prefix}.post_attention_layernorm.weight", "F32", (config["hidden_size"],)
    yield f"{prefix}.self_attn.q_a_layernorm.weight", "F32", (config["q_lora_rank"],)
    yield f"{prefix}.self_attn.kv_a_layernorm.weight", "F32", (config["kv_lora_rank"],)


def _router(config: dict[str, Any], prefix: str) -> Iterator[Tensor]:
    experts = config["n_routed_experts"]
    yield f"{prefix}.mlp.gate.weight", "F32", (experts, config["hidden_size"])
    yield f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (experts,)


def _container_main(config: dict[str, Any], bits: int) -> Iterator[Tensor]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield from _row("model.embed_tokens", vocab, hidden, 8)
    yield from _row("lm_head", vocab, hidden, 8)
    yield "model.norm.weight", "F32", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        yield from _container_layer(config, layer, 4, bits)


def _container_layer(
    config: dict[str, Any], layer: int, bits: int, expert_bits: int, *, draft: bool = False
) -> Iterator[Tensor]:
    prefix, hidden, inner = f"model.layers.{layer}", config["hidden_size"], config["moe_intermediate_size"]
    yield from _norms(config, prefix)
    for name, out, into in _attention(config):
        yield from _row(f"{prefix}.self_attn.{name}", out, into, bits)
    if layer < config["first_k_dense_replace"]:
        for name, out, into in _mlp(hidden, config["intermediate_size"]):
            yield from _row(f"{prefix}.mlp.{name}", out, into, bits)
        return
    yield from _router(config, prefix)
    for name, out, into in _mlp(hidden, inner * config["n_shared_experts"]):
        yield from _row(f"{prefix}.mlp.shared_experts.{name}", out, into, bits)
    for expert in range(config["n_routed_experts"]):
        for name, out, into in _mlp(hidden, inner):
            yield from _row(f"{prefix}.mlp.experts.{expert}.{name}", out, into, expert_bits)
    if draft:
        yield from _row(f"{prefix}.eh_proj", hidden, 2 * hidden, bits)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{prefix}.{name}.weight", "F32", (hidden,)


def _affine(name: str, *shape: int) -> Iterator[Tensor]:
    *outer, into = shape
    yield f"{name}.weight", "U32", (*outer, into // 8)
    for part in ("scales", "biases"):
        yield f"{name}.{part}", "BF16", (*outer, into // 64)


def _narrow(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    for name, _, shape in tensors:
        yield name, "F32" if name.endswith("bias") else "BF16", shape


def _stacked(config: dict[str, Any]) -> Iterator[Tensor]:
    hidden, inner, heads = (
        config["hidden_size"],
        config["moe_intermediate_size"],
        config["num_attention_heads"],
    )
    for name in ("model.embed_tokens", "lm_head"):
        yield from _affine(name, config["vocab_size"], hidden)
    yield "model.norm.weight", "BF16", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _narrow(_norms(config, prefix))
        for name, out, into in _attention(config):
            if name != "kv_b_proj":
                yield from _affine(f"{prefix}.self_attn.{name}", out, into)
        rank = config["kv_lora_rank"]
        yield from _affine(f"{prefix}.self_attn.embed_q", heads, rank, config["qk_nope_head_dim"])
        yield from _affine(f"{prefix}.self_attn.unembed_out", heads, config["v_head_dim"], rank)
        if layer < 3 or layer % 4 == 2:
            yield from _indexer(config, f"{prefix}.self_attn.indexer")
        if layer < config["first_k_dense_replace"]:
            for name, out, into in _mlp(hidden, config["intermediate_size"]):
                yield from _affine(f"{prefix}.mlp.{name}", out, into)
            continue
        yield from _narrow(_router(config, prefix))
        for name, out, into in _mlp(hidden, inner):
            yield from _affine(f"{prefix}.mlp.shared_experts.{name}", out, into)
            yield from _affine(f"{prefix}.mlp.switch_mlp.{name}", config["n_routed_experts"], out, into)


def _indexer(config: dict[str, Any], prefix: str) -> Iterator[Tensor]:
    heads, head = config["index_n_heads"], config["index_head_dim"]
    yield from _affine(f"{prefix}.wq_b", heads * head, config["q_lora_rank"])
    yield from _affine(f"{prefix}.wk", head, config["hidden_size"])
    yield from _affine(f"{prefix}.weights_proj", heads, config["hidden_size"])
    for part in ("weight", "bias"):
        yield f"{prefix}.k_norm.{part}", "BF16", (head,)


def _write(folder: Path, config: dict[str, Any], files: dict[str, list[Tensor]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    for name, tensors in files.items():
        header: dict[str, Any] = {}
        at = 0
        for tensor, dtype, shape in tensors:
            size = _ELEMENT_BYTES[dtype]
            for width in shape:
                size *= width
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + size)}
            at += size
        raw = json.dumps(header, separators=(",", ":")).encode()
        path = folder / f"{name}.safetensors"
        path.write_bytes(len(raw).to_bytes(8, "little") + raw)
        os.truncate(path, 8 + len(raw) + at)
    return folder
