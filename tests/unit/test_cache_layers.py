"""What is put together from records goes on exactly as the caches that the records were cut from."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlxpool.worker.cache import layers
from mlxpool.worker.cache.layers_kinds import Unfit
from mlxpool.worker.cache.layers_memory import alias, dtype_name, dtype_of, empty
from mlxpool.worker.cache.records import RECORD_TOKENS, Layout
from tests.tools import tiny_models

# Prefill's chunks end at its multiples, from position 0.
GRID_TOKENS = 96

# Around the ends of records; beside them around the ends of windows.
LENGTHS = (1, 255, 256, 257, 512, 530)
WINDOWS = {
    "a window smaller than a record": (31, 32, 33),
    "a window larger than a record": (299, 300, 301),
    "a window that keeps its start": (299, 300, 301),
    "chunks smaller than a record": (31, 32, 33),
    "chunks larger than a record": (299, 300, 301),
}

IDS = [(place * 7 + place // 11) % 250 for place in range(900)]

Slices = list[tuple[int, int, dict[str, mx.array]]]
State = tuple[dict[str, mx.array], dict[str, list[int]]]


class Subject(NamedTuple):
    """A model and its caches."""

    model: Callable[..., mx.array]
    make_cache: Callable[[], list[Any]]

    @property
    def layout(self) -> Layout:
        layout = layers.layout_of(self.make_cache())
        assert layout is not None
        return layout


def subject(kind: tiny_models.Kind, caches: Callable[[], list[Any]] | None = None, **changed: Any) -> Subject:
    model = tiny_models.build(kind, **changed)
    return Subject(model, caches or (lambda: make_prompt_cache(model)))


def chunked(chunk_size: int) -> Subject:
    text = tiny_models.build("chunked").args.text_config
    return subject("chunked", text_config={**vars(text), "attention_chunk_size": chunk_size})


def sixteen_bits(kind: tiny_models.Kind) -> Subject:
    of = subject(kind)
    of.model.set_dtype(mx.bfloat16)  # type: ignore[attr-defined]
    return of


def listed() -> Subject:
    """A llama whose caches of keys and values are two lists, one inside of the other."""
    model = tiny_models.build("llama")

    def call(tokens: mx.array, cache: list[Any]) -> mx.array:
        first, (second,) = cache[0].caches[0], cache[0].caches[1].caches
        logits: mx.array = model(tokens, cache=[first, second])
        return logits

    return Subject(call, lambda: [CacheList(KVCache(), CacheList(KVCache()))])


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "kv": lambda: subject("llama"),
    "kv in sixteen bits": lambda: sixteen_bits("llama"),
    "one head": lambda: subject("llama", num_key_value_heads=1),
    "quantised": lambda: subject("llama", lambda: [QuantizedKVCache(32, 8) for _ in range(2)], head_dim=32),
    "concatenated": lambda: subject("llama", lambda: [ConcatenateKVCache() for _ in range(2)]),
    "a window smaller than a record": lambda: subject("sliding"),
    "a window in sixteen bits": lambda: sixteen_bits("sliding"),
    "a window larger than a record": lambda: subject("sliding", sliding_window=300),
    "a window of two records": lambda: subject("sliding", sliding_window=2 * RECORD_TOKENS),
    "a window that keeps its start": lambda: subject(
        "llama", lambda: [RotatingKVCache(max_size=300, keep=4) for _ in range(2)]
    ),
    "ssm": lambda: subject("ssm"),
    "convolutions beside kv": lambda: subject("conv"),
    "ssm and kv in a list": lambda: subject("hybrid"),
    "chunks smaller than a record": lambda: chunked(32),
    "chunks larger than a record": lambda: chunked(300),
    "lists of kv": listed,
    "an index of keys alone": lambda: subject("indexed"),
}
# Classes that rows can share, in models that do.
SHARED = (
    "kv",
    "one head",
    "a window smaller than a record",
    "a window larger than a record",
    "ssm",
    "convolutions beside kv",
    "ssm and kv in a list",
    "lists of kv",
)


@pytest.fixture(scope="module")
def subjects() -> Callable[[str], Subject]:
    made: dict[str, Subject] = {}

    def get(name: str) -> Subject:
        if name not in made:
            made[name] = SUBJECTS[name]()
        return made[name]

    return get


def feed(of: Subject, caches: list[Any], start: int, end: int, ids: Sequence[int] = IDS) -> mx.array:
    """Logits [end - start, vocabulary] of one chunk."""
    logits = of.model(mx.array([ids[start:end]]), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    return logits[0]


def chunks(length: int, also: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The chunks of a prefill of `length` tokens; also: further ends."""
    ends = {*range(0, length, GRID_TOKENS), length, *also}
    return list(pairwise(sorted(ends)))


class Kept:
    """Records of a row, cut as its caches grow."""

    def __init__(self, of: Subject) -> None:
        self.of = of
        self.slices: Slices = []

    def cut(self, caches: list[Any], start: int, end: int) -> None:
        tensors = layers.cut(caches, self.of.layout, start, end)
        mx.eval(tensors)
        self.slices.append((start, end, tensors))

    def grown(self, caches: list[Any], length: int) -> None:
        """The caches have come to `length`: the records that are whole now are cut."""
        while (start := len(self.slices) * RECORD_TOKENS) + RECORD_TOKENS <= length:
            self.cut(caches, start, start + RECORD_TOKENS)

    def ended(self, caches: list[Any], length: int) -> tuple[Slices, State]:
        """What a prefix that ends here needs: the short record at its end too, and the state there."""
        whole = len(self.slices)
        if (start := whole * RECORD_TOKENS) < length:
            self.cut(caches, start, length)
        slices, self.slices = self.slices, self.slices[:whole]
        state = layers.state(caches, self.of.layout, length)
        mx.eval(state[0])
        return slices, state


def prefilled(of: Subject, length: int, ids: Sequence[int] = IDS) -> tuple[list[Any], Slices, State]:
    """Caches that hold `length` tokens, and what was kept of them on the way."""
    caches, kept = of.make_cache(), Kept(of)
    for start, end in chunks(length):
        feed(of, caches, start, end, ids)
        kept.grown(caches, end)
    return caches, *kept.ended(caches, length)


def assembled(of: Subject, length: int, slices: Slices, state: State | None, room: int = 0) -> list[Any]:
    return layers.assemble(of.make_cache, of.layout, length, slices, state, room)


def goes_on(of: Subject, caches: list[Any], length: int) -> list[mx.array]:
    """Logits of what follows: a step, a chunk, a step."""
    ends = [length, length + 1, length + 9, length + 10]
    return [feed(of, caches, start, end) for start, end in pairwise(ends)]


def same(one: Sequence[mx.array], other: Sequence[mx.array]) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in zip(one, other, strict=True))


def through_bytes(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Written as bytes and read into arrays made for them, as files are."""
    files = {
        name: (dtype_name(tensor.dtype), tensor.shape, alias(tensor).tobytes())
        for name, tensor in tensors.items()
    }
    read: dict[str, mx.array] = {}
    for name, (dtype, shape, data) in files.items():
        read[name] = empty(dtype_of(dtype), shape)
        alias(read[name]).reshape(-1).view("u1")[:] = memoryview(data)
    return read


@pytest.mark.parametrize("name", SUBJECTS)
def test_restored_prefixes_give_the_logits_of_a_fresh_prefill(
    subjects: Callable[[str], Subject], name: str
) -> None:
    of = subjects(name)
    lengths = {*LENGTHS, *WINDOWS.get(name, ())}
    live, kept, fresh = of.make_cache(), Kept(of), of.make_cache()
    for start, end in chunks(max(lengths), also=sorted(lengths)):
        feed(of, live, start, end)
        kept.grown(live, end)
        feed(of, fresh, start, end)
        if end not in lengths:
            continue
        slices, state = kept.ended(live, end)
        expected = goes_on(of, copy.deepcopy(fresh), end)
        assert all(mx.isfinite(logits).all().item() for logits in expected)
        read = [(first, last, through_bytes(tensors)) for first, last, tensors in slices]
        read_state = (through_bytes(state[0]), json.loads(json.dumps(state[1])))
        assert same(goes_on(of, assembled(of, end, slices, state, room=300), end), expected), end
        # Whoever goes on with records changes none of them.
        assert all(
            mx.array_equal(tensors[name], copied[name]).item()
            for tensors, copied in [(state[0], read_state[0]), (slices[-1][2], read[-1][2])]
            for name in tensors
        )
        assert same(goes_on(of, assembled(of, end, read, read_state), end), expected), end
    # What it was all cut from has noticed nothing.
    assert same(goes_on(of, live, end), expected)


@pytest.mark.parametrize("length", [1, 255, 257, 511])
@pytest.mark.parametrize("name", ["kv", "quantised", "concatenated"])
def test_a_slice_cut_short_is_the_live_cache_trimmed(
    subjects: Callable[[str], Subject], name: str, length: int
) -> None:
    of = subjects(name)
    held = -(-length // RECORD_TOKENS)
    trimmed, end = of.make_cache(), held * RECORD_TOKENS
    # The same cuts: a chunk of another length is rounded otherwise.
    _, slices, _ = prefilled(of, end)
    for start, stop in chunks(end):
        feed(of, trimmed, start, stop)
    for cache in trimmed:
        cache.trim(end - length)
        if isinstance(cache, ConcatenateKVCache):
            cache.keys, cache.values = (buffer[:, :, : cache.offset] for buffer in (cache.keys, cache.values))
    restored = assembled(of, length, slices[:held], None)
    assert same(goes_on(of, restored, length), goes_on(of, trimmed, length))


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_decoding_wrote_comes_back_as_it_was(subjects: Callable[[str], Subject], name: str) -> None:
    of = subjects(name)
    caches, kept = of.make_cache(), Kept(of)
    for start, end in chunks(250):
        feed(of, caches, start, end)
    for place in range(250, 262):
        feed(of, caches, place, place + 1)
        kept.grown(caches, place + 1)
    restored = assembled(of, 262, *kept.ended(caches, 262))
    assert same(goes_on(of, restored, 262), goes_on(of, caches, 262))


@pytest.mark.parametrize("name", SHARED)
def test_a_row_out_of_a_batch_is_the_row_that_goes_on_alone(
    subjects: Callable[[str], Subject], name: str
) -> None:
    of = subjects(name)
    lengths = [310, 40, 200]
    rows = [prefilled(of, length)[0] for length in lengths]
    shared = [one.merge(list(several)) for one, *several in zip(rows[0], *rows, strict=True)]
    for step in range(12):
        tokens = mx.array([[IDS[length + step]] for length in lengths])
        mx.eval(of.model(tokens, cache=shared), [cache.state for cache in shared])
    for place, length in enumerate(length + 12 for length in lengths):
        alone = [cache.extract(place) for cache in shared]
        slices: Slices = []
        for start in range(0, length, RECORD_TOKENS):
            end = min(start + RECORD_TOKENS, length)
            slices.append((start, end, layers.cut_row(shared, place, of.layout, start, end)))
        state = layers.row_state(shared, place, of.layout, length)
        restored = assembled(of, length, slices, state)
        assert same(goes_on(of, restored, length), goes_on(of, alone, length))


# What must be noticed: the comparison above fails when something is planted.


def _wrong_offset(caches: list[Any]) -> None:
    for cache in caches:
        cache.offset -= 1


@pytest.mark.parametrize("name", ["kv", "quantised", "a window smaller than a record"])
def test_a_wrong_offset_is_noticed(subjects: Callable[[str], Subject], name: str) -> None:
    of = subjects(name)
    live, slices, state = prefilled(of, 300)
    restored = assembled(of, 300, slices, state)
    _wrong_offset(restored)
    assert not same(goes_on(of, restored, 300), goes_on(of, live, 300))


def test_a_window_put_into_the_order_of_time_is_noticed(subjects: Callable[[str], Subject]) -> None:
    of = subjects("a window smaller than a record")
    caches, kept = of.make_cache(), Kept(of)
    for place in range(60):
        feed(of, caches, place, place + 1)
    slices, (tensors, scalars) = kept.ended(caches, 60)
    assert scalars["0"] == [60, 60 - 32, 0, 32]
    ordered = {
        name: mx.roll(tensor, -scalars[name[0]][1], axis=2) if name[0] in scalars else tensor
        for name, tensor in tensors.items()
    }
    in_order = {leaf: [offset, 32, keep, size] for leaf, (offset, _, keep, size) in scalars.items()}
    expected = goes_on(of, caches, 60)
    assert same(goes_on(of, assembled(of, 60, slices, (tensors, scalars)), 60), expected)
    reordered = goes_on(of, assembled(of, 60, slices, (ordered, in_order)), 60)
    assert not same(reordered, expected)
    # The same attention in another order: it takes an exact comparison to see it.
    assert all(mx.allclose(a, b, atol=1e-3).item() for a, b in zip(reordered, expected, strict=True))


@pytest.mark.parametrize("name", ["kv", "quantised", "convolutions beside kv", "lists of kv"])
def test_swapped_records_are_noticed(subjects: Callable[[str], Subject], name: str) -> None:
    of = subjects(name)
    live, slices, state = prefilled(of, 520)
    first, second, *others = slices
    swapped = [(first[0], first[1], second[2]), (second[0], second[1], first[2]), *others]
    restored = assembled(of, 520, swapped, state)
    assert not same(goes_on(of, restored, 520), goes_on(of, live, 520))


@pytest.mark.parametrize("name", ["ssm", "convolutions beside kv", "ssm and kv in a list"])
def test_another_prefixs_state_is_noticed(subjects: Callable[[str], Subject], name: str) -> None:
    of = subjects(name)
    live, slices, _ = prefilled(of, 300)
    _, _, other = prefilled(of, 300, IDS[1:] + IDS[:1])
    restored = assembled(of, 300, slices, other)
    assert not same(goes_on(of, restored, 300), goes_on(of, live, 300))


# What does not fit is a miss.


def test_a_state_of_another_length_is_refused(subjects: Callable[[str], Subject]) -> None:
    of = subjects("a window smaller than a record")
    caches, slices, _ = prefilled(of, 300)
    _, _, other = prefilled(of, 299)
    with pytest.raises(Unfit, match="a state at 299 for one at 300"):
        assembled(of, 300, slices, other)
    with pytest.raises(Unfit, match="the state at 299 of a cache that holds 300"):
        layers.state(caches, of.layout, 299)


def test_slices_that_do_not_make_the_prefix_are_refused(subjects: Callable[[str], Subject]) -> None:
    of = subjects("kv")
    caches, slices, _ = prefilled(of, 520)
    first, second, last = slices
    for wrong in ([], [second], [first, last], [second, first], [first, second]):
        with pytest.raises(Unfit):
            assembled(of, 520, wrong, None)
    with pytest.raises(Unfit, match="in the slice from 0 to 256"):
        assembled(of, 256, [(0, 256, last[2])], None)
    with pytest.raises(Unfit, match="the slices from 256 lack layers"):
        assembled(of, 512, [first, (256, 512, {"0.k": second[2]["0.k"]})], None)
    with pytest.raises(Unfit, match="holds 520"):
        layers.cut(caches, of.layout, 512, 521)


def test_a_prefix_that_needs_a_state_is_refused_without_it(subjects: Callable[[str], Subject]) -> None:
    of = subjects("convolutions beside kv")
    _, slices, (tensors, scalars) = prefilled(of, 300)
    with pytest.raises(Unfit, match="without the state"):
        assembled(of, 300, slices, None)
    with pytest.raises(Unfit, match="no state of a ArraysCache"):
        assembled(of, 300, slices, (tensors, {}))
    with pytest.raises(Unfit, match="no state of a ArraysCache"):
        assembled(of, 300, slices, ({}, scalars))


def test_a_slice_cut_after_a_window_has_wrapped_is_as_good_as_any(subjects: Callable[[str], Subject]) -> None:
    of = subjects("a window larger than a record")
    caches = of.make_cache()
    for place in range(240, 320):
        start = 0 if place == 240 else place
        feed(of, caches, start, place + 1)
    slices = [
        (start, end, layers.cut(caches, of.layout, start, end)) for start, end in ((0, 256), (256, 320))
    ]
    state = layers.state(caches, of.layout, 320)
    assert set(slices[0][2]) == {"1.k", "1.v", "3.k", "3.v"}
    assert same(goes_on(of, assembled(of, 320, slices, state), 320), goes_on(of, caches, 320))


def test_states_of_other_sizes_are_refused() -> None:
    for made, other in (
        (RotatingKVCache(max_size=8), RotatingKVCache(max_size=9)),
        (RotatingKVCache(max_size=8), RotatingKVCache(max_size=8, keep=2)),
        (ChunkedKVCache(8), ChunkedKVCache(9)),
    ):
        for cache in (made, other):
            for _ in range(3):
                if isinstance(cache, ChunkedKVCache):
                    cache.maybe_trim_front()
                cache.update_and_fetch(mx.ones((1, 1, 6, 4)), mx.ones((1, 1, 6, 4)))
        layout = layers.layout_of([made])
        assert layout is not None
        tensors, scalars = layers.state([made], layout, 18)
        fresh = (
            RotatingKVCache(other.max_size, other.keep)
            if isinstance(other, RotatingKVCache)
            else (ChunkedKVCache(other.chunk_size))
        )
        theirs = layers.layout_of([fresh])
        assert theirs is not None
        with pytest.raises(Unfit):
            layers.assemble(lambda fresh=fresh: [fresh], theirs, 18, [], (tensors, scalars))
        with pytest.raises(Unfit):
            layers.assemble(lambda: [KVCache()], layout, 18, [], (tensors, scalars))


def test_a_class_that_is_not_known_has_no_layout() -> None:
    class Own(KVCache):
        pass

    assert layers.layout_of([KVCache(), Own()]) is None
    assert layers.layout_of([CacheList(KVCache(), Own())]) is None
    assert layers.layout_of([]) is None


def test_a_cache_that_the_model_leaves_empty_can_not_be_held() -> None:
    layout = layers.layout_of([KVCache(), KVCache()])
    assert layout is not None
    filled, unused = KVCache(), KVCache()
    filled.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    with pytest.raises(Unfit):
        layers.cut([filled, unused], layout, 0, 3)


def test_entries_that_a_model_leaves_empty_stay_so() -> None:
    held = ArraysCache(3)
    held[1] = mx.ones((1, 2, 4))
    layout = layers.layout_of([held])
    assert layout is not None
    state = layers.state([held], layout, 5)
    (back,) = layers.assemble(lambda: [ArraysCache(3)], layout, 5, [], state)
    assert back[0] is None
    assert back[2] is None
    assert back[1].tolist() == held[1].tolist()
    two = ArraysCache(3)
    two[1] = mx.array([[1.0], [2.0]])
    tensors, scalars = layers.row_state([two], 1, layout, 5)
    assert (tensors["0.1"].tolist(), scalars) == ([[2.0]], {"0": [3, 1]})


def test_a_chunk_leaves_no_more_of_a_window_than_the_window() -> None:
    cache = RotatingKVCache(max_size=32, keep=4)
    layout = layers.layout_of([cache])
    assert layout is not None
    keys = mx.arange(200).reshape(1, 1, 200, 1)
    cache.update_and_fetch(keys, keys)
    tensors, scalars = layers.state([cache], layout, 200)
    assert tensors["0.k"].reshape(-1).tolist() == [0, 1, 2, 3, *range(172, 200)]
    assert scalars == {"0": [200, 32, 4, 32]}


def test_a_state_has_no_unused_room() -> None:
    cache = ChunkedKVCache(32)
    layout = layers.layout_of([cache])
    assert layout is not None
    cache.update_and_fetch(mx.ones((1, 1, 40, 2)), mx.ones((1, 1, 40, 2)))
    tensors, scalars = layers.state([cache], layout, 40)
    assert tensors["0.k"].shape == tensors["0.v"].shape == (1, 1, 40, 2)
    assert scalars == {"0": [40, 0, 32]}
