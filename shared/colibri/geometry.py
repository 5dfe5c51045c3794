"""The numbers of GLM-5.2's architecture, checked as they are read out of its config.json.

Pure. A config is a stranger's file: a number that is missing or absurd would make a model, or a plan, that is
wrong by gigabytes, so it is refused by its key. What a worker would refuse is refused here, before a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.model_facts import MAX_LAYERS
from mlxpool.shared.text import cut

# The longest in use have a million positions; more is a typing error, or an attack on our arithmetic.
MAX_NUMBER = 1 << 24
# What float32 holds.
_MAX_FLOAT = 3.4e38

IndexerType = Literal["full", "shared"]


class Geometry(msgspec.Struct, frozen=True):
    """Numbers of glm_moe_dsa by the names that config.json has for them.

    indexer_types: by layer. "full" has an indexer of its own, "shared" looks where the last full one looked.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    moe_layer_freq: int
    n_shared_experts: int
    max_position_embeddings: int
    norm_topk_prob: bool
    attention_bias: bool
    indexer_rope_interleave: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    indexer_types: tuple[IndexerType, ...]


_MAY_BE_ZERO = frozenset({"first_k_dense_replace", "n_shared_experts"})
# With what holds where a config leaves them out.
_COUNTS = {
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 202752,
}
_SWITCHES = {"norm_topk_prob": True, "attention_bias": False, "indexer_rope_interleave": True}
_FACTORS = ("routed_scaling_factor", "rms_norm_eps")
_NEEDED = tuple(
    name
    for name in Geometry.__struct_fields__
    if name not in {*_COUNTS, *_SWITCHES, *_FACTORS, "rope_theta", "indexer_types"}
)
# Where a config says otherwise it is of another architecture.
KNOWN = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_interleave": True,
}
# By its newer and its older name; and of how much of a head is turned.
_PLAIN_ROPE = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
# Layers that draft: one is used, and none in use has more than a few.
_DRAFT_LAYERS = "num_nextn_predict_layers"
_MAX_DRAFT_LAYERS = 16


def read(config: Mapping[str, Any]) -> Geometry:
    """The numbers of a config.json. Raises CheckpointError that names the key."""
    for key, known in KNOWN.items():
        if config.get(key, known) != known:
            raise CheckpointError(
                f"config.json: {key} is {cut(repr(config[key]))}; this architecture knows {known!r}"
            )
    numbers = {
        name: number({name: default, **config}, name, least=0 if name in _MAY_BE_ZERO else 1)
        for name, default in {**dict.fromkeys(_NEEDED), **_COUNTS}.items()
    }
    layers = numbers["num_hidden_layers"]
    if layers > MAX_LAYERS:
        raise CheckpointError(f"config.json: says {layers} layers; no model has more than {MAX_LAYERS}")
    for smaller, larger in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("first_k_dense_replace", "num_hidden_layers"),
        ("qk_rope_head_dim", "index_head_dim"),
        ("topk_group", "n_group"),
        ("n_group", "n_routed_experts"),
    ):
        if numbers[smaller] > numbers[larger]:
            raise CheckpointError(
                f"config.json: {smaller} is {numbers[smaller]}, more than {larger}, {numbers[larger]}"
            )
    if numbers["qk_rope_head_dim"] % 2:
        raise CheckpointError(
            f"config.json: qk_rope_head_dim is {numbers['qk_rope_head_dim']}; rotary parts are of pairs"
        )
    if numbers["n_routed_experts"] % numbers["n_group"]:
        raise CheckpointError(
            f"config.json: n_group is {numbers['n_group']}, which does not divide n_routed_experts, "
            f"{numbers['n_routed_experts']}"
        )
    if config.get(_DRAFT_LAYERS) is not None:
        number(config, _DRAFT_LAYERS, least=0, most=_MAX_DRAFT_LAYERS)
    values: dict[str, Any] = {
        **numbers,
        **{name: _switch(config, name, default) for name, default in _SWITCHES.items()},
        **{name: _positive(config, name) for name in _FACTORS},
    }
    return Geometry(**values, rope_theta=_rope_theta(config), indexer_types=indexer_types(config, layers))


def _switch(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {cut(repr(value))}; use true or false")
    return value


def _positive(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_FLOAT:
        said = "is missing" if value is None else f"is {cut(repr(value))}"
        raise CheckpointError(f"config.json: {key} {said}; use a number above 0")
    return float(value)


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Of plain rotary embedding, as older configs say it too: by `rope_theta`, and `rope_scaling` for
    others."""
    said = config
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {key} is {cut(repr(value))}; use an object with rope_theta")
        for name, plain in _PLAIN_ROPE.items():
            if value.get(name, plain) != plain:
                raise CheckpointError(
                    f"config.json: {name} of {key} is {cut(repr(value[name]))}; this architecture knows "
                    f"{plain!r}"
                )
        said = value if key == "rope_parameters" else said
    return _positive(said, "rope_theta")


def indexer_types(config: Mapping[str, Any], layers: int) -> tuple[IndexerType, ...]:
    """Of each layer, by the first of these that the config has: a list `indexer_types`; `index_topk_pattern`,
    such a list or text of F and S; `index_topk_freq` with `index_skip_topk_offset`. Else all are full. Raises
    CheckpointError.
    """
    key, said = next(
        ((key, config[key]) for key in _TYPE_LISTS if config.get(key) is not None), ("index_topk_freq", None)
    )
    if said is None:
        every = number(config, key) if config.get(key) is not None else 1
        begins = "index_skip_topk_offset"
        offset = number(config, begins, least=0) if config.get(begins) is not None else _OFFSET
        types = ["full" if max(at - offset + 1, 0) % every == 0 else "shared" for at in range(layers)]
    else:
        types = [_LETTERS.get(one, one) for one in said] if isinstance(said, str) else said
    if not isinstance(types, list) or len(types) != layers or any(one not in _TYPES for one in types):
        raise CheckpointError(
            f'config.json: {key} must be a list of "full" or "shared" for each of {layers} layers'
        )
    if types[0] != "full":
        raise CheckpointError(
            f"config.json: {key} makes the first layer a shared one; no layer before it has chosen anything"
        )
    return tuple(cast("list[IndexerType]", types))


_TYPE_LISTS = ("indexer_types", "index_topk_pattern")
_LETTERS = {"F": "full", "S": "shared"}
_TYPES = ("full", "shared")
# transformers' own where a config gives a frequency and no offset.
_OFFSET = 2


def number(config: Mapping[str, Any], *keys: str, least: int = 1, most: int = MAX_NUMBER) -> int:
    """The first of these keys that is there. Raises CheckpointError where none is, or its value is absurd."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(
                f"config.json: {key} is {cut(repr(value))}; use a whole number from {least} to {most}"
            )
        return value
    raise CheckpointError(f"config.json: {keys[0]} is missing; the model's shape can't be known without it")
