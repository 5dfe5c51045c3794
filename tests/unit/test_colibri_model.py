"""GLM-5.2's model: what it shares with mlx-lm's own, how its caches are kept, how a folder becomes one."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v32
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxpool.shared.backend import Backend
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.worker.cache import layers
from mlxpool.worker.cache.records import RECORD_TOKENS
from mlxpool.worker.colibri import blocks, dense, load
from mlxpool.worker.colibri.attention import Attention
from mlxpool.worker.colibri.indexer import Indexer
from mlxpool.worker.colibri.model import Gate, Model, arguments
from tests import tiny_glm
from tests.unit import colibri_families
from tests.unit.colibri_world import resident

FULL = ["full"] * 7
# Over three times what attention may choose.
IDS = mx.array(np.random.default_rng(5).integers(0, 256, (1, 101)))

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full and shared layers, in float32."""
    config = tiny_glm.config()
    numbers = tiny_glm.weights(config)
    return tiny_glm.write_stacked(tmp_path_factory.mktemp("glm"), config, numbers, bits=None, dtype="F32")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    made = resident(folder)
    assert isinstance(made, Model)
    return made


def run(model: Any, chunk: int, cache: list[Any], ids: mx.array = IDS) -> mx.array:
    pieces = []
    for start in range(0, ids.shape[1], chunk):
        pieces.append(model(ids[:, start : start + chunk], cache=cache))
        mx.eval(pieces[-1], [each.state for each in cache])
    return mx.concatenate(pieces, axis=1)


@pytest.mark.parametrize("chunk", [1, 7, 64, 101])
def test_taking_tokens_in_leaves_caches_as_a_call_does(model: Model, chunk: int) -> None:
    called, taken = model.make_cache(), model.make_cache()
    for start in range(0, 101, chunk):
        part = IDS[:, start : start + chunk]
        model(part, cache=called)
        model.take_in(part, cache=taken)
        mx.eval([each.state for each in (*called, *taken)])
    wanted, got = (tree_flatten([layer.state for layer in each]) for each in (called, taken))
    arrays = [(one, other) for (_, one), (_, other) in zip(wanted, got, strict=True) if one is not None]
    arrays = [(one, other) for one, other in arrays if isinstance(one, mx.array)]
    # Latents and rotated parts of seven layers, keys of the four with an indexer.
    assert len(arrays) >= 7 * 2 + 4
    assert all(mx.array_equal(one, other) for one, other in arrays)
    assert mx.array_equal(model(IDS[:, :1], cache=called), model(IDS[:, :1], cache=taken))


def test_a_tap_hears_of_tokens_that_are_taken_in(model: Model) -> None:
    heard: list[tuple[mx.array, mx.array]] = []
    model.tap = lambda tokens, states: heard.append((tokens, states))
    try:
        model.take_in(IDS, cache=model.make_cache())
    finally:
        model.tap = None
    ((tokens, states),) = heard
    assert mx.array_equal(tokens, IDS)
    assert mx.array_equal(states, model.hidden(IDS, cache=model.make_cache()))


@pytest.mark.parametrize("bits", [4, None])
def test_with_an_indexer_on_every_layer_it_is_mlx_lms_class_bit_for_bit(
    bits: int | None, tmp_path: Path
) -> None:
    config = tiny_glm.config(indexer_types=FULL)
    tiny_glm.write_stacked(tmp_path, config, tiny_glm.weights(config), dtype="F32", bits=bits)
    stock, _ = load_model(tmp_path)
    for layer in stock.layers:
        layer.self_attn.indexer.k_norm.eps = 1e-6  # where that class has MLX's default
    ours = resident(tmp_path)
    theirs_held, ours_held = make_prompt_cache(stock), ours.make_cache()
    for start, end in ((0, 20), (20, 84), *((at, at + 1) for at in range(84, 88)), (88, 101)):
        wanted, got = (
            made(IDS[:, start:end], cache=held) for made, held in ((stock, theirs_held), (ours, ours_held))
        )
        assert mx.array_equal(got, wanted)


def test_a_shared_layer_looks_where_the_last_full_one_looked(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[bool, mx.array | None]] = []
    call = Attention.__call__

    def watched(self: Attention, x: mx.array, cache: Any, chosen: mx.array | None) -> Any:
        out, chosen = call(self, x, cache, chosen)
        looked.append(("indexer" in self, chosen))
        return out, chosen

    monkeypatch.setattr(Attention, "__call__", watched)
    usual = model(IDS)
    assert [full for full, _ in looked] == [True, True, True, False, False, False, True]
    chosen = [np.array(each) for _, each in looked if each is not None]
    assert len(chosen) == 7
    assert all((chosen[layer] == chosen[2]).all() for layer in (3, 4, 5))
    assert not any((chosen[layer] == chosen[layer + 1]).all() for layer in (0, 1, 5))

    def forgetful(self: Attention, x: mx.array, cache: Any, chosen: mx.array | None) -> Any:
        return call(self, x, cache, None)

    monkeypatch.setattr(Attention, "__call__", forgetful)
    assert np.abs(np.array(model(IDS) - usual)).max() > 0.1


def test_without_indexers_attention_is_dense(tmp_path: Path) -> None:
    config = tiny_glm.config()
    numbers = tiny_glm.weights(config)
    tiny_glm.write_container(tmp_path / "without", config, numbers, indexer=False)
    # One that may choose everything.
    generous = tiny_glm.config(index_topk=512)
    tiny_glm.write_container(tmp_path / "generous", generous, numbers)
    without, with_them = resident(tmp_path / "without"), resident(tmp_path / "generous")
    assert [len(held.caches) for held in without.make_cache()] == [1] * 7
    assert mx.array_equal(run(without, 64, without.make_cache()), run(with_them, 64, with_them.make_cache()))


@pytest.mark.parametrize("rows", [1, 40])
def test_logits_do_not_depend_on_how_queries_are_cut_into_blocks(
    rows: int, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model(IDS)
    mx.eval(whole)
    monkeypatch.setattr(blocks, "SCORES_BYTES", rows * 4 * 101 * 4)
    assert len(list(blocks.spans(101, 4 * 101 * 4))) == -(-101 // rows)
    assert mx.array_equal(model(IDS), whole)


@pytest.mark.parametrize("form", ["float", "stacked", "row", "grouped"])
def test_logits_do_not_depend_on_how_many_heads_are_expanded_at_a_time(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_glm.config(num_hidden_layers=2, indexer_types=["full", "shared"])
    numbers = tiny_glm.weights(config)
    if form in ("float", "stacked"):
        tiny_glm.write_stacked(tmp_path, config, numbers, bits=4 if form == "stacked" else None)
    else:
        tiny_glm.write_container(tmp_path, config, numbers, scheme=form)
    held = resident(tmp_path)
    whole = held(IDS)
    mx.eval(whole)
    for heads in (1, 3):
        head_bytes = 101 * (64 + 64 + 64 + 64) * 4
        monkeypatch.setattr(blocks, "EXPANDED_BYTES", heads * head_bytes)
        assert mx.array_equal(held(IDS), whole)


def peak_bytes(made: Callable[[], mx.array | None], *given: Any) -> int:
    """What computing it takes at most beside what is given, the result included."""
    mx.eval(*given)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(made())
    return mx.get_peak_memory() - before


def test_a_chunk_behind_a_long_context_expands_a_few_heads_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head with its copies of the latents, which a packed product on the CPU makes, is 4 MiB, 16 are 64."""
    config = tiny_glm.config(
        num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=2, indexer_types=["full"] * 2
    )
    monkeypatch.setattr(blocks, "EXPANDED_BYTES", 2**20)
    tiny_glm.write_container(tmp_path, config, tiny_glm.weights(config), indexer=False)
    attention = resident(tmp_path).layers[0].self_attn
    queries, turned = mx.zeros((1, 16, 9, 64)), mx.zeros((1, 16, 9, 32))
    latent, k_rope = mx.zeros((1, 1, 4096, 64)), mx.zeros((1, 1, 4096, 32))
    took = peak_bytes(
        lambda: attention._expanded(queries, turned, latent, k_rope, None, 4087),
        *(queries, turned, latent, k_rope, attention.parameters()),
    )
    assert took < 8 * 2**20


def test_blocks_of_scores_are_alive_a_few_at_a_time(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 that are a MiB each; MLX by itself computes all of them side by side."""
    monkeypatch.setattr(blocks, "SCORES_BYTES", 2**20)
    attention = model.layers[0].self_attn
    queries, turned = mx.zeros((1, 4, 384, 64)), mx.zeros((1, 4, 384, 32))
    keys, k_rope = mx.zeros((1, 4, 4096, 64)), mx.zeros((1, 1, 32, 4096))
    took = peak_bytes(
        lambda: attention._attended(queries, turned, keys, keys, k_rope, None, 4096 - 384),
        *(queries, turned, keys, k_rope),
    )
    assert took < 12 * 2**20


def test_blocks_of_scores_stay_below_their_limit() -> None:
    for heads, context, size in ((64, 4096, 4), (64, 131072, 2), (32, 200000, 4)):
        row = heads * context * size
        widths = [end - start for start, end in blocks.spans(2048, row)]
        assert sum(widths) == 2048
        assert max(widths) * row <= blocks.SCORES_BYTES
    assert list(blocks.spans(3, 1 << 40)) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (31, 7), (33, 64), (91, 101)])
def test_what_is_put_together_from_records_goes_on_as_the_caches_they_were_cut_from(
    length: int, chunk: int, model: Model
) -> None:
    live = model.make_cache()
    run(model, chunk, live, IDS[:, :length])
    layout = layers.layout_of(live)
    assert layout is not None
    assert not layout.stateful
    cuts = [*range(0, length, 50), length]
    slices = [(start, end, layers.cut(live, layout, start, end)) for start, end in itertools.pairwise(cuts)]
    mx.eval([list(tensors.values()) for _, _, tensors in slices])
    restored = layers.assemble(model.make_cache, layout, length, slices, None, room_tokens=RECORD_TOKENS)
    rest = IDS[:, length:]
    assert mx.array_equal(run(model, chunk, restored, rest), run(model, chunk, live, rest))


@pytest.mark.parametrize("context", [20, 33, 90])
def test_rejected_drafts_leave_nothing_behind(context: int, model: Model) -> None:
    cache = model.make_cache()
    run(model, 64, cache, IDS[:, :context])
    untouched = copy.deepcopy(cache)
    model(IDS[:, context : context + 5], cache)
    assert [held.trim(4) for held in cache] == [4] * 7
    follows = IDS[:, context + 1 : context + 2]
    model(IDS[:, context : context + 1], untouched)
    # The token before was verified among others, whose products may differ in the last bit.
    ours, wanted = model(follows, cache), model(follows, untouched)
    assert np.abs(np.array(ours - wanted)).max() < 1e-3


def test_a_position_is_held_once(model: Model) -> None:
    cache = model.make_cache()
    run(model, 64, cache)
    args = model.args
    held = sum(
        part.nbytes // part.shape[2]
        for each in cache
        for one in each.caches
        for part in (one.keys, one.values)
    )
    latents = 7 * (args.kv_lora_rank + args.qk_rope_head_dim)
    assert held == 4 * (latents + 4 * args.index_head_dim)


def test_the_router_is_exact_in_float32_where_16_bits_would_choose_others() -> None:
    config = tiny_glm.config()
    gate = Gate(arguments(config, has_indexer=True))
    draw = np.random.default_rng(1)
    gate.weight = mx.array(draw.standard_normal((16, 256), np.float32) / 16).astype(mx.bfloat16)
    x = mx.array(draw.standard_normal((1, 400, 256), np.float32)).astype(mx.bfloat16)
    chosen, scores = gate(x)
    logits = np.array(x.astype(mx.float32))[0] @ np.array(gate.weight.astype(mx.float32)).T
    wanted = np.sort(np.argsort(-logits, axis=-1)[:, :4], axis=-1)
    assert (np.sort(np.array(chosen[0]), axis=-1) == wanted).all()
    assert scores.dtype == mx.float32
    narrow, _ = deepseek_v32.MoEGate.__call__(gate, x)
    assert (np.sort(np.array(narrow[0]), axis=-1) != wanted).any()


def test_hidden_states_and_head_are_what_the_model_is_made_of(model: Model) -> None:
    hidden = model.hidden(IDS)
    assert hidden.shape == (1, 101, 256)
    assert mx.array_equal(model.logits(hidden), model(IDS))


def test_the_indexer_scores_in_float32(model: Model) -> None:
    indexer = model.layers[2].self_attn.indexer
    assert isinstance(indexer, Indexer)
    assert indexer.k_norm.eps == 1e-6
    assert indexer.rope.traditional


# A container's matrices.


def unpacked(stored: tuple[tiny_glm.Stored, tiny_glm.Stored], bits: int, shape: tuple[int, int]) -> Floats:
    """The numbers that colibri's bytes and scales stand for."""
    data, scales = (np.asarray(one.data) for one in stored)
    if bits == 8:
        whole = data.view(np.int8).astype(np.float32)
    else:
        raw = data.reshape(-1).view(np.uint8)
        whole = np.stack([raw & 15, raw >> 4], axis=-1).astype(np.float32) - 8
    groups = scales.size // shape[0]
    made: Floats = (whole.reshape(shape[0], groups, -1) * scales.reshape(shape[0], groups, 1)).reshape(shape)
    return made


def test_a_container_scaled_per_row_is_the_model_of_the_numbers_it_stands_for(tmp_path: Path) -> None:
    config = tiny_glm.config(dtype="float32")
    numbers = tiny_glm.weights(config)
    tiny_glm.write_container(tmp_path / "container", config, numbers)
    stands_for = {}
    for name, number in numbers.items():
        if name.endswith(("norm.weight", "norm.bias", "gate.weight", "e_score_correction_bias")):
            stands_for[name] = number
        elif ".indexer." in name or not name.startswith("model.layers.") or "layers.7." in name:
            stands_for[name] = unpacked(tiny_glm.packed_8(number), 8, number.shape)  # type: ignore[arg-type]
        else:
            stands_for[name] = unpacked(tiny_glm.packed_4(number, None), 4, number.shape)  # type: ignore[arg-type]
    tiny_glm.write_experts(tmp_path / "floats", config, stands_for, dtype="F32")
    packed, floats = resident(tmp_path / "container"), resident(tmp_path / "floats")
    wanted = run(floats, 64, floats.make_cache())
    got = run(packed, 64, packed.make_cache())
    assert np.abs(np.array(got - wanted)).max() < 2e-3
    assert mx.array_equal(got.argmax(-1), wanted.argmax(-1))
    last = packed.make_cache()
    run(packed, 100, last, IDS[:, :100])
    alone = packed(IDS[:, 100:], last)
    assert np.abs(np.array(alone[0, 0] - wanted[0, -1])).max() < 2e-3


Stored = Callable[[Floats], tuple[tuple[tiny_glm.Stored, tiny_glm.Stored], int]]
PACKINGS: dict[str, Stored] = {
    "4 bits per row": lambda number: (tiny_glm.packed_4(number, None), 4),
    "8 bits per row": lambda number: (tiny_glm.packed_8(number), 8),
    "4 bits in groups": lambda number: (tiny_glm.packed_4(number, 64), 4),
}


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("packed", PACKINGS)
def test_a_packed_matrix_gives_the_products_of_its_numbers(packed: str, backend: Backend) -> None:
    heads, keys, values, latent = 3, 64, 32, 128
    draw = np.random.default_rng(2)
    number = draw.standard_normal((heads * (keys + values), latent), np.float32)
    stored, bits = PACKINGS[packed](number)
    numbers = unpacked(stored, bits, number.shape)
    raw, scales = (mx.array(np.asarray(one.data).reshape(-1)) for one in stored)
    raw = raw.view(mx.uint8)
    how = dense.packing("a tensor", number.shape, raw, scales, backend)  # type: ignore[arg-type]
    # Wider groups of float32 are more than CUDA's kernels can hold.
    assert how.group_size <= (64 if backend == "cuda" else 128)
    constants = dense.Constants()
    held = dense.parts(raw, scales, how, *number.shape)
    # In groups, inputs and scales are rounded to bfloat16, and here, on the CPU, sums are too.
    near = {"rtol": 0.02, "atol": 1.5} if not how.per_row else {"rtol": 1e-5, "atol": 1e-4}

    linear = dense.PackedLinear(how, constants, number.shape)
    linear.update(held)
    x = draw.standard_normal((2, 5, latent), np.float32)
    np.testing.assert_allclose(np.array(linear(mx.array(x))), x @ numbers.T, **near)

    embedding = dense.PackedEmbedding(how, constants, number.shape)
    embedding.update(held)
    tokens = draw.integers(0, len(number), (2, 400))
    np.testing.assert_allclose(np.array(embedding(mx.array(tokens))), numbers[tokens], **near)

    by_head = numbers.reshape(heads, keys + values, latent)
    for half, width, flipped, part in zip(
        dense.halves(held, heads, keys),
        (keys, values),
        (True, False),
        np.split(by_head, [keys], 1),
        strict=True,
    ):
        both = dense.PackedMultiLinear(how, constants, (heads, width, latent), flipped)
        both.update(half)
        latents = draw.standard_normal((2, 1, 5, latent), np.float32)
        wide = draw.standard_normal((2, heads, 5, width), np.float32)
        onto = both(mx.array(latents), transpose=not flipped)
        np.testing.assert_allclose(np.array(onto), latents @ part.swapaxes(1, 2), **near)
        back = both(mx.array(wide), transpose=flipped)
        np.testing.assert_allclose(np.array(back), wide @ part, **near)


def test_constants_of_all_matrices_are_views_of_one_array() -> None:
    constants = dense.Constants()
    large, small = constants.view(-8.0, (64, 4)), constants.view(-8.0, (3, 5))
    mx.eval(large, small)
    addresses = [np.array(each, copy=False).ctypes.data for each in (large, small)]
    assert addresses[0] == addresses[1]
    assert small.shape == (3, 5)
    assert (np.array(small) == -8).all()


# From a folder.


# gpt_oss is published with all experts in one tensor.
FAMILIES = [
    (kind, form)
    for kind in colibri_families.CONFIGS
    for form in ("packed", "plain", "published")
    if (kind, form) != ("gpt_oss", "published")
]


@pytest.mark.parametrize(("kind", "form"), FAMILIES)
def test_other_families_are_mlx_lms_own_class(kind: str, form: str, tmp_path: Path) -> None:
    colibri_families.write(kind, tmp_path, 4 if form == "packed" else None, each=form == "published")
    stock, _ = load_model(tmp_path)
    ours = resident(tmp_path)
    ids = IDS[:, :12]
    assert type(ours) is type(stock)
    for length in (12, 1):
        assert mx.array_equal(ours(ids[:, :length]), stock(ids[:, :length]))


def test_experts_are_not_read(folder: Path) -> None:
    artifact = artifacts.read(folder)
    made = load.build(artifact, "cpu")
    mx.eval(made.parameters())
    held = sum(value.nbytes for _, value in tree_flatten(made.parameters()))
    assert held == sum(place.size_bytes for place in artifact.dense.values())
    with pytest.raises(RuntimeError, match="before its experts were put in place"):
        mx.eval(made(IDS))


def test_a_container_holds_as_many_bytes_as_its_file(tmp_path: Path) -> None:
    config = tiny_glm.config()
    for scheme in ("row", "grouped"):
        tiny_glm.write_container(tmp_path / scheme, config, tiny_glm.weights(config), scheme=scheme)
        artifact = artifacts.read(tmp_path / scheme)
        made = load.build(artifact, "cpu")
        held = sum(value.nbytes for _, value in tree_flatten(made.parameters()))
        assert held == sum(place.size_bytes for place in artifact.dense.values())


def test_half_floats_are_widened_on_the_cpu_alone(tmp_path: Path) -> None:
    config = tiny_glm.config()
    tiny_glm.write_experts(tmp_path, config, tiny_glm.weights(config))
    artifact = artifacts.read(tmp_path)
    weight = "model.layers.0.self_attn.q_a_proj"
    assert load.module_at(load.build(artifact, "cpu"), weight).weight.dtype == mx.float32
    assert load.module_at(load.build(artifact, "metal"), weight).weight.dtype == mx.bfloat16


def test_every_end_of_turn_of_the_config_ends_an_answer(folder: Path) -> None:
    assert set(tiny_glm.EOS_IDS) <= ChatTokenizer.open(folder).eos_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tiny_glm.EOS_IDS[0]}))
    assert set(tiny_glm.EOS_IDS) <= ChatTokenizer.open(folder).eos_ids


Change = Callable[[dict[str, Any], dict[str, Floats]], object]
FAULTS: dict[str, tuple[Change, str]] = {
    "a tensor lacks": (
        lambda _, numbers: numbers.pop("model.layers.1.self_attn.o_proj.weight"),
        r"the model lacks 'model.layers.1.self_attn.o_proj.weight'",
    ),
    "an indexer lacks": (
        lambda _, numbers: [
            numbers.pop(name) for name in list(numbers) if "layers.2.self_attn.indexer" in name
        ],
        r"the model lacks 'model.layers.2.self_attn.indexer.k_norm.bias' and 4 more",
    ),
    "one too many": (
        lambda _, numbers: numbers.update({"model.layers.1.extra.weight": np.zeros((4, 4), np.float32)}),
        r"has no place for 'model.layers.1.extra.weight'",
    ),
    "another shape": (
        lambda _, numbers: numbers.update({"model.norm.weight": np.ones(255, np.float32)}),
        r"'model.norm.weight' is of shape \[255\] where the model has \[256\]",
    ),
    "a number lacks": (lambda config, _: config.pop("routed_scaling_factor"), "routed_scaling_factor"),
    "a number is absurd": (
        lambda config, _: config.update(routed_scaling_factor="2.5"),
        "routed_scaling_factor",
    ),
    "half of a packing": (lambda config, _: config.update(quantization={"bits": 4}), "group_size is missing"),
    "a switch is absurd": (lambda config, _: config.update(norm_topk_prob="yes"), "norm_topk_prob"),
    "a stretched rope": (
        lambda config, _: config.update(rope_parameters={"rope_theta": 1e6, "rope_type": "yarn"}),
        "rope_type of rope_parameters is 'yarn'",
    ),
    "a stretched rope as older configs have it": (
        lambda config, _: config.update(rope_scaling={"type": "yarn", "factor": 4.0}),
        "type of rope_scaling is 'yarn'; this architecture knows 'default'",
    ),
    "a rope of half a head": (
        lambda config, _: config["rope_parameters"].update(partial_rotary_factor=0.5),
        "partial_rotary_factor of rope_parameters is 0.5",
    ),
    "a rope of halves": (lambda config, _: config.update(rope_interleave=False), "rope_interleave is False"),
    "a rope of odd width": (lambda config, _: config.update(qk_rope_head_dim=31), "qk_rope_head_dim is 31"),
    "groups that do not come out": (lambda config, _: config.update(n_group=3), "n_group is 3, which does"),
    "more groups than there are": (lambda config, _: config.update(topk_group=2), "topk_group is 2, more"),
    "no rope": (lambda config, _: config.pop("rope_parameters"), "rope_theta is missing"),
    "an absurd rope": (
        lambda config, _: config.update(rope_parameters={"rope_theta": -1.0}),
        "rope_theta",
    ),
    "another router": (lambda config, _: config.update(scoring_func="softmax"), "scoring_func"),
    "a tied head": (lambda config, _: config.update(tie_word_embeddings=True), "tie_word_embeddings"),
    "code of its own": (lambda config, _: config.update(model_file="evil.py"), "never done here"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_no_whole_model_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    change, reason = FAULTS[fault]
    config = tiny_glm.config()
    numbers = tiny_glm.weights(config)
    change(config, numbers)
    tiny_glm.write_experts(tmp_path, config, numbers, dtype="F32", mtp=False)
    with pytest.raises(CheckpointError, match=reason):
        load.build(artifacts.read(tmp_path), "cpu")
