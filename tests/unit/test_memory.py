"""Memory plans: exact line items for known shapes, and what holds for every shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.shared import checkpoint, memory
from mlxpool.shared.memory import MemoryPlan, plan
from mlxpool.shared.model_facts import Layer, ModelFacts, model_facts
from tests.tools.model_folders import LLAMA_CONFIG, TensorSpec, write_model

FACTS = ModelFacts(
    model_type="llama",
    weights_bytes=1_000_000,
    weights_float32_bytes=2_000_000,
    float_bytes=2,
    hidden=64,
    ffn=128,
    vocab=256,
    heads=4,
    max_context=2048,
    layers=(Layer(64), Layer(64)),
)


def facts_of(tmp_path: Path, config: dict[str, Any], tensors: TensorSpec | None = None) -> ModelFacts:
    return model_facts(checkpoint.read(write_model(tmp_path / "m", tensors, {**LLAMA_CONFIG, **config})))


def test_the_line_items_of_a_small_llama_on_the_cpu_backend() -> None:
    planned = plan(FACTS, backend="cpu", context=1024, batch=8, limit_bytes=None)
    overhead = memory.OVERHEAD_BYTES["cpu"]
    scores = 2 * 4 * 256 * 1024 * 4
    activations = 256 * (6 * 64 + 3 * 128) * 4
    logits = 14 * 8 * 256 * 4
    regrown = 64 * 4 * 1024
    live = 2_000_000 + overhead + scores + activations + logits + regrown + 2 * 64 * 4 * 1024
    assert planned == MemoryPlan(
        weights_bytes=2_000_000,
        overhead_bytes=overhead,
        grammar_bytes=memory.GRAMMAR_BYTES,
        prefill_bytes=scores + activations + logits + regrown,
        allocator_bytes=live // 7,
        kv_pool_bytes=2 * 64 * 4 * 1024,
        kv_bytes_per_token=2 * 64 * 4,
        context=1024,
        planned_bytes=live + live // 7 + memory.GRAMMAR_BYTES,
        verdict="fits",
    )


@pytest.mark.parametrize(
    ("total", "asked", "prompts", "models"),
    [(40, 8, 8, 32), (16, 8, 4, 12), (7, 8, 1, 6), (40, 0, 0, 40)],
)
def test_prompts_take_what_they_ask_for_and_a_quarter_at_most(
    total: int, asked: int, prompts: int, models: int
) -> None:
    budget = memory.split_budget(total, asked)
    assert (budget.total_bytes, budget.prompt_cache_bytes, budget.models_bytes) == (total, prompts, models)


def test_off_the_cpu_backend_weights_count_as_stored_and_kv_as_16_bit() -> None:
    planned = plan(FACTS, backend="metal", context=1000, batch=1, limit_bytes=None)
    assert planned.weights_bytes == 1_000_000
    assert planned.kv_bytes_per_token == 2 * 64 * 2
    assert planned.kv_pool_bytes == 2 * 64 * 2 * 1024  # buffers grow by 256 tokens


@pytest.mark.parametrize(
    ("own", "asked", "served"),
    [
        (2048, None, 2048),
        (131_072, None, 32_768),
        (131_072, 65_536, 65_536),
        (2048, 4096, 2048),
        (None, None, 32_768),
    ],
)
def test_the_context_is_what_was_asked_for_within_the_models_own(
    own: int | None, asked: int | None, served: int
) -> None:
    facts = msgspec.structs.replace(FACTS, max_context=own)
    assert plan(facts, backend="cpu", context=asked, batch=8, limit_bytes=None).context == served


def test_a_window_caps_its_layers_and_a_state_is_held_once_per_row() -> None:
    facts = msgspec.structs.replace(FACTS, layers=(Layer(64), Layer(64, window=512), Layer(0, None, 1000)))
    planned = plan(facts, backend="metal", context=2048, batch=3, limit_bytes=None, prefill_chunk=256)
    assert planned.kv_pool_bytes == 64 * 2 * 2048 + 64 * 2 * (512 + 256) + 3 * 1000
    assert planned.kv_bytes_per_token == 64 * 2


def test_only_an_explicit_limit_lowers_the_context() -> None:
    whole = plan(FACTS, backend="cpu", context=None, batch=8, limit_bytes=None).planned_bytes
    limit = whole - 1_000_000
    lowered = plan(FACTS, backend="cpu", context=None, batch=8, limit_bytes=limit)
    assert lowered.verdict == "fits_with_context"
    assert 256 <= lowered.context < 2048
    assert lowered.planned_bytes <= limit
    assert f"with context {lowered.context}" in lowered.explanation
    kept = plan(FACTS, backend="cpu", context=None, batch=8, limit_bytes=limit, limit_is_explicit=False)
    assert (kept.verdict, kept.context, kept.short_by_bytes) == ("does_not_fit", 2048, 1_000_000)
    assert kept.explanation.endswith(f"context = {lowered.context} would fit")


def test_a_context_that_the_model_has_not_is_lowered_in_so_many_words() -> None:
    own = FACTS.max_context
    assert own is not None
    asked = plan(FACTS, backend="cpu", context=own + 1, batch=8, limit_bytes=None)
    assert (asked.verdict, asked.context, asked.asked_context) == ("fits", own, own + 1)
    assert (
        f"at context {own} ({own + 1} was asked for, which is more than the model has)" in asked.explanation
    )
    for context in (own, None):
        plain = plan(FACTS, backend="cpu", context=context, batch=8, limit_bytes=None)
        assert (plain.context, plain.asked_context) == (own, 0)
        assert "asked" not in plain.explanation


def test_a_model_whose_weights_pass_the_limit_fits_at_no_context() -> None:
    planned = plan(FACTS, backend="cpu", context=None, batch=8, limit_bytes=1_500_000)
    assert planned.verdict == "does_not_fit"
    assert planned.fitting_context == 0
    assert planned.short_by_bytes == planned.planned_bytes - 1_500_000
    assert planned.explanation.startswith("does not fit in 1.5 MB by ")


widths = st.integers(1, 4096)
layers = st.builds(
    Layer,
    kv_width=st.integers(0, 4096),
    window=st.none() | st.integers(1, 8192),
    state_bytes=st.integers(0, 10**6),
)
all_facts = st.builds(
    ModelFacts,
    model_type=st.just("any"),
    weights_bytes=st.integers(0, 10**11),
    weights_float32_bytes=st.integers(0, 10**11),
    float_bytes=st.sampled_from([2, 4]),
    hidden=widths,
    ffn=widths,
    vocab=st.integers(1, 300_000),
    heads=st.integers(0, 128),
    max_context=st.none() | st.integers(1, 200_000),
    layers=st.lists(layers, max_size=6).map(tuple),
)
backends = st.sampled_from(["cpu", "metal", "cuda", "none"])
contexts = st.integers(1, 200_000)


@given(all_facts, backends, contexts, contexts, st.integers(1, 64), st.none() | st.integers(1, 4096))
def test_more_context_never_takes_less_memory(
    facts: ModelFacts, backend: Any, one: int, other: int, batch: int, chunk: int | None
) -> None:
    small, large = (
        plan(facts, backend=backend, context=n, batch=batch, limit_bytes=None, prefill_chunk=chunk)
        for n in sorted((one, other))
    )
    assert small.planned_bytes <= large.planned_bytes
    assert small.verdict == large.verdict == "fits"


@given(all_facts, backends, st.none() | contexts, st.integers(1, 64), st.integers(0, 10**12), st.booleans())
def test_the_verdict_agrees_with_the_numbers(
    facts: ModelFacts, backend: Any, context: int | None, batch: int, limit: int, explicit: bool
) -> None:
    free = plan(facts, backend=backend, context=context, batch=batch, limit_bytes=None)
    planned = plan(
        facts, backend=backend, context=context, batch=batch, limit_bytes=limit, limit_is_explicit=explicit
    )
    live = planned.weights_bytes + planned.overhead_bytes + planned.prefill_bytes + planned.kv_pool_bytes
    assert planned.planned_bytes == live + planned.allocator_bytes + planned.grammar_bytes
    assert planned.allocator_bytes <= min(2**30, planned.planned_bytes // 8 + 1)
    if planned.verdict == "fits":
        assert planned.planned_bytes == free.planned_bytes <= limit
    elif planned.verdict == "fits_with_context":
        assert explicit
        assert planned.planned_bytes <= limit
        assert planned.context < free.context
        assert planned.context == planned.fitting_context
        more = plan(facts, backend=backend, context=planned.context + 1, batch=batch, limit_bytes=None)
        assert more.planned_bytes > limit
    else:
        assert planned.context == free.context
        assert planned.planned_bytes - planned.short_by_bytes == limit
        assert planned.short_by_bytes > 0
        assert not (explicit and planned.fitting_context)


def test_16_bit_and_quantised_weights_count_as_float32_on_the_cpu_backend(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        {"quantization": {"group_size": 64, "bits": 4, "b.wide": {"group_size": 32, "bits": 8}}},
        {
            "norm.weight": ("BF16", (64,)),
            "plain.weight": ("F32", (8,)),
            "ids": ("U32", (4,)),
            # 16 rows of 128 numbers at 4 bits, 2 groups a row.
            "a.weight": ("U32", (16, 16)),
            "a.scales": ("F16", (16, 2)),
            "a.biases": ("F16", (16, 2)),
            # 4 rows of 64 numbers at 8 bits, 2 groups of 32 a row, and a linear bias that stays.
            "b.wide.weight": ("U32", (4, 16)),
            "b.wide.scales": ("F16", (4, 2)),
            "b.wide.biases": ("F16", (4, 2)),
            "b.wide.bias": ("F16", (4,)),
        },
    )
    assert facts.weights_float32_bytes == 4 * (64 + 8 + 16 * 128 + 4 * 64 + 4) + 16
    assert facts.weights_bytes == 128 + 32 + 16 + (1024 + 64 + 64) + (256 + 16 + 16) + 8


def test_a_llamas_layers_hold_keys_and_values_of_its_kv_heads(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, {})
    assert facts.layers == (Layer(64), Layer(64))
    assert (facts.hidden, facts.ffn, facts.vocab, facts.heads) == (64, 128, 256, 4)
    assert facts.max_context == 2048


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        # every sixth layer of gemma 3 is global; its head size is its own
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 8, "sliding_window": 512},
            (Layer(32, 512),) * 5 + (Layer(32),),
        ),
        (
            {
                "model_type": "gpt_oss",
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (Layer(64, 128), Layer(64)),
        ),
        # mlx-lm gives qwen2 plain caches whatever its config says of windows
        (
            {"model_type": "qwen2", "sliding_window": 128, "layer_types": ["sliding_attention"] * 2},
            (Layer(64), Layer(64)),
        ),
        # multi-head latent attention: latent and rotary part, once for all heads
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, (Layer(576),) * 2),
        # deepseek 2 is cached per head
        (
            {
                "model_type": "deepseek_v2",
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
            },
            (Layer(4 * 40),) * 2,
        ),
        (
            {
                "model_type": "qwen3_next",
                "full_attention_interval": 2,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 16,
                "linear_conv_kernel_dim": 4,
            },
            (Layer(0, None, 4 * (4 * 8 * 16 + 4 * (2 * 2 * 8 + 4 * 16))), Layer(64)),
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
            (Layer(0, None, 4 * 3 * 64), Layer(64)),
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "-*"},
            (Layer(0), Layer(64)),
        ),
        (
            {"model_type": "mamba2", "num_heads": 4, "head_dim": 64, "state_size": 16, "n_groups": 1},
            (Layer(0, None, 4 * (256 * 16 + 4 * (256 + 32))),) * 2,
        ),
    ],
)
def test_layers_by_architecture(tmp_path: Path, config: dict[str, Any], layers: tuple[Layer, ...]) -> None:
    assert facts_of(tmp_path, config).layers == layers


def test_a_text_config_inside_is_the_one_that_counts(tmp_path: Path) -> None:
    inner = {"model_type": "gemma3_text", "num_hidden_layers": 1, "hidden_size": 32, "head_dim": 4}
    facts = facts_of(tmp_path, {"model_type": "gemma3", "text_config": inner})
    assert (facts.model_type, facts.hidden, facts.layers) == ("gemma3_text", 32, (Layer(16),))


def test_heads_that_a_config_leaves_to_its_architecture_are_read_off_the_tensors(tmp_path: Path) -> None:
    # As the config of Gemma 3 4B is written: no heads, no vocabulary.
    inner = {"model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 8}
    tower, text = "vision_tower.layers.0.self_attn", "language_model.model.layers.0.self_attn"
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "language_model.model.embed_tokens.weight": ("BF16", (320, 64)),
        f"{text}.q_proj.weight": ("BF16", (512, 64)),
        f"{text}.k_proj.weight": ("U32", (256, 8)),  # packed: rows are what they were
        f"{text}.v_proj.weight": ("BF16", (256, 64)),
        f"{tower}.k_proj.weight": ("BF16", (1152, 64)),
    }
    facts = model_facts(
        checkpoint.read(write_model(tmp_path, tensors, {"model_type": "gemma3", "text_config": inner}))
    )
    assert (facts.layers, facts.heads, facts.vocab) == ((Layer(512), Layer(512)), 8, 320)


def test_numbers_of_the_wrong_type_count_as_missing(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, {"num_hidden_layers": "two", "vocab_size": True, "hidden_size": None})
    assert (facts.layers, facts.vocab, facts.hidden) == ((), 0, 0)
    assert plan(facts, backend="cpu", context=None, batch=8, limit_bytes=None).verdict == "fits"
