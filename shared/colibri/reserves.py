"""What a streaming plan leaves free: for buffers of a moment, the process, and what nobody foresaw. Pure.

The allocator's reserve holds what a prefill chunk makes on its way, which MLX keeps for reuse afterwards. So
the width of a chunk follows from it: the widest whose tensors fill three quarters of the most it may be.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mlxpool.shared.backend import Backend
from mlxpool.shared.memory import GRAMMAR_BYTES, OVERHEAD_BYTES

# Wider chunks read the experts once for more tokens, but what they make on their way grows with them.
WIDEST_CHUNK_TOKENS = 2048

ALLOCATOR_LIMIT_BYTES = 4 * 2**30
# Of a small budget most has to stay for experts.
_ALLOCATOR_SHARE = 6
# What one tensor frees rarely fits the next: room for four generations of them.
_ALLOCATOR_BASE_BYTES = 64 * 2**20
_ALLOCATOR_GENERATIONS = 4

RUNTIME_BYTES = SAFETY_BYTES = 512 * 2**20
_SAFETY_SHARE_OF_LIMIT = 48
_SAFETY_SHARE_OF_MODEL = 16
# A model below this has no need of the runtime of a large one: its process is all that there is.
_LARGE_MODEL_BYTES = 2**30


class Reserves(msgspec.Struct, frozen=True):
    """chunk: widest prefill chunk, in tokens. runtime and safety together hold at least what a worker's
    process takes without a model."""

    chunk: int
    allocator_bytes: int
    runtime_bytes: int
    safety_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.allocator_bytes + self.runtime_bytes + self.safety_bytes


def process_bytes(backend: Backend) -> int:
    """Of a worker that holds no model, a compiler of grammars included: the least that a reserve may be."""
    return OVERHEAD_BYTES[backend] + GRAMMAR_BYTES


def reserves(
    model_bytes: int,
    transient: Callable[[int], int],
    backend: Backend,
    *,
    context: int,
    limit_bytes: int | None,
    widest_chunk: int | None = None,
    asked_bytes: int | None = None,
) -> Reserves:
    """model_bytes: everything else of the plan. transient: bytes that a chunk of so many tokens makes on its
    way. widest_chunk: tokens, where somebody chose. asked_bytes: all three together, where somebody chose;
    never less than the process takes.
    """
    process = process_bytes(backend)
    safety = min(SAFETY_BYTES, model_bytes // _SAFETY_SHARE_OF_MODEL)
    most = ALLOCATOR_LIMIT_BYTES
    if limit_bytes is not None:
        safety = min(safety, limit_bytes // _SAFETY_SHARE_OF_LIMIT)
        most = min(most, limit_bytes // _ALLOCATOR_SHARE)
    least_runtime = RUNTIME_BYTES if model_bytes >= _LARGE_MODEL_BYTES else min(RUNTIME_BYTES, process)
    runtime = max(least_runtime, process - safety)
    tokens = min(widest_chunk or WIDEST_CHUNK_TOKENS, context)
    chunk = _widest(tokens, transient, most * 3 // 4)
    allocator = min(most, _ALLOCATOR_BASE_BYTES + _ALLOCATOR_GENERATIONS * transient(chunk))
    if asked_bytes is None:
        return Reserves(chunk, allocator, runtime, safety)
    others = max(process, asked_bytes * (runtime + safety) // (allocator + runtime + safety))
    allocator = max(asked_bytes - others, 0)
    safety = others * safety // (runtime + safety)
    return Reserves(_widest(tokens, transient, allocator * 3 // 4), allocator, others - safety, safety)


def _widest(tokens: int, transient: Callable[[int], int], room_bytes: int) -> int:
    """The widest chunk up to `tokens` that fits, a power of two unless it is all of them; 1 at least."""
    while tokens > 1 and transient(tokens) > room_bytes:
        tokens = 1 << ((tokens - 1).bit_length() - 1)
    return tokens
