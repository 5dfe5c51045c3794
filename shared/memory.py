"""How much memory a model needs, and whether it fits: decided before a byte of it is read.

Pure: facts and limits in, a plan out. The plan is a sum of line items, each an upper bound of what one
part of a worker holds (`MemoryPlan`). The KV pool holds one row at the model's context and is shared by
all rows of the batch. A limit the user chose (a budget, a `context`) lowers the context; the default
budget never does: it decides which models are resident, and a model that is too large is told so with the
context that would fit. Shapes come from `mlxpool.shared.model_facts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from mlxpool.shared.backend import Backend
from mlxpool.shared.model_facts import ModelFacts
from mlxpool.shared.units import format_size

Verdict = Literal["fits", "fits_with_context", "does_not_fit"]

# Where neither the user nor the model says less: one row's KV of a usual model stays near a gigabyte.
DEFAULT_CONTEXT_TOKENS = 32_768
# A model that can't hold a system prompt and an answer serves nobody; also the step KV buffers grow by.
MIN_CONTEXT_TOKENS = 256
KV_STEP_TOKENS = 256

# A worker without its model: interpreter, imports, tokenizer, buffers of the allocator.
# cpu: 95 MB (PSS, Linux x86-64) of a process that has imported mlx_lm without torch and aiohttp and run a
# two-layer model, and 35 MB for a 49k-vocabulary tokenizer, rounded up. cuda: 590 MB (H200, of the device's
# memory) for the context, and 260 MB for kernels, libraries and graphs once a streamed GLM had run, rounded
# up. metal: not measured yet; the same process as on the processor plus what its context takes.
OVERHEAD_BYTES: dict[Backend, int] = {
    "cpu": 160_000_000,
    "metal": 300_000_000,
    "cuda": 900_000_000,
    "none": 160_000_000,
}
# What a worker grows by with its first enforced form, for good: the grammar compiler brings torch. 294 MB
# (RSS, Linux x86-64), rounded up. Its compiling process holds as much again while it is needed and a minute
# after; that is left to the share of the machine that no budget counts.
GRAMMAR_BYTES = 300_000_000

# Widest prefill chunk the ladder reaches where `prefill_chunk` does not fix it: wider gained nothing.
PREFILL_CHUNK_TOKENS: dict[Backend, int] = {"cpu": 256, "metal": 2048, "cuda": 2048, "none": 256}

# Freed buffers that a worker's MLX keeps for reuse: this share of what it may allocate, at most so much.
# Without this item a 4,047-token prompt of the starter (CPU, context 4,096) held 1,027 MB at its peak where
# 982 MB had been planned: growing KV buffers leave behind ones that are too short to be used again.
ALLOCATOR_CACHE_SHARE = 1 / 8
ALLOCATOR_CACHE_LIMIT_BYTES = 1 << 30

_FLOAT32_BYTES = 4
# Tensors of one width alive at once in a layer: the residual, its norm, q, k, v, the output. And in the
# MLP: gate, up and their product.
_LIVE_HIDDEN = 6
_LIVE_FFN = 3
# Lines of the vocabulary per row: logits, their float32 copy, the sorted or masked copy of a sampler; what a
# draw's noise is made ahead for; and the windows of three penalties.
LIVE_LOGITS = 3 + 8 + 3
# Attention scores and their softmax, where no fused kernel keeps them on the chip.
_LIVE_SCORES = 2


# A prompt cache is only of use to models that are loaded: most of the budget stays theirs.
PROMPT_CACHE_SHARE = 1 / 4


class Budget(msgspec.Struct, frozen=True):
    """The memory budget and what is taken off it before any model: the prompt caches of all of them."""

    total_bytes: int
    prompt_cache_bytes: int = 0

    @property
    def models_bytes(self) -> int:
        """What models may reserve."""
        return self.total_bytes - self.prompt_cache_bytes


def split_budget(total_bytes: int, cache_ram_bytes: int) -> Budget:
    """The budget with what `[cache] ram` asks for taken off it, at most PROMPT_CACHE_SHARE of it."""
    return Budget(total_bytes, min(cache_ram_bytes, int(total_bytes * PROMPT_CACHE_SHARE)))


class MemoryPlan(msgspec.Struct, frozen=True):
    """What a worker of this model reserves, by line item, and whether that fits.

    overhead_bytes: a process that has imported everything and holds no model. grammar_bytes: what its first
    enforced form adds. prefill_bytes: alive for a moment during a chunk or a step. allocator_bytes: freed
    buffers that MLX keeps. context: tokens one row may hold, already lowered where the verdict says so.
    kv_bytes_per_token: what one more token of a long row costs. short_by_bytes: over the limit by this much,
    0 when it fits. fitting_context: the most tokens that would fit in the limit, 0 for none at all. told: its
    explanation where it was made elsewhere, from other lines. asked_context: tokens that were asked for where
    the model's own are fewer, 0 for no more than those.
    """

    weights_bytes: int
    overhead_bytes: int
    grammar_bytes: int
    prefill_bytes: int
    allocator_bytes: int
    kv_pool_bytes: int
    kv_bytes_per_token: int
    context: int
    planned_bytes: int
    verdict: Verdict
    limit_bytes: int | None = None
    short_by_bytes: int = 0
    fitting_context: int = 0
    told: str | None = None
    asked_context: int = 0

    @property
    def explanation(self) -> str:
        """The verdict and its numbers, for a person."""
        if self.told is not None:
            return self.told
        parts = (
            f"{format_size(self.planned_bytes)} {at_context(self.context, self.asked_context)}"
            f" (weights {format_size(self.weights_bytes)}, KV {format_size(self.kv_pool_bytes)},"
            f" prefill {format_size(self.prefill_bytes)},"
            f" process {format_size(self.overhead_bytes + self.grammar_bytes + self.allocator_bytes)})"
        )
        if self.limit_bytes is None or self.verdict == "fits":
            return f"fits: {parts}"
        limit = format_size(self.limit_bytes)
        if self.verdict == "fits_with_context":
            return f"fits in {limit} with context {self.context}: {parts}"
        way_out = f"; context = {self.fitting_context} would fit" if self.fitting_context else ""
        return f"does not fit in {limit} by {format_size(self.short_by_bytes)}: needs {parts}{way_out}"


def plan(
    facts: ModelFacts,
    *,
    backend: Backend,
    context: int | None,
    batch: int,
    limit_bytes: int | None,
    limit_is_explicit: bool = True,
    prefill_chunk: int | None = None,
) -> MemoryPlan:
    """The plan of one model.

    context: tokens the user asked for, None for min(the model's own, DEFAULT_CONTEXT_TOKENS); never more
    than the model's own. batch: rows. limit_bytes: the most this model may take, None for no limit.
    limit_is_explicit: whether that limit may lower the context.
    """
    wanted, asked = wanted_context(facts.max_context, context)
    chunk = prefill_chunk or PREFILL_CHUNK_TOKENS[backend]
    weights = facts.weights_float32_bytes if backend == "cpu" else facts.weights_bytes
    overhead = OVERHEAD_BYTES[backend]
    element = _kv_element_bytes(facts, backend)

    def prefill(tokens: int) -> int:
        return prefill_bytes(facts, element, min(chunk, tokens), tokens, batch, scores=backend == "cpu")

    def pool(tokens: int) -> int:
        return kv_pool_bytes(facts, element, tokens, batch, min(chunk, tokens))

    def total(tokens: int) -> int:
        live = weights + overhead + prefill(tokens) + pool(tokens)
        return live + _allocator_bytes(live) + GRAMMAR_BYTES

    verdict: Verdict = "fits"
    short_by = fitting = 0
    served = wanted
    if limit_bytes is not None and total(wanted) > limit_bytes:
        fitting = largest(min(MIN_CONTEXT_TOKENS, wanted), wanted, lambda n: total(n) <= limit_bytes)
        if fitting and limit_is_explicit:
            verdict, served = "fits_with_context", fitting
        else:
            verdict, short_by = "does_not_fit", total(wanted) - limit_bytes
    live = weights + overhead + prefill(served) + pool(served)
    return MemoryPlan(
        weights_bytes=weights,
        overhead_bytes=overhead,
        grammar_bytes=GRAMMAR_BYTES,
        prefill_bytes=prefill(served),
        allocator_bytes=_allocator_bytes(live),
        kv_pool_bytes=pool(served),
        kv_bytes_per_token=kv_bytes_per_token(facts, backend),
        context=served,
        planned_bytes=total(served),
        verdict=verdict,
        limit_bytes=limit_bytes,
        short_by_bytes=short_by,
        fitting_context=fitting,
        asked_context=asked,
    )


def wanted_context(own: int | None, asked: int | None) -> tuple[int, int]:
    """Tokens to plan for, and what was asked for where that is more than the model has. own: what its config
    says, None where it is silent. asked: None for the usual."""
    most = own or DEFAULT_CONTEXT_TOKENS
    return min(most, asked or DEFAULT_CONTEXT_TOKENS), asked if asked is not None and asked > most else 0


def at_context(context: int, asked: int) -> str:
    """For a person. asked: more than the model has, 0 for no more."""
    told = f" ({asked} was asked for, which is more than the model has)" if asked else ""
    return f"at context {context}{told}"


def kv_bytes_per_token(facts: ModelFacts, backend: Backend) -> int:
    """Bytes that one more token adds to a row longer than every window."""
    element = _kv_element_bytes(facts, backend)
    return sum(layer.kv_width * element for layer in facts.layers if layer.window is None)


def _kv_element_bytes(facts: ModelFacts, backend: Backend) -> int:
    # KV has the type the model computes in.
    return _FLOAT32_BYTES if backend == "cpu" else facts.float_bytes


def kv_pool_bytes(facts: ModelFacts, element: int, tokens: int, batch: int, chunk: int) -> int:
    """One row of `tokens`, and the fixed state that every row of the batch has of its own. element: bytes."""
    held = -(-tokens // KV_STEP_TOKENS) * KV_STEP_TOKENS
    kept = 0
    for layer in facts.layers:
        # While a chunk is prefilled a window's buffer holds the window and the chunk.
        span = held if layer.window is None else min(held, layer.window + chunk)
        kept += layer.kv_width * element * span + layer.state_bytes * batch
    return kept


def prefill_bytes(
    facts: ModelFacts, element: int, chunk: int, tokens: int, batch: int, *, scores: bool
) -> int:
    """What is alive for a moment while a chunk is computed, or a step of the whole batch. element: bytes of a
    number. scores: whether attention holds all of its scores."""
    widths = _LIVE_HIDDEN * facts.hidden + _LIVE_FFN * facts.ffn
    activations = chunk * widths * element
    logits = LIVE_LOGITS * batch * facts.vocab * _FLOAT32_BYTES
    # Growing a KV buffer copies it: one layer's old buffer lives beside its new one.
    regrown = max((layer.kv_width for layer in facts.layers), default=0) * element * tokens
    held = _LIVE_SCORES * facts.heads * chunk * tokens * _FLOAT32_BYTES if scores else 0
    return activations + logits + regrown + held


def _allocator_bytes(live_bytes: int) -> int:
    """What MLX may keep of freed buffers: a share of the whole plan, this item included."""
    return min(
        ALLOCATOR_CACHE_LIMIT_BYTES, int(live_bytes * ALLOCATOR_CACHE_SHARE / (1 - ALLOCATOR_CACHE_SHARE))
    )


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest n in low..high that fits, 0 for none; `fits` must be monotone. Bisection."""
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
