"""GLM-5.2 (glm_moe_dsa) on mlx-lm's classes, which know it with an indexer on every layer only.

Layers are `full`, with an indexer of their own, or `shared`, which look where the last full layer looked.
The router works in float32. Modules and their names are mlx-lm's, so that its checkpoints load as they are;
the experts' module is whatever stands at `mlp.switch_mlp`. Caches are lists of plain KVCaches: latents and
their rotated part on every layer, and on full layers the indexer's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import msgspec
from mlx import nn
from mlx_lm.models import deepseek_v32, glm_moe_dsa
from mlx_lm.models.cache import CacheList, KVCache

from mlxpool.shared.colibri import geometry
from mlxpool.worker.colibri.attention import Attention

Caches = list[CacheList]


@dataclass
class ModelArgs(glm_moe_dsa.ModelArgs):  # type: ignore[misc]  # mlx-lm has no types here
    """full_layers: by layer whether it has an indexer; none has where attention is dense."""

    full_layers: tuple[bool, ...] = ()


def arguments(config: Mapping[str, Any], has_indexer: bool) -> ModelArgs:
    """The numbers of a config.json. Raises CheckpointError that names the key."""
    numbers = geometry.read(config)
    args: ModelArgs = ModelArgs.from_dict(
        {
            **msgspec.structs.asdict(numbers),
            **{key: value for key, value in geometry.KNOWN.items() if key != "rope_interleave"},
            "model_type": config["model_type"],
            "num_key_value_heads": numbers.num_attention_heads,
            "rope_parameters": {"rope_theta": numbers.rope_theta, "rope_type": "default"},
        }
    )
    # Without routed experts' shared companions mlx-lm's class wants nothing rather than none.
    args.n_shared_experts = numbers.n_shared_experts or None
    args.full_layers = tuple(kind == "full" and has_indexer for kind in numbers.indexer_types)
    return args


class Gate(deepseek_v32.MoEGate):  # type: ignore[misc]  # mlx-lm has no types here
    """In float32, inputs too: small differences decide which expert is the eighth."""

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        chosen: tuple[mx.array, mx.array] = deepseek_v32.group_expert_select(
            x.astype(mx.float32) @ self.weight.astype(mx.float32).T,
            self.e_score_correction_bias,
            self.top_k,
            self.n_group,
            self.topk_group,
            self.routed_scaling_factor,
            self.norm_topk_prob,
        )
        return chosen


class DecoderLayer(deepseek_v32.DeepseekV32DecoderLayer):  # type: ignore[misc]  # mlx-lm has no types here
    """full: whether it has an indexer. index: decides whether it has experts."""

    def __init__(self, args: ModelArgs, index: int, full: bool) -> None:
        super().__init__(args, index)
        self.self_attn = Attention(args, full)
        if isinstance(self.mlp, deepseek_v32.DeepseekV32MoE):
            self.mlp.gate = Gate(args)

    def __call__(
        self, x: mx.array, cache: CacheList | None = None, chosen: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """x [B, L, D] as the next layer has it, and the positions that the next layers look at."""
        added, chosen = self.self_attn(self.input_layernorm(x), cache, chosen)
        x = x + added
        return x + self.mlp(self.post_attention_layernorm(x)), chosen


class Trunk(nn.Module):  # type: ignore[misc]  # mlx has no types here
    """Embedding, layers, final norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, index, full) for index, full in enumerate(args.full_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, tokens: mx.array, cache: Caches | None = None) -> mx.array:
        """[B, L, D] behind the last layer, before the final norm."""
        x, chosen = self._until_last(tokens, cache)
        last: mx.array = self.layers[-1](x, cache[-1] if cache else None, chosen)[0]
        return last

    def take_in(self, tokens: mx.array, cache: Caches) -> None:
        """Into the caches. Of the last layer that takes its keys and values alone."""
        x, chosen = self._until_last(tokens, cache)
        last = self.layers[-1]
        last.self_attn(last.input_layernorm(x), cache[-1], chosen)

    def _until_last(self, tokens: mx.array, cache: Caches | None) -> tuple[mx.array, mx.array | None]:
        """What the last layer is given."""
        x: mx.array = self.embed_tokens(tokens)
        chosen: mx.array | None = None
        layers = self.layers[:-1]
        for layer, held in zip(layers, cache[:-1] if cache else [None] * len(layers), strict=True):
            x, chosen = layer(x, held, chosen)
        return x, chosen


class Model(deepseek_v32.Model):  # type: ignore[misc]  # mlx-lm has no types here
    """What mlx-lm calls a model. Of its class it keeps what renames and reshapes a checkpoint's tensors.

    tap: told of each pass by its tokens [B, L] and what it has before the final norm [B, L, D].
    made: called when the graph of a pass through the layers has been made, before anything is computed of it
    but what the layers computed themselves.
    """

    tap: Callable[[mx.array, mx.array], None] | None = None
    made: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, args: ModelArgs) -> None:
        # Not its own: that would build every layer a second time.
        nn.Module.__init__(self)
        self.args = args
        self.model_type = args.model_type
        self.model = Trunk(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache: Caches | None = None) -> mx.array:
        """Logits [B, L, V] of tokens [B, L]."""
        hidden = self.hidden(inputs, cache)
        if self.tap is not None:
            self.tap(inputs, hidden)
        return self.logits(hidden)

    def take_in(self, inputs: mx.array, cache: Caches) -> None:
        """As a call whose logits nobody wants: the caches hold the same afterwards. Routers are asked for
        their choice as experts are read, so the last layer's would be read for nothing. Where there is a tap
        its states are wanted all the same."""
        if self.tap is None:
            self.model.take_in(inputs, cache)
            self.made()
        else:
            self.tap(inputs, self.hidden(inputs, cache))

    def hidden(self, inputs: mx.array, cache: Caches | None = None) -> mx.array:
        """[B, L, D] before the final norm."""
        hidden: mx.array = self.model(inputs, cache)
        self.made()
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [B, L, V] of what `hidden` gave."""
        logits: mx.array = self.lm_head(self.model.norm(hidden))
        return logits

    @property
    def layers(self) -> list[DecoderLayer]:
        layers: list[DecoderLayer] = self.model.layers
        return layers

    def make_cache(self) -> Caches:
        return [layer_cache(full) for full in self.args.full_layers]


def layer_cache(full: bool) -> CacheList:
    """An empty cache of one layer."""
    return CacheList(KVCache(), KVCache()) if full else CacheList(KVCache())
