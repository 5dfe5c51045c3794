"""What a request means for this model: ids, limits, sampling, stops. Pure and frozen.

A plan is decided once, before the engine sees it, and nothing in it changes afterwards. The precedence of
a sampling setting is request, then the launch's (command line and config), then the model folder's
generation_config.json, then the server's own default. A seed that was not asked for is drawn fresh for
every request, so two identical requests in one millisecond differ. Each choice of a request is a plan of
its own, alike but for the seed: the first has the request's, so that `n` doesn't change it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from mlxpool.shared.api.chat import ChatRequest
from mlxpool.shared.control import Launch
from mlxpool.shared.errors import context_exceeded, error
from mlxpool.worker.text.format import AnswerFormat

DEFAULT_TEMPERATURE = 0.7
DEFAULT_TOP_P = 1.0
# What mlx-lm's own server looks back; the threshold is its too.
DEFAULT_PENALTY_CONTEXT = 20
DEFAULT_XTC_THRESHOLD = 0.1

_T = TypeVar("_T")


class Sampling(msgspec.Struct, frozen=True):
    """How a row's next token is drawn.

    temperature 0: the most likely one. top_k 0, min_p 0, top_p 1, repetition_penalty 1, the other penalties 0
    and xtc_probability 0 are off. Each penalty looks at the last `…_context` tokens of prompt and answer, 0
    for all of them. seed: unsigned 64 bits. logit_bias: (token id, added to its logit).
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float = 1.0
    repetition_context: int = DEFAULT_PENALTY_CONTEXT
    presence_penalty: float = 0.0
    presence_context: int = DEFAULT_PENALTY_CONTEXT
    frequency_penalty: float = 0.0
    frequency_context: int = DEFAULT_PENALTY_CONTEXT
    xtc_probability: float = 0.0
    xtc_threshold: float = DEFAULT_XTC_THRESHOLD
    logit_bias: tuple[tuple[int, float], ...] = ()


class ThinkingLimit(msgspec.Struct, frozen=True):
    """tokens: how many of reasoning may be sampled. closings: ids of what closes a block, by its closing tag.
    not_then: ids that may not follow that."""

    tokens: int
    closings: dict[str, tuple[int, ...]]
    not_then: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """What one row does. max_tokens: ceiling on sampled tokens, inside the context. limited: whether somebody
    set it, which makes it worth reserving memory for. top_logprobs: how many alternatives each token's
    log-probability comes with, None for no log-probabilities. xtc_keeps: ids that XTC never removes.
    namespace: what its keys and values depend on beside the ids. boundaries: lengths of its prompt that a
    later prompt may have in common with it, ascending, each 1 or more and less than it has ids. thinking:
    where its reasoning ends at the latest, None for no such place."""

    ids: tuple[int, ...]
    max_tokens: int
    limited: bool
    sampling: Sampling
    eos_ids: frozenset[int]
    format: AnswerFormat = AnswerFormat()
    top_logprobs: int | None = None
    xtc_keeps: tuple[int, ...] = ()
    namespace: str = ""
    boundaries: tuple[int, ...] = ()
    thinking: ThinkingLimit | None = None


class Defaults(msgspec.Struct, frozen=True):
    """What applies where a request says nothing; `context` is the enforced limit in tokens.

    calm_temperature: what `temperature` becomes for an answer without reasoning: folders of models that
    reason name one that suits reasoning."""

    context: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    calm_temperature: float


class Prompt(msgspec.Struct, frozen=True):
    """What a request's messages came to, or one of its raw prompts, whose ids may be no tokens of this model.
    reasons: False where reasoning was switched off. boundaries, thinking: as a plan's. field: what the wire
    calls it, None for the request's own name."""

    ids: tuple[int, ...]
    format: AnswerFormat
    reasons: bool = True
    boundaries: tuple[int, ...] = ()
    thinking: ThinkingLimit | None = None
    field: str | None = None


class Vocabulary(msgspec.Struct, frozen=True):
    """What a plan needs of the tokenizer. size: ids there are. newline: the ids of a bare newline."""

    size: int
    eos_ids: frozenset[int]
    newline: tuple[int, ...] = ()


def _number(config: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number of generation_config.json, None where it is missing or means nothing."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if low <= value <= high else None


def _first(*values: _T | None, default: _T) -> _T:
    return next((value for value in values if value is not None), default)


def defaults(launch: Launch, generation_config: Mapping[str, Any]) -> Defaults:
    """The launch's settings over the folder's over the server's own."""
    top_k = _number(generation_config, "top_k", 0, 2**31)
    own = _number(generation_config, "temperature", 0, 2)
    temperature = _first(launch.temperature, own, default=DEFAULT_TEMPERATURE)
    return Defaults(
        context=launch.context,
        max_tokens=launch.max_tokens,
        temperature=temperature,
        top_p=_first(launch.top_p, _number(generation_config, "top_p", 1e-6, 1), default=DEFAULT_TOP_P),
        top_k=_first(launch.top_k, None if top_k is None else int(top_k), default=0),
        min_p=_first(_number(generation_config, "min_p", 0, 1), default=0.0),
        repetition_penalty=_first(_number(generation_config, "repetition_penalty", 1e-6, 10), default=1.0),
        calm_temperature=min(temperature, DEFAULT_TEMPERATURE) if launch.temperature is None else temperature,
    )


def make_plans(
    request: ChatRequest, prompt: Prompt, base: Defaults, vocabulary: Vocabulary
) -> tuple[Plan, ...]:
    """A plan per choice. Raises ApiError 400 when the prompt leaves no room for one token, or when it or
    logit_bias names a token that there is not."""
    ids, field = prompt.ids, prompt.field or request.prompt_field
    if not ids:
        raise error("invalid_request", f"{field} makes an empty prompt", param=field)
    room = base.context - len(ids)
    if room < 1:
        raise context_exceeded(len(ids), base.context, field)
    if max(ids) >= vocabulary.size:
        place, token = next((place, token) for place, token in enumerate(ids) if token >= vocabulary.size)
        raise error(
            "invalid_request",
            f"{field}[{place}] is {token}; this model's tokens are 0 to {vocabulary.size - 1}",
            param=f"{field}[{place}]",
        )
    for token, _ in request.logit_bias:
        if not 0 <= token < vocabulary.size:
            raise error(
                "invalid_request",
                f"logit_bias names token {token}; this model's tokens are 0 to {vocabulary.size - 1}",
                param="logit_bias",
            )
    asked = (request.max_tokens, base.max_tokens, request.usual_max_tokens)
    ceiling = next((limit for limit in asked if limit is not None), None)
    most = room if ceiling is None else min(ceiling, room)
    thinking = prompt.thinking
    first = Plan(
        ids=ids,
        max_tokens=most,
        limited=ceiling is not None,
        sampling=_sampling(request, prompt, base),
        eos_ids=vocabulary.eos_ids,
        format=prompt.format,
        top_logprobs=request.top_logprobs,
        xtc_keeps=vocabulary.newline,
        boundaries=prompt.boundaries,
        thinking=None if thinking is None or thinking.tokens >= most else thinking,
    )
    return (first, *(_sibling(first, place) for place in range(1, request.n)))


def _sampling(request: ChatRequest, prompt: Prompt, base: Defaults) -> Sampling:
    return Sampling(
        temperature=_first(
            request.temperature, default=base.temperature if prompt.reasons else base.calm_temperature
        ),
        top_p=_first(request.top_p, default=base.top_p),
        top_k=_first(request.top_k, default=base.top_k),
        min_p=_first(request.min_p, default=base.min_p),
        seed=secrets.randbits(64) if request.seed is None else request.seed % 2**64,
        repetition_penalty=_first(request.repetition_penalty, default=base.repetition_penalty),
        repetition_context=_first(request.repetition_context, default=DEFAULT_PENALTY_CONTEXT),
        presence_penalty=_first(request.presence_penalty, default=0.0),
        presence_context=_first(request.presence_context, default=DEFAULT_PENALTY_CONTEXT),
        frequency_penalty=_first(request.frequency_penalty, default=0.0),
        frequency_context=_first(request.frequency_context, default=DEFAULT_PENALTY_CONTEXT),
        xtc_probability=_first(request.xtc_probability, default=0.0),
        xtc_threshold=_first(request.xtc_threshold, default=DEFAULT_XTC_THRESHOLD),
        logit_bias=request.logit_bias,
    )


def _sibling(plan: Plan, place: int) -> Plan:
    """The plan of another choice: a seed that neither this one's draws nor another sibling's come near."""
    digest = hashlib.blake2b(f"{plan.sampling.seed}:{place}".encode(), digest_size=8).digest()
    sampling = msgspec.structs.replace(plan.sampling, seed=int.from_bytes(digest, "big"))
    return msgspec.structs.replace(plan, sampling=sampling)
