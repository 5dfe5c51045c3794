"""Small GGUF files, written by the `gguf` package: random models of each family, and the pieces they are of.

`write(path, Model(...))` writes one; `bpe_tokens()` and `spm_tokens()` are tokenizers of some hundred tokens.
The weights are those of a mlx-lm model under mlx-lm's names, so a test can compare what comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

HIDDEN, FFN, HEADS, KV_HEADS, HEAD, LAYERS = 64, 96, 4, 2, 16, 2
VOCAB = 288
TEXT, UNKNOWN, CONTROL, BY_HAND, BYTE = 1, 2, 3, 4, 6

Metadata = dict[str, Any]

# As the format's own description has them.
STEMS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_STEMS = STEMS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass
class Model:
    """A model to be written. weights: by mlx-lm's names. format: of its matrices."""

    architecture: str
    weights: Mapping[str, np.ndarray[Any, Any]]
    metadata: Metadata = field(default_factory=dict)
    format: GGMLQuantizationType = GGMLQuantizationType.F32
    extra: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def shape_of(architecture: str) -> Metadata:
    """The metadata that a small model needs."""
    own = {
        "context_length": 512,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if architecture == "gemma3":
        own |= {"attention.sliding_window": 16}
    return {f"{architecture}.{name}": value for name, value in own.items()}


def bpe_tokens(pre: str = "smollm") -> Metadata:
    """Byte-level: the 256 bytes, two merges, three control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "th", "the", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [TEXT] * 258 + [CONTROL] * 3,
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.ggml.padding_token_id": 258,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def spm_tokens() -> Metadata:
    """SentencePiece: control tokens, bytes, some words with scores, one token put in by hand."""
    words = {"▁": -1.0, "h": -2.0, "e": -3.0, "l": -4.0, "o": -5.0, "he": -0.5, "ll": -0.4, "hell": -0.3,
             "hello": -0.2, "▁hello": -0.1, "el": -0.6}  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "  "]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[TEXT] * len(words), BY_HAND]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()) + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def random_weights(architecture: str, seed: int = 5) -> dict[str, np.ndarray[Any, Any]]:
    """Weights of a small model, by mlx-lm's names, float32."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        place = f"model.layers.{layer}"
        shapes |= {
            f"{place}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{place}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{place}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{place}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{place}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{place}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{place}.mlp.down_proj.weight": (HIDDEN, FFN),
            f"{place}.input_layernorm.weight": (HIDDEN,),
            f"{place}.post_attention_layernorm.weight": (HIDDEN,),
        }
        if architecture == "qwen2":
            shapes |= {
                f"{place}.self_attn.{name}_proj.bias": (heads * HEAD,)
                for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
            }
        if architecture in ("qwen3", "gemma3"):
            shapes |= {f"{place}.self_attn.{name}_norm.weight": (HEAD,) for name in ("q", "k")}
        if architecture == "gemma3":
            shapes |= {f"{place}.{name}_feedforward_layernorm.weight": (HIDDEN,) for name in ("pre", "post")}
    return {
        name: (random.standard_normal(shape) * (0.2 if len(shape) == 1 else shape[-1] ** -0.5)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of query or key in the order that llama's files have them: halves of a head become pairs."""
    halves = rows.reshape(heads, 2, HEAD // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write(path: Path, model: Model) -> Path:
    """The file."""
    writer = GGUFWriter(path, model.architecture)
    for key, value in {**shape_of(model.architecture), **bpe_tokens(), **model.metadata}.items():
        _add(writer, key, value)
    stems = GEMMA_STEMS if model.architecture == "gemma3" else STEMS
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, weight in model.weights.items():
        module, _, kind = name.rpartition(".")
        values = weight
        if module in whole:
            stem = whole[module]
        else:
            _, _, layer, inner = module.split(".", 3)
            stem = f"blk.{layer}.{stems[inner]}"
            if model.architecture == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
                values = interleaved(values, HEADS if "q_proj" in inner else KV_HEADS)
        if model.architecture == "gemma3" and "norm" in module:
            values = values + 1
        if values.ndim == 2 and model.format != GGMLQuantizationType.F32:
            writer.add_tensor(f"{stem}.{kind}", quantize(values, model.format), raw_dtype=model.format)
        else:
            writer.add_tensor(f"{stem}.{kind}", values)
    for name, values in model.extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_key_value(key, value, GGUFValueType.STRING)
    else:
        writer.add_array(key, value)
