"""Readers of what governs sampling: ranges, stops, bias, log-probabilities. Protocols share them.

A range is said once: its reader refuses by it and the documents quote it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from mlxpool.shared.api import read

# Enough for every client seen; each costs a scan of the ambiguous tail per token, and that much text may
# have to be held back.
STOPS_LIMIT = 16
STOP_LIMIT_CHARS = 1024

# Each entry is an addition per step; more of them ban a part of the vocabulary, which a grammar does better.
LOGIT_BIAS_LIMIT = 1024
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")

# Rows of one batch: what a batch holds by default.
CHOICES_HIGH = 8
TOP_LOGPROBS_HIGH = 20

# Ten times off a repeated token's logit bans it; larger numbers would do no more.
REPETITION_HIGH = 10

# No context comes near it; a larger number is a mistake, and a float's rounding is exact below it.
_COUNT_HIGH = 2**53


class Numbers(msgspec.Struct, frozen=True):
    """A range of numbers, its ends included, the low one not with above_low."""

    low: float
    high: float
    above_low: bool = False

    @property
    def text(self) -> str:
        lower = f"more than {self.low:g}, at most" if self.above_low else f"{self.low:g} to"
        return f"{lower} {self.high:g}"

    @property
    def schema(self) -> dict[str, Any]:
        """As JSON schema."""
        low = "exclusiveMinimum" if self.above_low else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}

    def read(self, fields: Mapping[str, Any], name: str) -> float | None:
        """The number that `name` holds, None where it is absent or null. Raises ApiError 400."""
        return read.number(name, fields.get(name), self.low, self.high, above_low=self.above_low)


class Counts(msgspec.Struct, frozen=True):
    """A range of whole numbers, both ends included."""

    low: int
    high: int = _COUNT_HIGH

    @property
    def text(self) -> str:
        if self.high == _COUNT_HIGH:
            return f"whole number, {self.low} or more"
        return f"whole number, {self.low} to {self.high}"

    @property
    def schema(self) -> dict[str, Any]:
        """As JSON schema."""
        high = {} if self.high == _COUNT_HIGH else {"maximum": self.high}
        return {"type": "integer", "minimum": self.low, **high}

    def read(self, fields: Mapping[str, Any], name: str) -> int | None:
        """The number that `name` holds, None where it is absent or null. Raises ApiError 400."""
        return read.integer(name, fields.get(name), self.low, self.high)


MAX_TOKENS = Counts(1)
TEMPERATURE = Numbers(0, 2)
TOP_P = Numbers(0, 1, above_low=True)
TOP_K = Counts(0)
MIN_P = Numbers(0, 1)
# 64 bits: what OpenAI documents as int64, and unsigned ones that other clients draw.
SEED = Counts(-(2**63), 2**64 - 1)
REPETITION = Numbers(0, REPETITION_HIGH, above_low=True)
PENALTY = Numbers(-2, 2)
PENALTY_CONTEXT = Counts(0)
XTC_PROBABILITY = Numbers(0, 1)
# What mlx-lm's XTC takes: above a half at most one token passes, and XTC removes none.
XTC_THRESHOLD = Numbers(0, 0.5)
LOGIT_BIAS = Numbers(-100, 100)
CHOICES = Counts(1, CHOICES_HIGH)
# Chat's clients also send -1 for none; elsewhere nobody does.
TOP_LOGPROBS = Counts(-1, TOP_LOGPROBS_HIGH)
ALTERNATIVES = Counts(0, TOP_LOGPROBS_HIGH)
# What Anthropic's own server takes is 1,024 and more; a small model may have been told to think less.
THINKING_BUDGET = Counts(1)

STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": STOP_LIMIT_CHARS}
STOPS_SCHEMA = {"type": "array", "items": STOP_SCHEMA, "maxItems": STOPS_LIMIT}


def options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What every protocol has under one name, by the names of `ChatRequest`. Raises ApiError 400."""
    return {
        "temperature": TEMPERATURE.read(fields, "temperature"),
        "top_p": TOP_P.read(fields, "top_p"),
        "top_k": TOP_K.read(fields, "top_k"),
        "min_p": MIN_P.read(fields, "min_p"),
        "seed": SEED.read(fields, "seed"),
        "repetition_penalty": REPETITION.read(fields, "repetition_penalty"),
        "repetition_context": PENALTY_CONTEXT.read(fields, "repetition_context_size"),
        "presence_penalty": PENALTY.read(fields, "presence_penalty"),
        "presence_context": PENALTY_CONTEXT.read(fields, "presence_context_size"),
        "frequency_penalty": PENALTY.read(fields, "frequency_penalty"),
        "frequency_context": PENALTY_CONTEXT.read(fields, "frequency_context_size"),
        "xtc_probability": XTC_PROBABILITY.read(fields, "xtc_probability"),
        "xtc_threshold": XTC_THRESHOLD.read(fields, "xtc_threshold"),
        "logit_bias": logit_bias("logit_bias", fields.get("logit_bias")),
    }


def stops(name: str, value: object) -> tuple[str, ...]:
    """A stop string or a list of them; () for null."""
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(stop, str) and stop for stop in given):
        raise read.invalid(
            name, f"{name} must be a non-empty string or a list of them, not {read.quoted(value)}"
        )
    if len(given) > STOPS_LIMIT:
        raise read.invalid(name, f"{name} holds {len(given)} strings; at most {STOPS_LIMIT} work")
    for stop in given:
        if len(stop) > STOP_LIMIT_CHARS:
            raise read.invalid(
                name,
                f"{name} holds {read.quoted(stop)} of {len(stop)} characters; "
                f"at most {STOP_LIMIT_CHARS} work",
            )
    return tuple(given)


def logit_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """(token id, bias) of an object whose keys are token ids; () for null. Whether the vocabulary has an id
    is for the model to say."""
    if value is None:
        return ()
    given = read.mapping(name, value, '{"42": -100}')
    if len(given) > LOGIT_BIAS_LIMIT:
        raise read.invalid(name, f"{name} holds {len(given)} tokens; at most {LOGIT_BIAS_LIMIT} work")
    biases = []
    for key in given:
        if not TOKEN_ID.fullmatch(key):
            raise read.invalid(name, f'{name}\'s keys must be token ids like "42", not {read.quoted(key)}')
        where = f"{name}.{key}"
        bias = read.number(where, given[key], LOGIT_BIAS.low, LOGIT_BIAS.high)
        if bias is None:
            raise read.invalid(where, f"{where} must be a number, not null")
        biases.append((int(key), bias))
    return tuple(biases)


def top_logprobs(fields: Mapping[str, Any]) -> int | None:
    """Alternatives per token that `logprobs` and `top_logprobs` ask for, None for no log-probabilities."""
    wanted = read.boolean("logprobs", fields.get("logprobs"), default=False)
    top = TOP_LOGPROBS.read(fields, "top_logprobs")
    if wanted:
        return max(0, top or 0)
    if top is not None and top > 0:
        raise read.invalid("top_logprobs", f"top_logprobs {top} goes with logprobs: true only; send both")
    return None


def max_tokens(fields: Mapping[str, Any], *names: str) -> int | None:
    """The ceiling that any of the `names` gives; those given must agree."""
    given = {name: limit for name in names if (limit := MAX_TOKENS.read(fields, name)) is not None}
    if len(set(given.values())) > 1:
        said = " and ".join(f"{name} {limit}" for name, limit in given.items())
        raise read.invalid(names[0], f"{said} contradict each other; send one of them")
    return next(iter(given.values()), None)
