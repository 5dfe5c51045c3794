"""Two small random models that can't decode rows of different lengths in one pass, as mlx-lm has them.

Its Gemma 2 takes a batch's mask of rows for one of KV heads; its GPT-BigCode fails on a batch.
"""

from __future__ import annotations

from mlx_lm.models import gemma2, gpt_bigcode

GEMMA2 = gemma2.ModelArgs(
    model_type="gemma2", hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4,
    head_dim=16, rms_norm_eps=1e-5, vocab_size=256, num_key_value_heads=2,
)  # fmt: skip
GPT_BIGCODE = gpt_bigcode.ModelArgs(
    model_type="gpt_bigcode", n_embd=64, n_layer=2, n_inner=64, n_head=4, n_positions=512,
    layer_norm_epsilon=1e-5, vocab_size=256,
)  # fmt: skip

MAKERS = {"gemma2": lambda: gemma2.Model(GEMMA2), "bigcode": lambda: gpt_bigcode.Model(GPT_BIGCODE)}
