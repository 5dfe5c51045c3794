"""config.json of a model, from its GGUF's metadata: the names are mlx-lm's, the numbers the file's.

Llama's files hold the rows of query and key in the order of interleaved rope; instead of putting them back
the config says `rope_traditional`, so no row is touched and a quantised one stays as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .facts import Facts
from .families import Family, Side
from .header import GgufError
from .rope import scaling

# Where a file says nothing: the value these models were published with.
_DEFAULT_THETA = 10_000.0
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_PATTERN = 6
# Gemma 3 27B alone scales queries by the width of a head as hidden / heads has it; no file says so.
_GEMMA_27B_LAYERS = 62


class Geometry(NamedTuple):
    """Lengths of a model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    vocab: int

    def side(self, name: Side) -> int:
        """How long a side of a tensor is."""
        lengths: dict[Side, int] = {
            "hidden": self.hidden,
            "ffn": self.ffn,
            "vocab": self.vocab,
            "queries": self.heads * self.head,
            "keys": self.kv_heads * self.head,
            "values": self.kv_heads * self.head,
            "head": self.head,
        }
        return lengths[name]


def geometry(facts: Facts, vocab: int) -> Geometry:
    """The lengths, consistent in themselves. vocab: rows of the embedding. Raises GgufError."""
    if facts.get(facts.own("expert_count")):
        raise GgufError(f"{facts.own('expert_count')} is there; mixtures of experts can't be imported")
    hidden = facts.count(facts.own("embedding_length"))
    heads = facts.count(facts.own("attention.head_count"))
    kv_heads = facts.count(facts.own("attention.head_count_kv"), heads)
    rotated_key = facts.own("rope.dimension_count")
    head = facts.count(facts.own("attention.key_length"), facts.count(rotated_key, max(1, hidden // heads)))
    for key in (facts.own("attention.value_length"), rotated_key):
        if facts.count(key, head) != head:
            raise GgufError(f"{key} is {facts.get(key)}; only {head}, the width of a head, is known here")
    if heads % kv_heads or head % 2:
        raise GgufError(f"{heads} heads of width {head} can't share {kv_heads} key heads")
    return Geometry(
        layers=facts.count(facts.own("block_count")),
        hidden=hidden,
        ffn=facts.count(facts.own("feed_forward_length")),
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        vocab=vocab,
    )


def config(facts: Facts, family: Family, lengths: Geometry, *, is_tied: bool) -> dict[str, Any]:
    """config.json without its types and its tokens' ids. Raises GgufError."""
    made: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "hidden_size": lengths.hidden,
        "intermediate_size": lengths.ffn,
        "num_hidden_layers": lengths.layers,
        "num_attention_heads": lengths.heads,
        "num_key_value_heads": lengths.kv_heads,
        "head_dim": lengths.head,
        "vocab_size": lengths.vocab,
        "rms_norm_eps": facts.number(facts.own("attention.layer_norm_rms_epsilon")),
        "rope_theta": facts.number(facts.own("rope.freq_base"), _DEFAULT_THETA),
        "max_position_embeddings": facts.count(facts.own("context_length")),
        "tie_word_embeddings": is_tied,
    }
    scaled = scaling(facts)
    if scaled is not None:
        made["rope_scaling"] = scaled
    if family.model_type == "llama":
        made["rope_traditional"] = True
    if family.model_type == "gemma3_text":
        made |= _gemma3(facts, lengths)
    if family.model_type == "qwen2" and lengths.head * lengths.heads != lengths.hidden:
        raise GgufError(
            f"qwen2 with {lengths.heads} heads of {lengths.head} in {lengths.hidden} is not known"
        )
    return made


def _gemma3(facts: Facts, lengths: Geometry) -> dict[str, Any]:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if facts.get(facts.own(name)):
            raise GgufError(f"{facts.own(name)} is set, which Gemma 3 in mlx-lm has not")
    width = lengths.hidden // lengths.heads if lengths.layers == _GEMMA_27B_LAYERS else lengths.head
    return {
        "query_pre_attn_scalar": width,
        "sliding_window": facts.count(facts.own("attention.sliding_window")),
        "sliding_window_pattern": facts.count(facts.own("attention.sliding_window_pattern"), _GEMMA_PATTERN),
        "rope_local_base_freq": facts.number(facts.own("rope.freq_base_swa"), _GEMMA_LOCAL_THETA),
        # Its activation; mlx-lm knows no other.
        "hidden_activation": "gelu_pytorch_tanh",
    }
