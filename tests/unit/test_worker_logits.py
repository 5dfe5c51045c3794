"""What is done to a row's logits before its draw means what mlx-lm's processors mean, and JSON can say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_xtc, make_logits_processors

from mlxpool.worker.engine import logprobs, sampler
from mlxpool.worker.engine.masks import Masks
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.shaping import Shaping
from mlxpool.worker.request.plan import Sampling
from tests.tools.running_engine import plan, token_bytes
from tests.unit.test_worker_sampler import Row as Drawn

VOCABULARY = 40


def sampling(**changes: Any) -> Sampling:
    return Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=1, **changes)


def processed(ids: Sequence[int], logits: mx.array, of: Sampling) -> mx.array:
    """Logits as mlx-lm's own processors leave them after these ids."""
    processors = make_logits_processors(
        dict(of.logit_bias) or None,
        of.repetition_penalty if of.repetition_penalty != 1 else None,
        of.repetition_context,
        of.presence_penalty,
        of.presence_context,
        of.frequency_penalty,
        of.frequency_context,
    )
    logits = mx.array(logits)
    for processor in processors:
        logits = processor(mx.array(list(ids)), logits)
    return logits


PENALTIES = st.builds(
    sampling,
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-5, 5, width=32), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    repetition_context=st.sampled_from([0, 1, 5, 20]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    presence_context=st.sampled_from([0, 1, 5, 20]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    frequency_context=st.sampled_from([0, 2, 5, 20]),
)


@settings(max_examples=60, deadline=None)
@given(PENALTIES, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30), st.integers(1, 10))
def test_bias_and_penalties_are_mlx_lms_at_every_step(of: Sampling, ids: list[int], drawn: int) -> None:
    shaping = Shaping(of)
    prompt = max(1, len(ids) - drawn)
    for end in range(prompt, len(ids) + 1):
        logits = mx.random.normal((1, VOCABULARY), key=mx.random.key(end))
        expected = processed(ids[:end], logits, of)
        # The last of the ids is on the device alone: the host doesn't know it yet.
        shaped = shaping.shaped(logits, mx.array([ids[end - 1]]), ids[: end - 1], end - 1)
        assert mx.allclose(shaped, expected, atol=1e-5), (ids[:end], of)


def test_windows_made_anew_count_what_they_counted() -> None:
    ids = (3, 4, 3, 5, 6, 3)
    of = sampling(frequency_penalty=1.0, frequency_context=4)
    logits = mx.zeros((1, VOCABULARY))
    straight, anew = Shaping(of), Shaping(of)
    for position in range(2, 6):
        expected = straight.shaped(logits, mx.array([ids[position]]), ids[:position], position)
        anew.forget()
        again = anew.shaped(logits, mx.array([ids[position]]), ids[:position], position)
        assert mx.array_equal(expected, again)
    assert expected[0, 3].item() == -2.0


def test_a_bias_on_an_id_past_the_vocabulary_changes_nothing() -> None:
    logits = mx.zeros((1, VOCABULARY))
    shaping = Shaping(sampling(logit_bias=((VOCABULARY, 9.0), (10**9, 9.0), (2, 1.0))))
    shaped = shaping.shaped(logits, mx.array([1]), [], 0)
    assert (shaped.sum().item(), shaped[0, 2].item()) == (1.0, 1.0)


def test_settings_that_do_nothing_need_no_shaping() -> None:
    assert not Shaping.needed(sampling())
    for changes in ({"logit_bias": ((1, 2.0),)}, {"presence_penalty": -1.0}, {"repetition_penalty": 0.9}):
        assert Shaping.needed(sampling(**changes))


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("keeps", [(), (3, 17, 10**6)])
def test_xtc_drops_what_mlx_lms_drops(threshold: float, keeps: tuple[int, ...]) -> None:
    logits = mx.random.normal((1, VOCABULARY), key=mx.random.key(5)) * 3
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    known = [token for token in keeps if token < VOCABULARY]
    expected = apply_xtc(scores, 1.0, threshold, known)
    assert mx.array_equal(sampler._xtc(scores, threshold, keeps), expected)


def test_xtc_comes_as_often_as_asked_and_at_the_same_draws_for_the_same_seed() -> None:
    rows = [Drawn(7, position, xtc_probability=0.3) for position in range(3000)]
    comes = [sampler._xtc_comes(row) for row in rows]
    assert sum(comes) / 3000 == pytest.approx(0.3, abs=0.03)
    assert comes == [sampler._xtc_comes(row) for row in rows]
    assert not any(sampler._xtc_comes(Drawn(7, place, xtc_probability=0.0)) for place in range(100))
    assert all(sampler._xtc_comes(Drawn(7, place, xtc_probability=1.0)) for place in range(100))


def test_xtc_takes_the_top_choices_away_but_never_an_eos() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    settings_ = {"xtc_probability": 1.0, "xtc_threshold": 0.1}
    drawn = {sampler.sample(logits, [Drawn(seed, **settings_)]).item() for seed in range(200)}
    assert drawn == {2, 3}
    kept = [Drawn(seed, **settings_) for seed in range(200)]
    for row in kept:
        row.xtc_keeps = (0,)
    assert {sampler.sample(logits, [row]).item() for row in kept} == {0, 2, 3}


class Allowing:
    """Allows the tokens it is given; None for all, an exception to raise it."""

    def __init__(self, tokens: Sequence[int] | Exception | None) -> None:
        self.tokens = tokens

    def fill(self, mask: Any) -> bool:
        if isinstance(self.tokens, Exception):
            raise self.tokens
        if self.tokens is None:
            return False
        for token in self.tokens:
            mask[token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32))
        return True

    def accept(self, _token: int) -> bool:
        return True

    def release(self) -> None:
        pass


def constrained(*tokens: Sequence[int] | Exception | None) -> list[Row]:
    return [Row(plan([1]), None, lambda _: None, Allowing(one)) for one in tokens]  # type: ignore[arg-type]


def allowed(rows: Sequence[Row], vocabulary: int, failed: Any, masks: Masks | None = None) -> Any:
    """The masks of these rows as numpy sees them."""
    bits = (masks or Masks()).allowed(rows, vocabulary, failed)
    return None if bits is None else np.array(bits)


def none_fails(_row: Row, err: Exception) -> None:
    raise err


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.data())
def test_a_mask_allows_the_tokens_whose_bits_are_set(vocabulary: int, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, vocabulary - 1), unique=True))
    bits = allowed(constrained(tokens), vocabulary, none_fails)
    assert bits is not None
    assert np.flatnonzero(bits[0]).tolist() == sorted(tokens)
    assert bits.shape == (1, vocabulary)


def test_a_row_whose_grammar_allows_all_is_free_beside_one_that_does_not() -> None:
    free = Row(plan([1]), None, lambda _: None)  # type: ignore[arg-type]
    bits = allowed([free, *constrained([33], None)], 70, none_fails)
    assert bits is not None
    assert bits.sum(axis=1).tolist() == [70, 1, 70]
    assert allowed(constrained(None, None), 70, none_fails) is None


def test_masks_are_kept_and_say_nothing_of_those_before() -> None:
    masks = Masks()
    for tokens, others in (([1, 40], [69]), ([2], None), ([], [0, 33]), ([1, 40], [69]), ([69], [2])):
        bits = allowed(constrained(tokens, others), 70, none_fails, masks)
        assert np.flatnonzero(bits[0]).tolist() == tokens
        assert np.flatnonzero(bits[1]).tolist() == (list(range(70)) if others is None else others)
    # Five, and the one of a row that is free.
    assert len(masks._kept) == 6
    for token in range(70):
        for other in range(token):
            bits = allowed(constrained([token, other]), 70, none_fails, masks)
            assert np.flatnonzero(bits[0]).tolist() == [other, token]
    assert len(masks._kept) == 128
    assert allowed(constrained([1]), 71, none_fails, masks).shape == (1, 71)


def test_a_matcher_that_fails_is_told_and_leaves_the_others() -> None:
    rows = constrained([5], RuntimeError("no such state"))
    told: list[tuple[Row, str]] = []
    bits = allowed(rows, 70, lambda row, err: told.append((row, str(err))))
    assert told == [(rows[1], "no such state")]
    assert bits is not None
    assert bits.sum(axis=1).tolist() == [1, 70]


@pytest.mark.parametrize("top", [0, 1, 5, VOCABULARY, VOCABULARY + 3])
def test_log_probabilities_are_those_of_the_softmax_best_first(top: int) -> None:
    logits = mx.random.normal((1, VOCABULARY), key=mx.random.key(8)) * 4
    expected = np.log(np.exp(np.array(logits[0], dtype=np.float64)))
    expected -= math.log(np.exp(expected).sum())
    packed = np.array(logprobs.reading(logits, mx.array([7]), top))
    event = logprobs.event(7, packed, token_bytes)
    assert event.chosen.data == b"\x07"
    assert event.chosen.logprob == pytest.approx(expected[7], abs=1e-5)
    best = np.argsort(-expected)[:top].tolist()
    assert [one.data[0] for one in event.top] == best
    assert [one.logprob for one in event.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_what_cannot_come_has_a_log_probability_that_json_has_too() -> None:
    packed = np.array(logprobs.reading(mx.array([[0.0, -math.inf]]), mx.array([1]), 2))
    event = logprobs.event(1, packed, lambda token: b"\xff" if token else b"a")
    assert event.chosen.logprob == -9999.0
    assert event.chosen.token == "\N{REPLACEMENT CHARACTER}"
    assert [(one.token, one.logprob) for one in event.top] == [
        ("a", 0.0),
        ("\N{REPLACEMENT CHARACTER}", -9999.0),
    ]


def test_a_plan_with_log_probabilities_needs_bytes_of_tokens() -> None:
    with pytest.raises(ValueError, match="token_bytes"):
        Row(plan([1], top_logprobs=0), None, lambda _: None)  # type: ignore[arg-type]
