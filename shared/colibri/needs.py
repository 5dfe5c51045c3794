"""What a streamed model takes, line by line, at a context and a number of slots. Pure arithmetic.

`needs` takes from an artifact what the lines are made of; a plan asks for the lines at one setting after
another. Every line is an upper bound of what its part of a worker holds. The reserves are in reserves.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from mlxpool.shared import memory
from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import Checkpoint, CheckpointError, Tensor
from mlxpool.shared.colibri import families, geometry
from mlxpool.shared.colibri.layout import Artifact, ExpertLayout, Place
from mlxpool.shared.model_facts import ModelFacts, model_facts

# A sweep computes one half of the working slots while the other is read.
_WORKING_HALVES = 2
# Attention's scores are computed in blocks of queries of at most so much, and so are the indexer's; three are
# alive at once.
SCORE_BLOCK_BYTES = 256 * 2**20
_LIVE_BLOCKS = 3
# Of some heads at a time prefill expands keys and values of the whole context, of at least one.
EXPANDED_BYTES = 256 * 2**20
# Tensors of the hidden width alive at once in a layer: residual, norm, projections, output.
_LIVE_HIDDEN = 6
# Of a dense MLP: gate, up and their product.
_LIVE_DENSE = 3
# What all routed experts give back, twice: as they come and in the order of tokens; on the way there, blocks
# of rows of at most so many bytes.
_LIVE_ROUTED = 2
ROUTED_BLOCK_BYTES = 256 * 2**20
_FLOAT32_BYTES = 4

# Of a draft layer: what it shares with the model is held once.
_SHARED_WITH_MODEL = (".embed_tokens.", ".shared_head.head.")
_FLOAT_BYTES = {"F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}

ItemName = Literal[
    "resident", "main_slab", "mtp_slab", "target_kv", "indexer_kv", "mtp_kv", "reconstructed_kv", "rows",
    "allocator_reserve", "runtime_reserve", "safety_reserve",
]  # fmt: skip


class Item(msgspec.Struct, frozen=True):
    """One line of a plan. label: for a person."""

    name: ItemName
    label: str
    bytes: int


class Latent(msgspec.Struct, frozen=True):
    """What prefill expands a token's latent of `rank` numbers to, in every head: those of a key and of a
    value."""

    rank: int
    heads: int
    qk_head: int
    v_head: int


class Slots(msgspec.Struct, frozen=True):
    """Of one layer: how many it could fill, and what one takes. record_bytes: what filling one reads."""

    experts: int
    slot_bytes: int
    record_bytes: int


class Needs(msgspec.Struct, frozen=True):
    """facts: as of any model, without its experts. element_bytes: of an activation and of KV. layers, mtp:
    what is streamed. kinds_bytes: of a slot of each kind of layer, together. expert_width: of an expert's
    inner vector. index_width, mtp_index_width: numbers that a token adds to the caches of indexers.
    index_heads: 0 without an indexer. resident_bytes, mtp_resident_bytes: of the tensors that stay.
    """

    backend: Backend
    facts: ModelFacts
    element_bytes: int
    top_k: int
    expert_width: int
    layers: tuple[Slots, ...]
    mtp: Slots | None
    kinds_bytes: int
    latent: Latent | None
    index_width: int
    mtp_index_width: int
    index_heads: int
    resident_bytes: int
    mtp_resident_bytes: int

    @property
    def experts(self) -> int:
        """Of the layer that has the most."""
        return max(layout.experts for layout in self.layers)

    def unique_experts(self, drafts: int) -> int:
        """The most experts of a layer that one step can ask for, which verifies drafts and a token more."""
        return min(self.experts, self.top_k * (drafts + 1))

    def working_slots(self, slots: int, drafts: int) -> int:
        """Slots that layers share for what their own can't hold; none where those hold everything."""
        if slots >= self.experts:
            return 0
        return min(self.experts, _WORKING_HALVES * self.unique_experts(drafts))

    def mtp_slots(self, slots: int, drafts: int) -> int:
        """The draft layer's own slots: as many as any layer's."""
        return min(slots, self.mtp.experts) if self.mtp is not None and drafts else 0

    def mtp_working_slots(self, slots: int, drafts: int) -> int:
        """What the draft layer needs beyond them; it drafts one token after another."""
        if self.mtp is None or not drafts or slots >= self.mtp.experts:
            return 0
        return min(self.mtp.experts, self.top_k * drafts)

    def items(self, context: int, slots: int, drafts: int, batch: int, chunk: int) -> tuple[Item, ...]:
        """All lines but the reserves, in order. slots: of each layer of experts. chunk: tokens of prefill."""
        stays = "resident dense, shared, router" + (", MTP" if drafts else "")
        working, mtp_working = self.working_slots(slots, drafts), self.mtp_working_slots(slots, drafts)
        layers = len(self.layers)
        return (
            Item("resident", stays, self.resident_bytes + (self.mtp_resident_bytes if drafts else 0)),
            Item(
                "main_slab", f"main slab ({working} + {layers} x {slots} slots)", self._slab(slots, working)
            ),
            Item("mtp_slab", f"MTP slab ({mtp_working} + {slots} slots)", self._mtp_slab(slots, drafts)),
            Item("target_kv", "target KV", self._kv(context, batch, chunk)),
            Item("indexer_kv", "indexer KV", self.index_width * _held_tokens(context) * self.element_bytes),
            Item("mtp_kv", "MTP KV", self._mtp_kv(context) if drafts else 0),
            Item("reconstructed_kv", "reconstructed KV for prefill", self._expanded(context + drafts + 1)),
            Item("rows", "verify and draft rows" if drafts else "decoded row", self._rows(drafts)),
        )

    def transient(self, chunk: int, context: int, batch: int) -> int:
        """Bytes that a prefill chunk of so many tokens makes on its way, at the end of the context."""
        rows = chunk * self.top_k * self.element_bytes
        routed = _LIVE_ROUTED * rows * self.facts.hidden
        routed += min(ROUTED_BLOCK_BYTES, rows * (self.facts.hidden + 2 * self.expert_width))
        if self.latent is None:
            return routed + memory.prefill_bytes(
                self.facts, self.element_bytes, chunk, context, batch, scores=self.backend == "cpu"
            )
        head = 2 * self.latent.heads * (self.latent.qk_head + self.latent.v_head)
        widths = _LIVE_HIDDEN * self.facts.hidden + head + _LIVE_DENSE * self.facts.ffn
        heads = max(self.latent.heads, self.index_heads)
        block = min(SCORE_BLOCK_BYTES, heads * chunk * context * _FLOAT32_BYTES)
        logits = memory.LIVE_LOGITS * batch * self.facts.vocab * _FLOAT32_BYTES
        return chunk * widths * self.element_bytes + routed + _LIVE_BLOCKS * block + logits

    def kv_bytes_per_token(self, drafts: int) -> int:
        """What one more token of a long row adds to caches."""
        main = sum(layer.kv_width for layer in self.facts.layers if layer.window is None)
        draft = max(layer.kv_width for layer in self.facts.layers) + self.mtp_index_width if drafts else 0
        return (main + self.index_width + draft) * self.element_bytes

    def _slab(self, slots: int, working: int) -> int:
        own = sum(min(slots, layout.experts) * layout.slot_bytes for layout in self.layers)
        return own + working * self.kinds_bytes

    def _mtp_slab(self, slots: int, drafts: int) -> int:
        if self.mtp is None or not drafts:
            return 0
        return self.mtp.slot_bytes * (min(slots, self.mtp.experts) + self.mtp_working_slots(slots, drafts))

    def _kv(self, context: int, batch: int, chunk: int) -> int:
        return memory.kv_pool_bytes(self.facts, self.element_bytes, context, batch, chunk)

    def _mtp_kv(self, context: int) -> int:
        width = max(layer.kv_width for layer in self.facts.layers) + self.mtp_index_width
        return width * _held_tokens(context) * self.element_bytes

    def _expanded(self, tokens: int) -> int:
        if self.latent is None:
            return 0
        token_bytes = (self.latent.qk_head + self.latent.v_head) * self.element_bytes
        # A packed product on the CPU copies the latents for each head, once for keys and once for values.
        head_bytes = tokens * (token_bytes + 2 * self.latent.rank * self.element_bytes)
        return min(self.latent.heads * tokens * token_bytes, _LIVE_BLOCKS * max(EXPANDED_BYTES, head_bytes))

    def _rows(self, drafts: int) -> int:
        """Logits and states of the rows that are verified, and of those that are drafted."""
        return (2 * drafts + 1) * (self.facts.vocab + self.facts.hidden) * _FLOAT32_BYTES


def needs(artifact: Artifact, backend: Backend) -> Needs:
    """What this artifact's lines are made of, on `backend`. Its layouts must say how that backend holds them.

    Raises CheckpointError where its config lacks a number.
    """
    config = families.language(artifact.config)
    if not artifact.layers:
        raise CheckpointError("config.json: no layer has routed experts; there is nothing to stream")
    facts = model_facts(_without_experts(artifact))
    if not facts.layers or not facts.hidden or not facts.vocab:
        missing = [
            key
            for key, value in (
                ("num_hidden_layers", facts.layers),
                ("hidden_size", facts.hidden),
                ("vocab_size", facts.vocab),
            )
            if not value
        ]
        raise CheckpointError(f"config.json: {missing[0]} is missing; what the model needs can't be known")
    experts = max(layout.experts for layout in artifact.layers)
    if artifact.top_k > experts:
        raise CheckpointError(f"config.json: routes a token to {artifact.top_k} of {experts} experts")
    is_glm = artifact.model_type == "glm_moe_dsa"
    types = geometry.read(config).indexer_types if is_glm and artifact.has_indexer else ()
    head = geometry.number(config, "index_head_dim") if types else 0
    widened = backend == "cpu" and not _is_quantised(artifact)
    own_mtp = {
        name: place
        for name, place in artifact.mtp_dense.items()
        if not any(part in name for part in _SHARED_WITH_MODEL)
    }
    return Needs(
        backend=backend,
        facts=facts,
        element_bytes=_FLOAT32_BYTES if widened or artifact.form == "container" else facts.float_bytes,
        top_k=artifact.top_k,
        expert_width=max(_inner(layout) for layout in artifact.layers),
        layers=tuple(_slots(layout) for layout in artifact.layers),
        mtp=None if artifact.mtp is None else _slots(artifact.mtp),
        kinds_bytes=sum({layout.kind: layout.slot_bytes for layout in artifact.layers}.values()),
        latent=_latent(config) if config.get("kv_lora_rank") is not None else None,
        index_width=head * sum(kind == "full" for kind in types),
        mtp_index_width=head if any(".indexer." in name for name in own_mtp) else 0,
        index_heads=geometry.number(config, "index_n_heads") if types else 0,
        resident_bytes=_held_bytes(artifact.dense, widened),
        mtp_resident_bytes=_held_bytes(own_mtp, widened),
    )


def _slots(layout: ExpertLayout) -> Slots:
    return Slots(layout.experts, layout.slot_bytes, layout.record_bytes)


def _inner(layout: ExpertLayout) -> int:
    """Numbers of an expert's inner vector."""
    rows = (part.shape[0] for part in layout.parts if part.projection == "gate_proj" and len(part.shape) == 2)
    return max(rows)


def _held_tokens(context: int) -> int:
    return -(-context // memory.KV_STEP_TOKENS) * memory.KV_STEP_TOKENS


def _without_experts(artifact: Artifact) -> Checkpoint:
    return Checkpoint(
        folder=Path(artifact.folder),
        model_type=artifact.model_type,
        config=artifact.config,
        tensors={
            name: Tensor(place.dtype, place.shape, place.size_bytes) for name, place in artifact.dense.items()
        },
        files=artifact.files,
        weights_bytes=sum(place.size_bytes for place in artifact.dense.values()),
        stamp=artifact.stamp,
    )


def _is_quantised(artifact: Artifact) -> bool:
    """Whether its numbers are packed. Then they keep their types on every backend."""
    return artifact.form == "container" or any(
        packing.scheme != "float" for layout in artifact.layers for packing in layout.packing.values()
    )


def _held_bytes(places: Mapping[str, Place], widened: bool) -> int:
    """Bytes in memory: as stored, floats of 16 bits widened where that is so, and those of 8 bits always."""
    total = 0
    for name, place in places.items():
        width = _FLOAT_BYTES.get(place.dtype)
        if name.endswith("weight_scale_inv"):
            continue
        if width is None or (width == 2 and not widened):
            total += place.size_bytes
        else:
            total += place.size_bytes // width * (_FLOAT32_BYTES if widened else 2)
    return total


def _latent(config: Mapping[str, object]) -> Latent:
    rope = geometry.number(config, "qk_rope_head_dim")
    return Latent(
        rank=geometry.number(config, "kv_lora_rank"),
        heads=geometry.number(config, "num_attention_heads"),
        qk_head=geometry.number(config, "qk_nope_head_dim") + rope,
        v_head=geometry.number(config, "v_head_dim"),
    )
