"""The numbers of GLM-5.2's architecture, checked as they are read out of its config.json.

Pure. A config is a stranger's file: a number that is missing or absurd would make a model, or a plan, that is
wrong by gigabytes, so it is refused by its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.model_facts import MAX_LAYERS

# The longest in use have a million positions; more is a typing error, or an attack on our arithmetic.
MAX_NUMBER = 1 << 24

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
    indexer_types: tuple[IndexerType, ...]


_MAY_BE_ZERO = frozenset({"first_k_dense_replace"})


def read(config: Mapping[str, Any]) -> Geometry:
    """The numbers of a config.json. Raises CheckpointError that names the key."""
    names = [name for name in Geometry.__struct_fields__ if name != "indexer_types"]
    numbers = {name: number(config, name, least=0 if name in _MAY_BE_ZERO else 1) for name in names}
    layers = numbers["num_hidden_layers"]
    if layers > MAX_LAYERS:
        raise CheckpointError(f"config.json: says {layers} layers; no model has more than {MAX_LAYERS}")
    for smaller, larger in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("first_k_dense_replace", "num_hidden_layers"),
        ("qk_rope_head_dim", "index_head_dim"),
    ):
        if numbers[smaller] > numbers[larger]:
            raise CheckpointError(
                f"config.json: {smaller} is {numbers[smaller]}, more than {larger}, {numbers[larger]}"
            )
    if numbers["qk_rope_head_dim"] % 2:
        raise CheckpointError(
            f"config.json: qk_rope_head_dim is {numbers['qk_rope_head_dim']}; rotary parts are of pairs"
        )
    return Geometry(**numbers, indexer_types=indexer_types(config, layers))


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


def number(config: Mapping[str, Any], *keys: str, least: int = 1) -> int:
    """The first of these keys that is there. Raises CheckpointError where none is, or its value is absurd."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or not least <= value <= MAX_NUMBER:
            raise CheckpointError(
                f"config.json: {key} is {value!r}; use a whole number from {least} to {MAX_NUMBER}"
            )
        return value
    raise CheckpointError(f"config.json: {keys[0]} is missing; the model's shape can't be known without it")
