"""Layers that add what an adapter learnt, and sets of adapters that can be switched on and off.

A set holds, for each layer that it changes, where the model keeps the layer, the layer itself, and one that
adds scale·(x·a)·b for each adapter of the set. Switching on puts those in the layers' places, switching off
puts the layers back: with no set on, the model is the very modules that were loaded, at their speed and with
their logits. Graphs hold arrays, not modules, so a set may change while a pass runs. Engine
thread only, but for the making of a set.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxpool.shared.adapters import AdapterError, Pair
from mlxpool.shared.text import cut
from mlxpool.worker.adapters.reading import Numbers, Read

# An index of a list of layers: in one spelling, so that no two names are one layer.
_INDEX = re.compile("0|[1-9][0-9]{0,5}")


class Term(NamedTuple):
    """One adapter's matrices for one layer, in the layer's own type: x·a·b is added. The scale is in b."""

    a: mx.array
    b: mx.array


class Spot(NamedTuple):
    """Where a model keeps a layer: holder[key] is `layer` while no adapter is on."""

    holder: Any
    key: Any
    layer: nn.Module


class Adapted(nn.Module):  # type: ignore[misc]  # mlx has no types here
    """A layer with what adapters add to it."""

    def __init__(self, layer: nn.Module, terms: Sequence[Term]) -> None:
        super().__init__()
        self.layer = layer
        self._terms = tuple(terms)


class AdaptedLinear(Adapted):
    """Of a linear layer."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.layer(x)
        for a, b in self._terms:
            y = y + ((x @ a) @ b).astype(y.dtype)
        return y


class AdaptedExperts(Adapted):
    """Of a layer of experts."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        def of_each(x: mx.array, weights: mx.array) -> mx.array:
            rows = weights.swapaxes(-1, -2)
            return mx.gather_mm(x, rows, rhs_indices=indices, sorted_indices=sorted_indices)

        y: mx.array = self.layer(x, indices, sorted_indices=sorted_indices)
        for a, b in self._terms:
            y = y + of_each(of_each(x, a), b).astype(y.dtype)
        return y


class Mount(NamedTuple):
    """One adapter's arrays and the layers they belong to, by name. digest: what they do. size_bytes: held."""

    digest: bytes
    terms: Mapping[str, Term]
    spots: Mapping[str, Spot]
    size_bytes: int


def namespace_of(mounts: Sequence[Mount]) -> str:
    """What prompts are kept under that are read with these adapters on."""
    digests = sorted(mount.digest for mount in mounts)
    return f"adapters:{hashlib.blake2b(b''.join(digests), digest_size=16).hexdigest()}"


class AdapterSet:
    """Adapters that are on together. namespace: of the prompt cache, told from what they do, so that the same
    weights under another name share it and others under the same name don't."""

    def __init__(self, ids: Sequence[str], mounts: Sequence[Mount]) -> None:
        self.ids = tuple(ids)
        self.mounts = tuple(mounts)
        self.namespace = namespace_of(mounts)
        # Whatever they are called: floating point adds in the same order.
        ordered = sorted(mounts, key=lambda mount: mount.digest)
        spots = {name: spot for mount in ordered for name, spot in mount.spots.items()}
        self._changes: list[tuple[Spot, Adapted]] = []
        for name, spot in spots.items():
            terms = [mount.terms[name] for mount in ordered if name in mount.terms]
            kind = AdaptedExperts if _is_experts(spot.layer) else AdaptedLinear
            self._changes.append((spot, kind(spot.layer, terms)))

    def on(self) -> None:
        for spot, adapted in self._changes:
            spot.holder[spot.key] = adapted

    def off(self) -> None:
        for spot, _ in self._changes:
            spot.holder[spot.key] = spot.layer


class Switch:
    """The one who switches a model's sets. `under` before every forward pass; engine thread only."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._on: AdapterSet | None = None

    def under(self, wanted: AdapterSet | None) -> Any:
        """The model with this set on and no other; None: as it was loaded."""
        if wanted is not self._on:
            if self._on is not None:
                self._on.off()
            self._on = wanted
            if wanted is not None:
                wanted.on()
        return self._model


def mount(model: Any, read: Read) -> Mount:
    """An adapter's arrays on the device, each beside its layer. Raises AdapterError where the model has no
    such layer, or one of another kind or size. Engine thread only."""
    spots = {name: find(model, name) for name in read.facts.layers}
    terms: dict[str, Term] = {}
    for name, pair in read.facts.layers.items():
        _check(name, spots[name].layer, pair)
        dtype = _dtype(model, spots[name].layer)
        a, b = (_array(read.arrays[f"{name}.{half}"], of.dtype) for half, of in _halves(pair))
        scaled = read.facts.scale * b.astype(mx.float32)
        terms[name] = Term(a.astype(dtype), scaled.astype(dtype))
    mx.eval([list(term) for term in terms.values()])
    size_bytes = sum(half.nbytes for term in terms.values() for half in term)
    return Mount(read.digest, terms, spots, size_bytes)


def _halves(pair: Pair) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("lora_a", pair.a), ("lora_b", pair.b)


def _array(numbers: Numbers, dtype: str) -> mx.array:
    made = mx.array(numbers)
    return made.view(mx.bfloat16) if dtype == "BF16" else made


def find(model: Any, name: str) -> Spot:
    """Where a model keeps the layer of that name. Raises AdapterError where it has none."""
    holder: Any = None
    key: Any = None
    here = model
    for part in name.split("."):
        holder, key = here, part
        if isinstance(here, list) and _INDEX.fullmatch(part):
            key = int(part)
            here = here[key] if key < len(here) else None
        else:
            here = here.get(part) if isinstance(here, dict) else None
    layer = here.layer if isinstance(here, Adapted) else here
    if not isinstance(layer, nn.Module):
        raise AdapterError(f"the model has no layer {cut(name)!r}")
    return Spot(holder, key, layer)


def _is_experts(layer: nn.Module) -> bool:
    return isinstance(layer, SwitchLinear | QuantizedSwitchLinear)


def _check(name: str, layer: nn.Module, pair: Pair) -> None:
    experts = _is_experts(layer)
    if not (experts or isinstance(layer, nn.Linear | nn.QuantizedLinear)):
        kind = type(layer).__name__
        raise AdapterError(f"{cut(name)!r} is of kind {kind}; adapters are mounted on linear layers alone")
    has: tuple[int, ...]
    if experts:
        has = layer.num_experts, layer.output_dims, layer.input_dims
        wants: tuple[int, ...] = (pair.a.shape[0], pair.b.shape[1], pair.a.shape[-1])
    else:
        has = layer.weight.shape
        if isinstance(layer, nn.QuantizedLinear):
            has = has[0], has[1] * 32 // layer.bits
        wants = (*pair.b.shape[1:], *pair.a.shape[:1])
    if tuple(has) != wants or len(pair.a.shape) != (3 if experts else 2):
        raise AdapterError(
            f"{cut(name)!r} is for a layer of {list(wants)}, and the model's is of {list(has)}"
        )


def _dtype(model: Any, layer: nn.Module) -> mx.Dtype:
    """What a layer computes in: its weight's type, its scales' where the weight is packed; where those are
    packed too, that of the first of the model's parameters that is a number."""
    for name in ("weight", "scales"):
        if name in layer and mx.issubdtype(layer[name].dtype, mx.floating):
            return layer[name].dtype  # type: ignore[no-any-return]
    from mlx.utils import tree_flatten

    found = (value.dtype for _, value in tree_flatten(model.parameters()))
    return next((dtype for dtype in found if mx.issubdtype(dtype, mx.floating)), mx.float32)
