"""Which architectures' experts can be streamed, and what they call what they have in common. Pure.

What can be streamed is a layer's SwitchGLU: three projections, called with states and the experts that they
are routed to. mlx-lm 0.32.2 builds the architectures of STREAMED with it, and streamed each answers as it
does resident. Whatever else there is is refused by name before a plan is made of it: it would be found out
by a worker, after minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.text import cut

# mlx-lm's, by config.json's model_type; further names that it has for one of them.
STREAMED = frozenset({
    "Klear", "afmoe", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "deepseek", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v41", "dots1", "ernie4_5_moe", "exaone_moe", "gemma4",
    "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoehybrid",
    "hunyuan", "jamba", "kimi_k25", "kimi_k3", "kimi_linear", "kimi_vl", "laguna", "lfm2_moe", "llama4",
    "longcat_flash", "longcat_flash_ngram", "mellum", "mimo_v2_flash", "minimax", "minimax_m3_vl", "mistral3",
    "mistral4", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_moe",
    "qwen3_next", "qwen3_vl_moe", "solar_open", "step3p5",
    "deepseek_v41_text", "gemma4_unified", "joyai_llm_flash", "kimi_k2", "minimax_m2",
})  # fmt: skip

_TWO_PROJECTIONS = "its experts are of two projections, and slots are made for gate, up and down"
_REASONS = {
    "dbrx": "its experts are rows of one matrix",
    "muse_spark": "a norm is kept among its experts",
    "nemotron_h": _TWO_PROJECTIONS,
    "phixtral": _TWO_PROJECTIONS,
}

# Of config.json, the first that is there: how many layers, how many experts a layer has and a token is routed
# to.
LAYERS = ("num_hidden_layers", "num_layers")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "experts_per_token", "moe_k", "moe_top_k",
    "top_k_experts",
)  # fmt: skip
# Of a layer. The most in use are a few hundred; more is a header that would only cost time and memory.
MAX_EXPERTS = 65_536
# What every architecture has, under these names or others; and what only some have.
_ABOVE_ZERO = (*LAYERS, "hidden_size", "vocab_size", "moe_intermediate_size")
_FROM_ZERO = ("first_k_dense_replace",)
# Numbers that an expert is asked with: fewer than the hidden size where it is given a narrower state.
EXPERT_INPUTS = ("routed_expert_hidden_size", "hidden_size")


def check(model_type: str, has_experts: bool = True) -> None:
    """Raises CheckpointError unless experts of this architecture can be streamed. has_experts: whether its
    files show any; where they don't, only what is known of the architecture is told."""
    if model_type not in STREAMED and (has_experts or model_type in _REASONS):
        why = _REASONS.get(model_type, "it is none of the architectures that this is known to work with")
        raise CheckpointError(
            f'config.json: experts of a {model_type} can\'t be streamed: {why}; experts = "resident" holds '
            "the model as a whole"
        )


def language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config with what its language model's own part says over the rest."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of these that is a positive whole number, or the largest of a list of one per layer; 0 where
    none is."""
    said = language(config)
    for name in names:
        value = said.get(name)
        counts = value if isinstance(value, list) else [value]
        whole = [one for one in counts if isinstance(one, int) and not isinstance(one, bool) and one > 0]
        if whole and len(whole) == len(counts):
            return max(whole)
    return 0


def needed(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """As `number`, of what has to be there. Raises CheckpointError that names the key, and its value."""
    found = number(config, names)
    if found:
        return found
    said = language(config)
    for name in names:
        if said.get(name) is not None:
            raise _absurd(name, said[name], 1)
    raise CheckpointError(f"config.json: {names[0]} is missing; the model's shape can't be known without it")


def check_numbers(config: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a number that is there can't be one: it would count as missing."""
    said = language(config)
    for names, least in ((_ABOVE_ZERO, 1), (_FROM_ZERO, 0)):
        for name in names:
            value = said.get(name)
            counts = value if isinstance(value, list) else [value]
            if any(one is not None and (type(one) is not int or one < least) for one in counts):
                raise _absurd(name, value, least)


def _absurd(name: str, value: object, least: int) -> CheckpointError:
    return CheckpointError(f"config.json: {name} is {cut(repr(value))}; use a whole number, {least} or more")
