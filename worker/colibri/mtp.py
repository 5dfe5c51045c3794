"""The draft layer that comes with a checkpoint (multi-token prediction; DeepSeek-AI, 2024, section 2.2).

One more decoder layer behind the last. For each position it takes the model's own final state there, normed
as for the head, and the embedding of the token that follows; what it makes of the two goes through the
model's head and says the token after that. Drafted further, it takes its own state for the model's.

Of what it keeps, keys and values, a position needs the layer's input alone, and not its experts. So they are
made for every position that the model's passes tell of, and the experts are asked for the last one only: a
draft costs the experts of one token in one layer, read through slots of the layer's own. What drafts left
there is cut off before the next round, which knows the model's states for those of them that came.

Its keys and values are of no prompt cache. A row begins with those of its last prefill chunk, at most
WINDOW_TOKENS of them, and with none at all where its whole prompt was restored: nothing is guessed before
the first pass then, and less well for some tokens. Positions count from the first that it has: rotary
embeddings know differences only. Engine thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
from mlx import nn
from mlx_lm.models.cache import CacheList

from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri.layout import Artifact
from mlxpool.worker.colibri import load
from mlxpool.worker.colibri.model import DecoderLayer, Model, ModelArgs, layer_cache
from mlxpool.worker.engine.speculation import Draw

# States of a prompt that are kept for the draft layer, in float32 12.6 MB at 6,144 wide. What follows a
# prompt depends most on its end.
WINDOW_TOKENS = 512

# A pass over more tokens is a prefill, whose states nothing else would compute: it ends with its caches.
_DECODED_TOKENS = 64

# Some checkpoints repeat the model's embedding and head beside the layer; they are the same numbers.
_REPEATED = ("embed_tokens.", "shared_head.head.")


class DraftLayer(DecoderLayer):
    """A decoder layer with experts and what joins its two inputs, by the checkpoint's names."""

    def __init__(self, args: ModelArgs, full: bool) -> None:
        super().__init__(args, args.num_hidden_layers, full)
        width, eps = args.hidden_size, args.rms_norm_eps
        self.enorm = nn.RMSNorm(width, eps=eps)
        self.hnorm = nn.RMSNorm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = _Head(width, eps)

    def joined(self, embedded: mx.array, states: mx.array) -> mx.array:
        """The layer's input [B, L, D] of the embeddings of the tokens that follow, and normed states."""
        both = mx.concatenate([self.enorm(embedded), self.hnorm(states)], axis=-1)
        joined: mx.array = self.eh_proj(both)
        return joined

    def take_in(self, x: mx.array, cache: CacheList) -> None:
        """Keep keys and values of inputs [B, L, D], no more."""
        self.self_attn(self.input_layernorm(x), cache, None)

    def state(self, x: mx.array, cache: CacheList) -> mx.array:
        """The state behind inputs [B, L, D], normed for the head, as the model's is."""
        behind, _ = self(x, cache)
        normed: mx.array = self.shared_head.norm(behind)
        return normed


class _Head(nn.Module):  # type: ignore[misc]  # mlx has no types here
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=eps)


def add_draft_layer(model: Model, artifact: Artifact, backend: Backend) -> None:
    """Give a model of this artifact its draft layer as `mtp`, experts absent, weights lazy. Raises
    CheckpointError."""
    if artifact.mtp is None:
        raise CheckpointError("the folder holds no draft layer (multi-token prediction): set mtp to off")
    start = f"model.layers.{artifact.mtp.layer}."
    dense = {
        name: place
        for name, place in artifact.mtp_dense.items()
        if not name.removeprefix(start).startswith(_REPEATED)
    }
    full = any(".indexer." in name for name in dense)
    layer = model.mtp = DraftLayer(model.args, full)
    load.clear(model, artifact.mtp)
    load.fill_draft(layer, model, msgspec.structs.replace(artifact, mtp_dense=dense), backend)


class _Heard(NamedTuple):
    """The end of a pass of the model: tokens [1, L], and the final states there [1, L, D]."""

    tokens: mx.array
    states: mx.array


class MtpDraft:
    """A `Draft` over a model that has its draft layer. It hears of every pass by the model's `tap`.

    confidence: the least probability, by the draft layer and at temperature 1, that a draft must have. To
    guess costs the experts of one layer, to verify a guess those of all: where these come from disk a guess
    that is likely wrong is dearer than none. The first that lacks it is the end of the drafts.
    """

    def __init__(self, model: Any, ahead: int, confidence: float = 0.0) -> None:
        self.ahead = ahead
        self._confidence = confidence
        self._model = model
        self._layer: DraftLayer = model.mtp
        self._full = "indexer" in self._layer.self_attn
        # Passes since the last guess, WINDOW_TOKENS and a pass at most. Nobody says whose they were: what
        # does not match a row's ids is not its.
        self._heard: deque[_Heard] = deque()
        self._cache: CacheList | None = None
        self._known = 0  # ids whose states the cache has taken in, those before its first included
        self._held = 0  # entries of the cache that are of those
        model.tap = self._hear

    def open(self) -> None:
        self._cache = None

    def close(self) -> None:
        self._cache = None
        self._heard.clear()

    def _hear(self, tokens: mx.array, states: mx.array) -> None:
        if tokens.shape[0] != 1:
            self._heard.clear()
            return
        if tokens.shape[1] > _DECODED_TOKENS:
            tokens, states = (mx.contiguous(each[:, -WINDOW_TOKENS:]) for each in (tokens, states))
            mx.eval(tokens, states)
        self._heard.append(_Heard(tokens, states))
        widths = [each.tokens.shape[1] for each in self._heard]
        while sum(widths) - widths[0] >= WINDOW_TOKENS:
            self._heard.popleft()
            widths.pop(0)

    def propose(self, ids: Sequence[int], count: int, draw: Draw) -> Sequence[int]:
        states = self._new_states(ids) if count and self._heard else None
        self._heard.clear()
        if states is None:
            self._cache = None
            return []
        new = states.shape[1]
        cache = self._cache
        if cache is None:
            cache = self._cache = layer_cache(self._full)
            self._held = 0
        # What drafts have left.
        cache.trim(cache[0].offset - self._held)
        self._held, self._known = self._held + new, len(ids) - 1
        x = self._joined(ids[len(ids) - new :], states)
        if new > 1:
            self._layer.take_in(x[:, :-1], cache)
        drafts: list[int] = []
        while True:
            behind = self._layer.state(x[:, -1:], cache)
            logits = self._model.lm_head(behind)[:, -1].astype(mx.float32)
            token = draw(logits, len(drafts))
            likely = mx.exp(logits[0, token] - mx.logsumexp(logits))
            held = [(each.keys, each.values) for each in cache.caches]
            mx.eval(token, likely, held)
            if np.array(likely)[0] < self._confidence:
                return drafts
            drafts.append(int(np.array(token)[0]))
            if len(drafts) == count:
                return drafts
            x = self._joined(drafts[-1:], behind)

    def _joined(self, tokens: Sequence[int], states: mx.array) -> mx.array:
        embedded = self._model.model.embed_tokens(mx.array([tokens], dtype=mx.uint32))
        return self._layer.joined(embedded, states)

    def _new_states(self, ids: Sequence[int]) -> mx.array | None:
        """The states [1, L, D], normed, of the ids before the last that the cache has not taken in; None
        where no pass over these was heard."""
        told: list[int] = np.concatenate([np.array(heard.tokens[0]) for heard in self._heard]).tolist()
        states = mx.concatenate([heard.states for heard in self._heard], axis=1)
        before = len(ids) - 1
        if self._cache is None:
            # Its prompt's last passes, which end before the last id.
            new = _common_end(told, ids[max(0, before - len(told)) : before])
            begins = len(told) - new
        else:
            # A round's, which went on from what is known, and past what came.
            new, begins = before - self._known, 0
            if told[:new] != list(ids[self._known : before]):
                return None
        if new < 1:
            return None
        normed: mx.array = self._model.model.norm(states[:, begins : begins + new])
        return normed


def _common_end(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the last items are the same."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
