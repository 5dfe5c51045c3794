"""The shapes that decide a model's memory, read out of its config.json and tensor table.

Pure. Configs name the same thing in several ways; what matters here is, per layer, how many numbers one
token adds to its cache (`kv_width`), whether the cache stops growing at a window, and what it keeps besides.
Where an architecture is not known to do better, a layer counts as full attention: a plan may be too large,
never too small. Which architectures cap a layer's cache at its window is mlx-lm's doing (those whose model
file builds a rotating cache), not the config's. What a config leaves to its architecture's defaults (as Gemma
3 its heads) is read off the tensors' shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mlxpool.shared.checkpoint import DTYPE_BITS, Checkpoint, CheckpointError, Tensor

# Architectures whose mlx-lm model builds a rotating cache for each "sliding_attention" layer.
_ROTATING_BY_LAYER_TYPE = frozenset(
    {"afmoe", "exaone4", "exaone_moe", "gemma3n_text", "gemma4_text", "gpt_oss"}
    | {"llama", "ministral3", "olmo3"}
)
# Those that take every n-th layer as the global one, and mlx-lm's default n.
_ROTATING_BY_PATTERN = {"gemma3_text": 6, "cohere2": 4}
# Multi-head latent attention: mlx-lm caches the latent and the rotary part, not keys and values per head.
_LATENT = frozenset(
    {"deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"}
    | {"kimi_k2", "longcat_flash", "mistral4", "youtu_llm"}
)
# Attentions of one layer, each with a cache of its own, where there is more than one.
_ATTENTIONS = {"longcat_flash": 2}
_STATE_ONLY = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv7"})
_STATE_LAYER_TYPES = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent"})

# Where nothing says how wide a head is: the narrowest in use, which makes the most of them.
_NARROW_HEAD = 64

# The deepest in use have under two hundred. More is a config that would only cost time.
MAX_LAYERS = 4096
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

_Kind = Literal["full", "sliding", "state", "none"]


class Layer(msgspec.Struct, frozen=True):
    """One layer's cache. kv_width: numbers per token. window: tokens it is capped at. state_bytes: fixed."""

    kv_width: int
    window: int | None = None
    state_bytes: int = 0


class ModelFacts(msgspec.Struct, frozen=True):
    """What a memory plan needs to know of a model.

    weights_bytes: as stored. weights_float32_bytes: as the CPU backend holds them, dequantised.
    float_bytes: of one activation off the CPU backend. max_context: tokens, None where the config is silent.
    """

    model_type: str
    weights_bytes: int
    weights_float32_bytes: int
    float_bytes: int
    hidden: int
    ffn: int
    vocab: int
    heads: int
    max_context: int | None
    layers: tuple[Layer, ...]


def model_facts(checkpoint: Checkpoint) -> ModelFacts:
    """The facts of a checkpoint. Missing numbers count as the largest plausible ones, or as zero width."""
    outer = checkpoint.config
    text = outer.get("text_config")
    config = {**outer, **text} if isinstance(text, dict) else outer
    model_type = str(config.get("model_type", checkpoint.model_type))
    hidden = _number(config, "hidden_size", "n_embd", "d_model", "dim")
    heads = _number(config, "num_attention_heads", "n_head", "n_heads")
    rows = _projection_rows(checkpoint.tensors)
    layers = _number(config, *_LAYER_COUNTS)
    if layers > MAX_LAYERS:
        raise CheckpointError(f"config.json: says {layers} layers; no model has more than {MAX_LAYERS}")
    return ModelFacts(
        model_type=model_type,
        weights_bytes=_stored_bytes(checkpoint.tensors),
        weights_float32_bytes=_float32_bytes(checkpoint.tensors, outer),
        float_bytes=_float_bytes(checkpoint.tensors),
        hidden=hidden,
        ffn=_ffn_width(config, hidden),
        vocab=_number(config, "vocab_size", "n_vocab") or rows["embed_tokens"],
        heads=heads or rows["q_proj"] // (_number(config, "head_dim") or _NARROW_HEAD),
        max_context=_number(config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        or None,
        layers=_layers(config, model_type, hidden, heads, rows["k_proj"] + rows["v_proj"]),
    )


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The first of `names` that holds a positive whole number, 0 where none does."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _projection_rows(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Rows of the language model's widest embedding and q, k and v projections, 0 for what is not there.

    Quantised weights are packed along their columns: rows are the same.
    """
    rows = {"embed_tokens": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0}
    for name, tensor in tensors.items():
        parts = name.split(".")
        is_tower = any("vision" in part or "audio" in part for part in parts)
        if len(parts) > 1 and parts[-1] == "weight" and parts[-2] in rows and tensor.shape and not is_tower:
            rows[parts[-2]] = max(rows[parts[-2]], tensor.shape[0])
    return rows


def _ffn_width(config: Mapping[str, Any], hidden: int) -> int:
    """Numbers per token inside the MLP: the dense one's, or those of a token's experts together."""
    dense = _number(config, "intermediate_size", "n_inner", "ffn_dim")
    experts = _number(config, "num_experts_per_tok", "moe_topk")
    return max(dense, experts * (_number(config, "moe_intermediate_size") or dense)) or 4 * hidden


def _layers(
    config: Mapping[str, Any], model_type: str, hidden: int, heads: int, kv_rows: int
) -> tuple[Layer, ...]:
    count = _number(config, *_LAYER_COUNTS)
    width = _kv_width(config, model_type, hidden, heads) or kv_rows
    window = _number(config, "sliding_window")
    state = _state_bytes(config, hidden)
    kinds: list[_Kind] = [_kind(config, model_type, index, window) for index in range(count)]
    made = {
        "full": Layer(width, None, state if model_type == "falcon_h1" else 0),
        "sliding": Layer(width, window),
        "state": Layer(0, None, state),
        "none": Layer(0),
    }
    return tuple(made[kind] for kind in kinds)


def _kind(config: Mapping[str, Any], model_type: str, index: int, window: int) -> _Kind:
    """What the cache of layer `index` is."""
    if model_type in _STATE_ONLY:
        return "state"
    if model_type in _ROTATING_BY_PATTERN and window:
        every = _number(config, "sliding_window_pattern") or _ROTATING_BY_PATTERN[model_type]
        return "full" if index % every == every - 1 else "sliding"
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, list) and index < len(types):
        if types[index] in _STATE_LAYER_TYPES:
            return "state"
        rotates = types[index] == "sliding_attention" and model_type in _ROTATING_BY_LAYER_TYPE
        return "sliding" if rotates and window else "full"
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and index < len(pattern):
        # Nemotron-H: M a Mamba layer, * attention, - an MLP alone.
        return {"M": "state", "-": "none"}.get(pattern[index], "full")  # type: ignore[return-value]
    every = _number(config, "full_attention_interval")
    if every:
        return "full" if (index + 1) % every == 0 else "state"
    return "full"


def _kv_width(config: Mapping[str, Any], model_type: str, hidden: int, heads: int) -> int:
    """Numbers that one token adds to a full-attention layer's cache: keys and values of every KV head."""
    if model_type in _LATENT:
        latent = _number(config, "kv_lora_rank")
        if latent:
            width = latent + _number(config, "qk_rope_head_dim")
            if model_type == "deepseek_v32":
                # The indexer's keys, and as many values that nothing reads.
                width += 2 * _number(config, "index_head_dim")
            return _ATTENTIONS.get(model_type, 1) * width
    # Where global layers have wider heads than local ones, every layer counts as the wider.
    own_head = _number(config, "head_dim") or (hidden // heads if heads else 0)
    head = max(own_head, _number(config, "global_head_dim"))
    if _number(config, "kv_lora_rank"):
        key = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim") or head
        return heads * (key + (_number(config, "v_head_dim") or key))
    kv_heads = (
        1 if config.get("multi_query") is True else _number(config, "num_key_value_heads", "n_kv_heads")
    )
    return (kv_heads or heads) * (head + (_number(config, "v_head_dim") or head))


def _state_bytes(config: Mapping[str, Any], hidden: int) -> int:
    """An upper bound of an attention-free layer's fixed state for one row, in float32.

    Gated linear attention keeps a matrix per head; a state-space layer keeps `state` numbers per channel;
    both, and short convolutions, keep the last inputs of their convolution.
    """
    kernel = _number(config, "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache") or 4
    value_heads = _number(config, "linear_num_value_heads")
    if value_heads:
        key_dim = _number(config, "linear_key_head_dim") or 128
        value_dim = _number(config, "linear_value_head_dim") or key_dim
        key_heads = _number(config, "linear_num_key_heads") or value_heads
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        return 4 * (value_heads * key_dim * value_dim + kernel * channels)
    if _number(config, "conv_L_cache"):
        return 4 * kernel * hidden
    state = _number(config, "state_size", "ssm_state_size", "mamba_d_state") or 128
    inner = max(
        _number(config, "mamba_num_heads", "mamba_n_heads", "num_heads")
        * _number(config, "mamba_head_dim", "mamba_d_head", "head_dim"),
        2 * hidden,
    )
    groups = _number(config, "n_groups", "mamba_n_groups") or 1
    return 4 * (inner * state + kernel * (inner + 2 * groups * state))


def _stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes as loaded off the CPU backend: as stored, except 8-bit floats, which mlx-lm widens to 16."""
    return sum(
        tensor.size_bytes * (2 if tensor.dtype in ("F8_E4M3", "F8_E5M2") else 1)
        for tensor in tensors.values()
    )


def _float_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of an activation: 4 where most float weights are float32, else 2."""
    wide = sum(t.size_bytes for t in tensors.values() if t.dtype in ("F32", "F64"))
    narrow = sum(t.size_bytes for t in tensors.values() if t.dtype in ("F16", "BF16"))
    return 4 if wide > narrow else 2


def _float32_bytes(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
    """Bytes as the CPU backend holds them: every float as float32, quantised tensors dequantised.

    A quantised weight is packed uint32 with `scales` beside it, one per `group_size` numbers of a row.
    """
    total = 0
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        packed = tensors.get(f"{module}.weight")
        if packed is not None and packed.dtype == "U32" and f"{module}.scales" in tensors:
            if part == "scales":
                total += 4 * tensor.elements * _group_size(config, module)
            if part in ("weight", "scales", "biases"):
                continue
        is_float = tensor.dtype[0] in "FB" and tensor.dtype != "BOOL"
        total += 4 * tensor.elements if is_float and DTYPE_BITS[tensor.dtype] < 32 else tensor.size_bytes
    return total


def _group_size(config: Mapping[str, Any], module: str) -> int:
    """Numbers per scale of one module: its own entry of the config's quantization, else the common one."""
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, dict):
        return 64
    own = quantization.get(module)
    found = _number(own, "group_size") if isinstance(own, dict) else 0
    return found or _number(quantization, "group_size") or 64
