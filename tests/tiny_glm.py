"""Tiny GLM-5.2 folders: the architecture with every part that the real one has, in 16 experts and 7 layers.

`weights` gives random numbers under the names of the original checkpoint; the writers put them on disk in
the forms that a mixture of experts is found in: `write_stacked` as MLX has it, `write_experts` as published
(one tensor per expert; plain, or fp8 in blocks), `write_container` as colibri converts it, `write_records` as
our own converter does. All of them cut the tensors into several files without regard to layers, so that a
layer's experts lie in more than one.
Every folder has the tokenizer of tiny_models: a prompt is one token per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mlxpool.shared.colibri import layout, records
from tests.tiny_files import Stored, cut, write_folder

Floats = npt.NDArray[np.float32]
Weights = dict[str, Floats]
FloatType = Literal["F32", "F16", "BF16"]

VOCAB_SIZE = 288
EOS_IDS = [258, 280, 281]
GROUP_SIZE = 64
FP8_BLOCK = 128
FP8_LARGEST = 448.0

# Never packed into fewer bits: vectors, and the router whose small differences decide.
_WHOLE = ("norm.weight", "norm.bias", "mlp.gate.weight", "e_score_correction_bias")


def config(**overrides: Any) -> dict[str, Any]:
    """config.json. Layer 0 is dense; attention is sparse beyond 32 tokens; layer 7 is the draft layer's."""
    return {
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 64,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "head_dim": 32,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "first_k_dense_replace": 1,
        "index_head_dim": 64,
        "index_n_heads": 4,
        "index_topk": 32,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "indexer_types": ["full"] * 3 + ["shared"] * 3 + ["full"],
        "indexer_rope_interleave": True,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "bos_token_id": 257,
        "eos_token_id": EOS_IDS,
        "pad_token_id": 256,
        "dtype": "bfloat16",
        **overrides,
    }


def weights(config: Mapping[str, Any], seed: int = 7) -> Weights:
    """The numbers, by the names of the original checkpoint, in its order, the draft layer's included.

    Wide enough that routing changes from token to token and greedy text does not repeat itself.
    """
    draw = np.random.default_rng(seed)
    made: Weights = {}

    def matrix(name: str, out: int, into: int, gain: float = 1.0) -> None:
        made[name] = (draw.standard_normal((out, into), np.float32) * np.float32(gain / into**0.5)).astype(
            np.float32
        )

    def norm(name: str, size: int) -> None:
        made[name] = (1 + 0.1 * draw.standard_normal(size, np.float32)).astype(np.float32)

    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layers = config["num_hidden_layers"]
    readable = _readable(vocab)
    matrix("model.embed_tokens.weight", vocab, hidden, gain=hidden**0.5)
    for index in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{index}"
        norm(f"{prefix}.input_layernorm.weight", hidden)
        norm(f"{prefix}.post_attention_layernorm.weight", hidden)
        types = config["indexer_types"]
        _attention(config, f"{prefix}.self_attn", matrix, norm)
        if index >= layers or types[index] == "full":
            _indexer(config, f"{prefix}.self_attn.indexer", matrix, norm)
            made[f"{prefix}.self_attn.indexer.k_norm.bias"] = np.float32(0.1) * draw.standard_normal(
                config["index_head_dim"], np.float32
            )
        if index < config["first_k_dense_replace"]:
            _feed_forward(f"{prefix}.mlp", hidden, config["intermediate_size"], matrix)
            continue
        experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
        matrix(f"{prefix}.mlp.gate.weight", experts, hidden, gain=2.0)
        made[f"{prefix}.mlp.gate.e_score_correction_bias"] = np.float32(0.05) * draw.standard_normal(
            experts, np.float32
        )
        for expert in range(experts):
            _feed_forward(f"{prefix}.mlp.experts.{expert}", hidden, inner, matrix, gain=1.5)
        _feed_forward(f"{prefix}.mlp.shared_experts", hidden, inner * config["n_shared_experts"], matrix)
        if index >= layers:
            matrix(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)
            for name in ("enorm", "hnorm", "shared_head.norm"):
                norm(f"{prefix}.{name}.weight", hidden)
    norm("model.norm.weight", hidden)
    matrix("lm_head.weight", vocab, hidden, gain=2.5)
    made["lm_head.weight"] *= readable
    return made


def _readable(vocab: int) -> Floats:
    """Per token [vocab, 1]: whole for what reads as text, small for other bytes and special tokens."""
    from tests.tools.tiny_models import tokenizer

    made = tokenizer()
    scales = np.full((vocab, 1), 0.2, np.float32)
    for token in range(min(vocab, made.get_vocab_size())):
        letter = made.id_to_token(token)
        if len(letter) == 1 and (" " < letter <= "~" or letter in "ĠĊ"):
            scales[token] = 1.0
    return scales


def _attention(config: Mapping[str, Any], prefix: str, matrix: Any, norm: Any) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    matrix(f"{prefix}.q_a_proj.weight", query, hidden)
    norm(f"{prefix}.q_a_layernorm.weight", query)
    matrix(f"{prefix}.q_b_proj.weight", heads * (nope + rope), query, gain=2.0)
    matrix(f"{prefix}.kv_a_proj_with_mqa.weight", latent + rope, hidden)
    norm(f"{prefix}.kv_a_layernorm.weight", latent)
    matrix(f"{prefix}.kv_b_proj.weight", heads * (nope + value), latent)
    matrix(f"{prefix}.o_proj.weight", hidden, heads * value, gain=1.5)


def _indexer(config: Mapping[str, Any], prefix: str, matrix: Any, norm: Any) -> None:
    heads, size = config["index_n_heads"], config["index_head_dim"]
    matrix(f"{prefix}.wq_b.weight", heads * size, config["q_lora_rank"])
    matrix(f"{prefix}.wk.weight", size, config["hidden_size"])
    norm(f"{prefix}.k_norm.weight", size)
    matrix(f"{prefix}.weights_proj.weight", heads, config["hidden_size"])


def _feed_forward(prefix: str, hidden: int, inner: int, matrix: Any, gain: float = 1.0) -> None:
    matrix(f"{prefix}.gate_proj.weight", inner, hidden, gain=gain)
    matrix(f"{prefix}.up_proj.weight", inner, hidden, gain=gain)
    matrix(f"{prefix}.down_proj.weight", hidden, inner, gain=gain)


def write_stacked(
    folder: Path,
    config: Mapping[str, Any],
    numbers: Mapping[str, Floats],
    *,
    bits: int | None = 4,
    dtype: FloatType = "BF16",
    mode: str = "affine",
    mtp: bool = False,
    shards: int = 3,
) -> Path:
    """As mlx-lm writes it: experts in one tensor per projection, kv_b_proj in two, packed by `mx.quantize`.

    mtp: keep the draft layer, which mlx-lm drops.
    """
    tensors, said = _as_mlx(config, numbers, bits, dtype, mode, mtp)
    return write_folder(folder, said, cut(tensors, shards, "model"), index=True)


def _as_mlx(
    config: Mapping[str, Any],
    numbers: Mapping[str, Floats],
    bits: int | None,
    dtype: FloatType,
    mode: str,
    mtp: bool,
) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Tensors and config.json."""
    group = 32 if mode == "mxfp4" else GROUP_SIZE
    tensors: dict[str, Stored] = {}
    for name, number in _stacked(config, numbers, mtp).items():
        if bits is None or name.endswith(_WHOLE):
            tensors[name] = _whole(name, number, dtype)
        else:
            tensors |= _quantised(name, number, dtype, group, bits, mode)
    said = dict(config)
    if bits is not None:
        said["quantization"] = {"group_size": group, "bits": bits, "mode": mode}
        said["quantization_config"] = said["quantization"]
    return tensors, said


def write_records(
    folder: Path,
    config: Mapping[str, Any],
    numbers: Mapping[str, Floats],
    *,
    bits: int | None = 4,
    dtype: FloatType = "BF16",
    mode: str = "affine",
    mtp: bool = True,
) -> Path:
    """As `mlxpool colibri convert` writes it, with the numbers of `write_stacked`. Its hashes are none."""
    tensors, said = _as_mlx(config, numbers, bits, dtype, mode, mtp)
    own = said.get("quantization", {"group_size": 0, "bits": None, "mode": "affine"})
    packing = layout.Quantised(own["mode"], own["bits"], own["group_size"])
    if bits is None:
        packing = layout.Quantised("float", 32 if dtype == "F32" else 16)
    (folder / records.EXPERTS_FOLDER).mkdir(parents=True, exist_ok=True)
    layers = []
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"] + mtp):
        module = f"model.layers.{layer}.mlp.switch_mlp"
        parts = {name: tensors.pop(name) for name in list(tensors) if name.startswith(module)}
        fields = []
        for name in sorted(parts, key=_record_order):
            projection, part = name.removeprefix(f"{module}.").split(".")
            offset = fields[-1].offset + fields[-1].size_bytes if fields else 0
            one = parts[name]
            size = one.data.nbytes // one.shape[0]
            fields.append(records.Field(projection, part, one.dtype, one.shape[1:], offset, size))
        size = fields[-1].offset + fields[-1].size_bytes
        stride = records.record_stride(size)
        file = f"{records.EXPERTS_FOLDER}/{layer:03}.bin"
        experts = config["n_routed_experts"]
        with (folder / file).open("wb") as out:
            for expert in range(experts):
                ordered = sorted(parts, key=_record_order)
                raw = b"".join(np.ascontiguousarray(parts[name].data[expert]).tobytes() for name in ordered)
                out.write(raw.ljust(stride, b"\0"))
        is_draft = layer >= config["num_hidden_layers"]
        layers.append(
            records.RecordLayer(
                layer,
                "mtp.mlp.switch_mlp" if is_draft else module,
                file,
                experts,
                size,
                stride,
                tuple(fields),
                dict.fromkeys(layout.PROJECTIONS, packing),
                ("0" * 16,) * experts,
            )
        )
    files = cut(tensors, 2, "dense")
    write_folder(folder, said, files, index=False)
    dense = tuple(records.WrittenFile(name, (folder / name).stat().st_size, "0" * 16) for name in files)
    recipe = records.Recipe(bits, own["group_size"], own["mode"])
    index = records.RecordIndex(
        records.FORMAT, records.VERSION, config["model_type"], tuple(layers), dense, (), recipe
    )
    (folder / records.INDEX_FILE).write_bytes(records.encode(index))
    return folder


def _record_order(name: str) -> tuple[int, int]:
    projection, part = name.split(".")[-2:]
    return layout.PROJECTIONS.index(projection), ("weight", "scales", "biases").index(part)


def _stacked(config: Mapping[str, Any], numbers: Mapping[str, Floats], mtp: bool) -> Weights:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    made: Weights = {}
    for name, number in numbers.items():
        if not mtp and _layer(name) >= layers:
            continue
        if ".mlp.experts." in name:
            prefix, rest = name.split(".experts.")
            expert, rest = rest.split(".", 1)
            if expert == "0":
                each = range(config["n_routed_experts"])
                made[f"{prefix}.switch_mlp.{rest}"] = np.stack(
                    [numbers[f"{prefix}.experts.{one}.{rest}"] for one in each]
                )
        elif name.endswith("kv_b_proj.weight"):
            prefix = name.removesuffix(".kv_b_proj.weight")
            both = number.reshape(heads, -1, number.shape[-1])
            nope = config["qk_nope_head_dim"]
            made[f"{prefix}.embed_q.weight"] = np.ascontiguousarray(both[:, :nope].swapaxes(1, 2))
            made[f"{prefix}.unembed_out.weight"] = np.ascontiguousarray(both[:, nope:])
        else:
            made[name] = number
    return made


def _quantised(
    name: str, number: Floats, dtype: FloatType, group: int, bits: int, mode: str
) -> dict[str, Stored]:
    import mlx.core as mx

    types = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    made = mx.quantize(mx.array(number).astype(types[dtype]), group_size=group, bits=bits, mode=mode)
    prefix = name.removesuffix("weight")
    return {
        prefix + part: _of_mlx(array)
        for part, array in zip(("weight", "scales", "biases"), made, strict=False)
    }


def _of_mlx(array: Any) -> Stored:
    import mlx.core as mx

    names = {mx.uint32: "U32", mx.uint8: "U8", mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return Stored(names[array.dtype], tuple(array.shape), np.array(plain))


def write_experts(
    folder: Path,
    config: Mapping[str, Any],
    numbers: Mapping[str, Floats],
    *,
    dtype: FloatType = "BF16",
    fp8: bool = False,
    mtp: bool = True,
    shards: int = 5,
    index: bool = True,
) -> Path:
    """As published: one tensor per expert. fp8: matrices in blocks of 128 × 128, their scales beside them."""
    tensors: dict[str, Stored] = {}
    for name, number in numbers.items():
        if not mtp and _layer(name) >= config["num_hidden_layers"]:
            continue
        whole = name.endswith((*_WHOLE, "weights_proj.weight", "eh_proj.weight")) or _layer(name) < 0
        if fp8 and not whole:
            tensors[name], tensors[f"{name}_scale_inv"] = _fp8(number)
        else:
            tensors[name] = _whole(name, number, dtype)
    said = dict(config)
    if fp8:
        said["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    return write_folder(folder, said, cut(tensors, shards, "model"), index=index)


def _fp8(number: Floats) -> tuple[Stored, Stored]:
    import mlx.core as mx

    out, into = number.shape
    rows, columns = -(-out // FP8_BLOCK), -(-into // FP8_BLOCK)
    padded = np.zeros((rows * FP8_BLOCK, columns * FP8_BLOCK), np.float32)
    padded[:out, :into] = number
    blocks = padded.reshape(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scales = np.maximum(np.abs(blocks).max(axis=(1, 3)) / FP8_LARGEST, 1e-8).astype(np.float32)
    scaled = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:out, :into]
    packed = np.array(mx.to_fp8(mx.array(scaled)))
    return Stored("F8_E4M3", number.shape, packed), Stored("F32", scales.shape, scales)


def write_container(
    folder: Path,
    config: Mapping[str, Any],
    numbers: Mapping[str, Floats],
    *,
    scheme: Literal["row", "grouped"] = "row",
    mtp: bool = True,
    indexer: bool = True,
    shards: int = 3,
) -> Path:
    """As colibri converts it: bytes without a shape and float32 scales under `.qs`.

    The main model is of 4 bits, embedding and head of 8, the draft layer and the indexers of 8 per row, in
    files of their own. The draft layer's indexer is left out, as there.
    """
    layers = config["num_hidden_layers"]
    main: dict[str, Stored] = {}
    drafts: dict[str, Stored] = {}
    indexers: dict[str, Stored] = {}
    for name, number in numbers.items():
        layer, of_indexer = _layer(name), ".indexer." in name
        if layer >= layers and of_indexer:
            continue
        home = indexers if of_indexer else drafts if layer >= layers else main
        if name.endswith(_WHOLE):
            home[name] = _whole(name, number, "F32")
        elif of_indexer or layer >= layers or layer < 0:
            home[name], home[f"{name}.qs"] = packed_8(number)
        else:
            home[name], home[f"{name}.qs"] = packed_4(number, GROUP_SIZE if scheme == "grouped" else None)
    files = cut(main, shards, "out", sort=True)
    if mtp:
        files |= cut(drafts, 2, "out-mtp", sort=True)
    if indexer:
        files |= cut(indexers, 1, "out-idx", sort=True)
    return write_folder(folder, config, files, index=False)


def packed_8(number: Floats) -> tuple[Stored, Stored]:
    """Signed bytes [out * in] and one scale per row."""
    scales = np.maximum(np.abs(number).max(axis=1) / 127, 1e-8).astype(np.float32)
    packed = np.clip(np.rint(number / scales[:, None]), -128, 127).astype(np.int8)
    return _flat("U8", packed), _flat("F32", scales)


def packed_4(number: Floats, group: int | None) -> tuple[Stored, Stored]:
    """Half bytes [out * in / 2], the even input in the lower half, and one scale per row or group."""
    out, into = number.shape
    grouped = number.reshape(out, -1, group or into)
    scales = np.maximum(np.abs(grouped).max(axis=2) / 7, 1e-8).astype(np.float32)
    halves = np.clip(np.rint(grouped / scales[:, :, None]), -8, 7).astype(np.int8).reshape(out, into) + 8
    packed = halves[:, 0::2].astype(np.uint8) | halves[:, 1::2].astype(np.uint8) << 4
    return _flat("U8", packed), _flat("F32", scales)


def _flat(dtype: str, array: npt.NDArray[Any]) -> Stored:
    return Stored(dtype, (array.size,), array)


def _whole(name: str, number: Floats, dtype: FloatType) -> Stored:
    if name.endswith("e_score_correction_bias"):
        dtype = "F32"
    cast: dict[FloatType, Callable[[Floats], npt.NDArray[Any]]] = {
        "F32": lambda one: one,
        "F16": lambda one: one.astype(np.float16),
        "BF16": _brain_float,
    }
    return Stored(dtype, number.shape, cast[dtype](number))


def _brain_float(number: Floats) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded to even."""
    raw = np.ascontiguousarray(number).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1
