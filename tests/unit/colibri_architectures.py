"""Tiny configs of every architecture whose experts can be streamed, with the keys that its own class has.

What most call by one name is in `_COMMON`; of that an architecture gets what its class of arguments takes.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from tests.tools import tiny_models

LAYERS = 3

_COMMON: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 64,
    "moe_intermediate_size": 64, "num_hidden_layers": LAYERS, "num_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "tie_word_embeddings": False, "attention_bias": False, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8, "moe_num_experts": 8, "n_shared_experts": 1, "num_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64, "v_head_dim": 64, "index_head_dim": 32, "index_n_heads": 2, "index_topk": 16,
    "partial_rotary_factor": 0.5, "use_qk_norm": True, "sliding_window": 32,
}  # fmt: skip
_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPES = {"full_attention": {**_ROPE, "partial_rotary_factor": 1.0}, "sliding_attention": _ROPE}
_LINEAR = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": LAYERS,
}  # fmt: skip
_DELTA = {
    "linear_attn_config": {
        "kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 2, "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 512,
    "num_experts_per_token": 2,
}  # fmt: skip
_GRANITE = {
    "logits_scaling": 1.0, "attention_multiplier": 0.2, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}  # fmt: skip
_LONGCAT = {
    "attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 4, "ffn_hidden_size": 64,
    "moe_topk": 2, "expert_ffn_hidden_size": 64, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}  # fmt: skip
_GEMMA = {
    "layer_types": _TYPES, "enable_moe_block": True, "top_k_experts": 2, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "global_head_dim": 32, "use_double_wide_mlp": False,
    "rope_parameters": _ROPES,
}  # fmt: skip
_MISTRAL = {
    "head_dim": 96,
    "rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 512},
}
_QWEN_3_5 = {
    **_LINEAR,
    "rope_parameters": {
        "type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2],
    },
}  # fmt: skip
_WITHIN = {"model_type": "deepseek_v3"}

# What each has besides, or otherwise.
_OWN: dict[str, dict[str, Any]] = {
    "Klear": {}, "bailing_moe": {}, "deepseek": {}, "deepseek_v3": {}, "deepseek_v32": {}, "dots1": {},
    "glm4_moe": {}, "glm4_moe_lite": {}, "gpt_oss": {}, "mixtral": {}, "olmoe": {}, "qwen2_moe": {},
    "qwen3_moe": {}, "qwen3_vl_moe": {}, "solar_open": {}, "kimi_k25": _WITHIN, "kimi_vl": _WITHIN,
    "afmoe": {"layer_types": _TYPES, "num_dense_layers": 1},
    "bailing_hybrid": {"layer_group_size": 3, "group_norm_size": 1},
    "bailing_moe_linear": {"layer_group_size": 3, "group_norm_size": 1},
    "bailing_moe_v3": {
        "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], "layer_group_size": 3,
        "moe_shared_expert_intermediate_size": 64,
    },
    "deepseek_v2": {
        "topk_method": "greedy",
        "rope_scaling": {
            "type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "deepseek_v41": {
        "o_groups": 2, "o_lora_rank": 32, "compress_ratios": [0] * 3, "kv_source_layer_ids": [0, 1, 2],
        "index_source_layer_ids": [0, 1, 2],
    },
    "ernie4_5_moe": {
        "use_bias": False, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    },
    "exaone_moe": {"layer_types": _TYPES, "is_moe_layer": [False, True, True]},
    "gemma4": {**_GEMMA, "model_type": "gemma4_text", "vocab_size_per_layer_input": 64},
    "gemma4_text": _GEMMA,
    "granitemoe": _GRANITE,
    "granitemoehybrid": {
        **_GRANITE, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 32,
        "mamba_proj_bias": False, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        "moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": False,
        "cla_share_factor": 1, "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2,
    },
    "kimi_k3": {
        **_DELTA, "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0,
        "routed_expert_hidden_size": 32, "latent_moe_use_norm": True,
    },
    "kimi_linear": _DELTA,
    "laguna": {
        "layer_types": _TYPES, "num_attention_heads_per_layer": [2] * 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": _ROPES,
    },
    "lfm2_moe": {
        "use_expert_bias": True, "num_dense_layers": 1, "norm_eps": 1e-5, "conv_bias": False,
        "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"],
    },
    "llama4": {
        "attention_chunk_size": 512, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 64,
        "num_experts_per_tok": 1, "num_hidden_layers": 4,
    },
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2, "emb_split_num": 2},
    "mellum": {"layer_types": _TYPES, "rope_parameters": _ROPES},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "sliding_window_size": 32, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "layernorm_epsilon": 1e-5, "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 32,
        "swa_v_head_dim": 32, "v_head_dim": 32,
    },
    "minimax": {"rotary_dim": 16},
    "minimax_m3_vl": {
        "dense_intermediate_size": 64, "rotary_dim": 16, "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "mistral3": {**_MISTRAL, "model_type": "mistral4"},
    "mistral4": _MISTRAL,
    "phimoe": {
        "rope_scaling": {
            "short_factor": [1.0] * 16, "long_factor": [1.0] * 16, "short_mscale": 1.0, "long_mscale": 1.0,
            "type": "longrope",
        },
    },
    "qwen3_5": _QWEN_3_5,
    "qwen3_5_moe": _QWEN_3_5,
    "qwen3_next": _LINEAR,
    "step3p5": {
        "num_attention_groups": 2, "moe_top_k": 2, "share_expert_dim": 64, "moe_layers_enum": "1,2",
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
}  # fmt: skip

# Where the language model's arguments are a part of the others': of which module and class they are.
_INNER = {
    "gemma4": ("gemma4_text", "ModelArgs"), "kimi_k25": ("kimi_k25", "TextConfig"),
    "kimi_k3": ("kimi_k3", "TextArgs"), "kimi_vl": ("kimi_vl", "TextArgs"), "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"), "mistral3": ("mistral4", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"), "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}  # fmt: skip

KINDS = sorted(_OWN)


def config(kind: str) -> dict[str, Any]:
    """A config.json that mlx-lm builds this module's model from."""
    module, name = _INNER.get(kind, (kind, "ModelArgs"))
    arguments = getattr(importlib.import_module(f"mlx_lm.models.{module}"), name)
    taken = {field.name for field in dataclasses.fields(arguments)} | {"model_type", "architectures"}
    said = {**_COMMON, "model_type": kind, **_OWN[kind]}
    own = {key: value for key, value in said.items() if key in taken}
    if kind not in _INNER:
        return own
    return {"model_type": kind, "vocab_size": tiny_models.VOCAB_SIZE, "text_config": own}
