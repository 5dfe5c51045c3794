"""Which tensors a family of models has, under which names mlx-lm knows them, and in which shapes.

A table per family, nothing guessed: a tensor that is in no table is refused by name, and so is a missing one.
Gemma's files hold its norms' weights with the 1 added that mlx-lm adds itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from mlxpool.shared.text import cut

from .header import GgufError

# What the stored numbers need beside another type. minus_one: of a norm whose 1 is in the file.
Change = Literal["none", "minus_one"]
# Names of lengths that shapes are made of.
Side = Literal["hidden", "ffn", "vocab", "queries", "keys", "values", "head"]

# The factors of rope per frequency: part of the config there, not of the weights.
ROPE_FACTORS = "rope_freqs.weight"
OUTPUT = "output.weight"
EMBEDDING = "token_embd.weight"


class Place(NamedTuple):
    """Where a tensor goes. module: mlx-lm's parameter, within its layer for a layer's."""

    parameter: str
    sides: tuple[Side, ...]
    change: Change = "none"


class Family(msgspec.Struct, frozen=True):
    """layer: by the name after `blk.N.`. other: whole names. model_type, class_name: as config.json says."""

    model_type: str
    class_name: str
    layer: Mapping[str, Place]
    other: Mapping[str, Place]
    optional: frozenset[str] = frozenset({OUTPUT})


_ATTENTION = {
    "attn_q.weight": Place("self_attn.q_proj.weight", ("queries", "hidden")),
    "attn_k.weight": Place("self_attn.k_proj.weight", ("keys", "hidden")),
    "attn_v.weight": Place("self_attn.v_proj.weight", ("values", "hidden")),
    "attn_output.weight": Place("self_attn.o_proj.weight", ("hidden", "queries")),
}
_MLP = {
    "ffn_gate.weight": Place("mlp.gate_proj.weight", ("ffn", "hidden")),
    "ffn_up.weight": Place("mlp.up_proj.weight", ("ffn", "hidden")),
    "ffn_down.weight": Place("mlp.down_proj.weight", ("hidden", "ffn")),
}
_NORMS = {
    "attn_norm.weight": Place("input_layernorm.weight", ("hidden",)),
    "ffn_norm.weight": Place("post_attention_layernorm.weight", ("hidden",)),
}
_BIASES = {
    "attn_q.bias": Place("self_attn.q_proj.bias", ("queries",)),
    "attn_k.bias": Place("self_attn.k_proj.bias", ("keys",)),
    "attn_v.bias": Place("self_attn.v_proj.bias", ("values",)),
}
_HEAD_NORMS = {
    "attn_q_norm.weight": Place("self_attn.q_norm.weight", ("head",)),
    "attn_k_norm.weight": Place("self_attn.k_norm.weight", ("head",)),
}
_GEMMA_NORMS = {
    "attn_norm.weight": Place("input_layernorm.weight", ("hidden",), "minus_one"),
    "post_attention_norm.weight": Place("post_attention_layernorm.weight", ("hidden",), "minus_one"),
    "ffn_norm.weight": Place("pre_feedforward_layernorm.weight", ("hidden",), "minus_one"),
    "post_ffw_norm.weight": Place("post_feedforward_layernorm.weight", ("hidden",), "minus_one"),
    **{name: place._replace(change="minus_one") for name, place in _HEAD_NORMS.items()},
}
_OTHER = {
    EMBEDDING: Place("model.embed_tokens.weight", ("vocab", "hidden")),
    "output_norm.weight": Place("model.norm.weight", ("hidden",)),
    OUTPUT: Place("lm_head.weight", ("vocab", "hidden")),
}
_GEMMA_OTHER = {**_OTHER, "output_norm.weight": Place("model.norm.weight", ("hidden",), "minus_one")}

# By the architecture's name in the file. Mistral's models call themselves llama.
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", {**_ATTENTION, **_MLP, **_NORMS}, _OTHER),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", {**_ATTENTION, **_BIASES, **_MLP, **_NORMS}, _OTHER),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {**_ATTENTION, **_HEAD_NORMS, **_MLP, **_NORMS}, _OTHER),
    "gemma3": Family(
        "gemma3_text", "Gemma3ForCausalLM", {**_ATTENTION, **_MLP, **_GEMMA_NORMS}, _GEMMA_OTHER
    ),
}


def family(architecture: str) -> Family:
    """The tables of an architecture. Raises GgufError for one that is not known."""
    if architecture not in FAMILIES:
        raise GgufError(
            f"the GGUF's architecture is {cut(architecture)!r}; this import knows {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]


def place_of(tensor: str, known: Family, layers: int) -> Place:
    """Where a tensor of the file goes, its parameter's name whole. Raises GgufError for an unknown one."""
    if tensor in known.other:
        return known.other[tensor]
    first, _, rest = tensor.partition(".")
    number, _, name = rest.partition(".")
    is_layer = number.isascii() and number.isdigit() and len(number) < 6 and int(number) < layers
    if first != "blk" or not is_layer or name not in known.layer or str(int(number)) != number:
        raise GgufError(
            f"the GGUF has a tensor that {known.model_type} is not known to have here: {cut(tensor)}"
        )
    place = known.layer[name]
    return place._replace(parameter=f"model.layers.{number}.{place.parameter}")


def expected(known: Family, layers: int) -> list[str]:
    """The names of every tensor that must be there."""
    whole = [name for name in known.other if name not in known.optional]
    return whole + [f"blk.{number}.{name}" for number in range(layers) for name in known.layer]
