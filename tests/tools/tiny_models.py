"""Tiny random models on disk: real folders that load, decode and chat in milliseconds.

`make(kind, out)`, or `python tests/tools/tiny_models.py KIND OUT`; `build(kind)` is the model alone. Kinds:
`llama`; `sliding` (Gemma 3's alternation of windowed and full layers, with a window of 32 so that a test
passes it); `quantised` (the llama with 4-bit weights) and `dequantised`, the same numbers as float32; `ssm`
(Mamba 2); `conv` (LFM 2: short convolutions and attention in turns); `hybrid` (Falcon H1: SSM and attention
in every layer); `chunked` (Llama 4: attention in chunks); `indexed` (DeepSeek 3.2: a second cache in every
layer, of keys alone). Weights come from a fixed seed and a wide embedding, so greedy text varies instead of
repeating one token; the rows of bytes that are no readable text are made short, so they are hardly ever
sampled. The tokenizer is a real byte-level BPE over the 256 bytes plus special tokens: a prompt has one
token per byte, an answer one byte per token.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Kind = Literal["llama", "sliding", "quantised", "dequantised", "ssm", "conv", "hybrid", "chunked", "indexed"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SEED = 7
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 257, 258
VOCAB_SIZE = 288  # a multiple of 32, as quantisation wants it; ids past the special tokens are never text
WINDOW_TOKENS = 32

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Between the two, so that an answer ends by itself after some hundred tokens.
_EOS_SCALE = 0.75

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


_LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}

# What a kind's config has beside _SHAPE.
_OWN: dict[Kind, dict[str, Any]] = {
    "llama": _LLAMA,
    "quantised": _LLAMA,
    "dequantised": _LLAMA,
    "sliding": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 4,
        "sliding_window": WINDOW_TOKENS,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 16,
    },
    "ssm": {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "num_heads": 8,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
    },
    "conv": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "hybrid": {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
    },
    "chunked": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {
            **_SHAPE,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": WINDOW_TOKENS,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    "indexed": {
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
        "num_key_value_heads": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 128,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
    },
}


def _config(kind: Kind) -> dict[str, Any]:
    return {**_SHAPE, **_OWN[kind]}


def _random_weights(model: nn.Module) -> None:
    """Normal weights wide enough that the most likely token changes from step to step."""
    mx.random.seed(SEED)

    def fill(name: str, value: mx.array) -> mx.array:
        if "norm" in name:
            return mx.ones_like(value) if value.ndim else value
        if value.shape[0] == VOCAB_SIZE:
            return mx.random.normal(value.shape) * _row_scales()
        scale: float = 2.5 / value.shape[-1] ** 0.5
        return mx.random.normal(value.shape) * scale

    model.update(tree_map_with_path(fill, model.parameters()))


def _row_scales() -> mx.array:
    """Per vocabulary row [VOCAB_SIZE, 1]: whole for readable text and the turn's end, less for the others."""
    readable = {place for place, letter in enumerate(_alphabet()) if " " < letter <= "~" or letter in "ĠĊ"}
    scales = [1.0 if row in readable else 0.2 for row in range(VOCAB_SIZE)]
    scales[EOS_ID] = _EOS_SCALE
    return mx.array(scales)[:, None]


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: id = byte value in the alphabet's order, then the special tokens."""
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(_alphabet())}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return made


def build(kind: Kind, **changed: Any) -> Any:
    """The model with its random weights, in full precision. changed: values of its config."""
    config = _config(kind) | changed
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    _random_weights(model)
    return model


def make(kind: Kind, out: Path) -> Path:
    """Write the model folder; returns it."""
    from mlx_lm.utils import dequantize_model, quantize_model

    config, model = _config(kind), build(kind)
    if kind in ("quantised", "dequantised"):
        model, config = quantize_model(model, config, group_size=32, bits=4)
    if kind == "dequantised":
        model = dequantize_model(model)
        del config["quantization"], config["quantization_config"]
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(out / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    tokenizer().save(str(out / "tokenizer.json"))
    files = {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config.json": {"eos_token_id": EOS_ID},
    }
    for name, body in files.items():
        (out / name).write_text(json.dumps(body, indent=2) + "\n")
    return out


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: tiny_models.py {{{','.join(KINDS)}}} OUT")
    make(sys.argv[1], Path(sys.argv[2]))
