"""What a job takes of memory and disk, from headers alone: pure, but for asking how much room a disk has.

Upper bounds in the terms of shared/memory.py: what a process holds besides its model, the weights in the type
they are computed in, and what is alive at once while it computes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import Checkpoint
from mlxpool.shared.job_tasks import SHARD_BYTES
from mlxpool.shared.memory import OVERHEAD_BYTES
from mlxpool.shared.model_facts import ModelFacts
from mlxpool.shared.quantisation import BITS, FIXED_MODES, FIXED_SCALE_BITS, Layer
from mlxpool.shared.units import format_size

from .kind import Fault

# Tokenizer, index, config and the file system's own, beside the weights.
_FOLDER_MARGIN_BYTES = 64_000_000
_FLOAT32_BYTES = 4
# Tensors of one width a layer keeps for its backward pass: inputs of its norms, projections and their sums;
# of the MLP gate, up, their product and the activation; in the shapes of mlx-lm's blocks.
_KEPT_HIDDEN = 12
_KEPT_FFN = 5
# A weight, its gradient and Adam's two averages.
_TRAINED_COPIES = 4
# Lines of the vocabulary per token: logits, their exponentials, the gradient of either.
_TRAINING_LOGITS = 4
_SCORING_LOGITS = 3
# Tokens a chunk of scoring has at most (worker/jobs/scoring.py).
SCORING_CHUNK_TOKENS: dict[Backend, int] = {"cpu": 256, "none": 256, "metal": 1024, "cuda": 2048}


def layers_of(found: Checkpoint) -> list[Layer]:
    """What can be quantised, as the files name it: matrices, and those of experts, that are no norms. The
    model may name them otherwise; sums and widths are the same."""
    return [
        Layer(name.removesuffix(".weight"), tensor.elements, tensor.shape[-1])
        for name, tensor in found.tensors.items()
        if name.endswith(".weight")
        and len(tensor.shape) in (2, 3)
        and "norm" not in name
        and "conv" not in name
    ]


def is_quantised(found: Checkpoint) -> bool:
    """Whether the weights are packed already."""
    return (
        "quantization" in found.config
        or "quantization_config" in found.config
        or any(name.endswith(".scales") for name in found.tensors)
    )


def float_bits(found: Checkpoint) -> int:
    """Of the type most weights have."""
    sizes: dict[int, int] = {}
    for tensor in found.tensors.values():
        if tensor.elements:
            bits = tensor.size_bytes * 8 // tensor.elements
            sizes[bits] = sizes.get(bits, 0) + tensor.elements
    return max(sizes, key=lambda bits: sizes[bits], default=16)


def scale_bits(mode: str, group_size: int, dtype_bits: int) -> float:
    """What scales and biases add to each quantised weight."""
    return FIXED_SCALE_BITS / group_size if mode in FIXED_MODES else 2 * dtype_bits / group_size


def quantised_bytes(
    found: Checkpoint, bits: float, mode: str, group_size: int, dtype_bits: int | None
) -> int:
    """Of the weights once quantised. bits: of a quantised weight. dtype_bits: of others; None as stored."""
    of_floats = dtype_bits or float_bits(found)
    fitting = [layer for layer in layers_of(found) if layer.width % group_size == 0]
    packed = sum(layer.weights for layer in fitting)
    others = sum(tensor.elements for tensor in found.tensors.values()) - packed
    return int((packed * (bits + scale_bits(mode, group_size, of_floats)) + others * of_floats) / 8)


def mean_bits(recipe: str) -> float:
    """An upper bound of what a recipe's layers get on average: half of them its higher bits."""
    low, high = recipe.removeprefix("mixed_").split("_")
    return (int(low) + int(high)) / 2


def fewest_and_most_bpw(found: Checkpoint, group_size: int, dtype_bits: int | None) -> tuple[float, float]:
    """Bits per weight of the whole model with every layer at the fewest bits, and at the most."""
    weights = sum(tensor.elements for tensor in found.tensors.values())
    ends = (quantised_bytes(found, bits, "affine", group_size, dtype_bits) for bits in (BITS[0], BITS[-1]))
    fewest, most = (size_bytes * 8 / weights for size_bytes in ends)
    return fewest, most


def room_faults(folder: Path, needed_bytes: int) -> list[Fault]:
    """Whether what is to be written has room where it is put together."""
    place = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return []  # what is wrong there is told when it is written
    needed = needed_bytes + _FOLDER_MARGIN_BYTES
    if free >= needed:
        return []
    sizes = f"{format_size(needed)} are needed, {format_size(free)} are free"
    return [Fault("name", f"there is not enough room under {folder}: {sizes}")]


def rewriting_bytes(found: Checkpoint, backend: Backend, result_bytes: int) -> int:
    """Memory of a job that reads weights, changes them and writes them: one file's worth of results, and the
    largest tensor thrice as float32 (as it is read, while it is changed, and changed)."""
    largest = max((tensor.elements for tensor in found.tensors.values()), default=0)
    return OVERHEAD_BYTES[backend] + min(result_bytes, SHARD_BYTES) + 3 * largest * _FLOAT32_BYTES


def weights_bytes(facts: ModelFacts, backend: Backend) -> int:
    """As a job computes with them: as a worker does."""
    return facts.weights_float32_bytes if backend == "cpu" else facts.weights_bytes


def scoring_bytes(facts: ModelFacts, backend: Backend, context: int) -> int:
    """Memory of an evaluation: weights, one window's KV, a chunk's activations, scores and logits."""
    element = _FLOAT32_BYTES if backend == "cpu" else facts.float_bytes
    chunk = min(SCORING_CHUNK_TOKENS[backend], context)
    kv = sum(layer.kv_width for layer in facts.layers) * element * context
    live = chunk * (_KEPT_HIDDEN * facts.hidden + _KEPT_FFN * facts.ffn) * element
    scores = 2 * facts.heads * chunk * context * _FLOAT32_BYTES if backend == "cpu" else 0
    logits = _SCORING_LOGITS * chunk * facts.vocab * _FLOAT32_BYTES
    return OVERHEAD_BYTES[backend] + weights_bytes(facts, backend) + 2 * kv + live + scores + logits


def adapter_weights(found: Checkpoint, facts: ModelFacts, layers: int, rank: int) -> int:
    """Numbers of an adapter of that rank on `layers` blocks: rank times the rows and columns of each."""
    blocks = max(1, len(facts.layers))
    per_block = sum(
        (tensor.elements // tensor.shape[-1]) + tensor.shape[-1]
        for name, tensor in found.tensors.items()
        if name.endswith(".weight")
        and len(tensor.shape) in (2, 3)
        and any(part.isdigit() for part in name.split("."))
    )
    return rank * per_block * layers // blocks


def training_bytes(
    found: Checkpoint,
    facts: ModelFacts,
    backend: Backend,
    *,
    rows: int,
    tokens: int,
    layers: int,
    rank: int,
    checkpointed: bool,
) -> int:
    """Memory of a training step of rows x tokens on the last `layers` blocks: weights, the adapter with its
    gradient and averages, what each of those blocks keeps for the way back (one block's where it is computed
    again), and the logits."""
    element = _FLOAT32_BYTES if backend == "cpu" else facts.float_bytes
    kept = _KEPT_HIDDEN * facts.hidden + _KEPT_FFN * facts.ffn
    scores = 2 * facts.heads * tokens * _FLOAT32_BYTES
    blocks = (1 if checkpointed else layers) + 1
    activations = rows * tokens * (kept * element + scores) * blocks
    if checkpointed:
        activations += rows * tokens * facts.hidden * element * layers
    logits = _TRAINING_LOGITS * rows * tokens * facts.vocab * _FLOAT32_BYTES
    adapter = _TRAINED_COPIES * adapter_weights(found, facts, layers, rank) * _FLOAT32_BYTES
    return OVERHEAD_BYTES[backend] + weights_bytes(facts, backend) + adapter + activations + logits
