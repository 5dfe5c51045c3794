"""GLM-5.2's architecture agrees with the transformers implementation, on tiny random weights in float32.

Both are told every token. Their sums run in other orders, so logits agree within LOGIT_TOLERANCE (they are
spread over about 1.5) and the likeliest token is the same wherever the two likeliest lie further apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpool.shared.colibri import artifact
from mlxpool.worker.colibri import load
from mlxpool.worker.colibri.model import Model
from tests import tiny_glm
from tests.unit.colibri_world import with_experts

LOGIT_TOLERANCE = 2e-4
# More than twice what attention may choose, and no multiple of anything.
CONTEXT = 75

FULL, SHARED = "full", "shared"
# indexer_types, and what config.json says instead where that is not the list itself.
LAYERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "full and shared layers": ([FULL] * 3 + [SHARED] * 3 + [FULL], {}),
    "every layer with an indexer": ([FULL] * 7, {}),
    "shared layers by the formula": (
        [FULL, FULL, SHARED, SHARED, FULL, SHARED, SHARED],
        {"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 2},
    ),
}
CASES = [
    ("full and shared layers", 1),
    ("full and shared layers", 2),
    ("every layer with an indexer", 4),
    ("shared layers by the formula", 5),
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """How transformers makes a model of a folder."""
    import torch
    from transformers import GlmMoeDsaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(2)

    def open_folder(folder: Path) -> Any:
        return GlmMoeDsaForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()

    return open_folder


@pytest.mark.parametrize(("layers", "seed"), CASES)
def test_logits_agree_over_a_context_longer_than_attention_may_choose(
    layers: str, seed: int, theirs: Any, tmp_path: Path
) -> None:
    import torch

    types, said = LAYERS[layers]
    config = tiny_glm.config(dtype="float32", index_n_heads=16, indexer_types=types)
    numbers = tiny_glm.weights(config, seed)
    written = {key: value for key, value in {**config, **said}.items() if value is not None}
    tiny_glm.write_experts(tmp_path, written, numbers, dtype="F32", mtp=False)
    ours = load.build(artifact.read(tmp_path), "cpu")
    assert isinstance(ours, Model)
    with_experts(ours, numbers)
    ids = np.random.default_rng(seed).integers(0, 256, (1, CONTEXT))
    with torch.no_grad():
        wanted = theirs(tmp_path)(torch.tensor(ids)).logits[0].numpy()
    whole = np.array(ours(mx.array(ids))[0])
    _assert_agree(whole, wanted)
    # In a chunk, then drafts and tokens one by one, through the cache.
    cache = ours.make_cache()
    pieces = [ours(mx.array(ids[:, :40]), cache)]
    place = 40
    for length in (1, 1, 4, 1, 8, 1, 1, 9, 9):
        pieces.append(ours(mx.array(ids[:, place : place + length]), cache))
        place += length
    assert place == CONTEXT
    _assert_agree(np.array(mx.concatenate(pieces, axis=1)[0]), wanted)


def _assert_agree(ours: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    assert np.abs(ours - wanted).max() < LOGIT_TOLERANCE
    best = np.sort(wanted, axis=-1)
    clear = best[:, -1] - best[:, -2] > 2 * LOGIT_TOLERANCE
    assert clear.mean() > 0.95
    assert (ours.argmax(-1) == wanted.argmax(-1))[clear].all()
