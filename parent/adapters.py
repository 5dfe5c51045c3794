"""The adapters in the home, and which models each fits, told from headers: no worker is asked.

What was found out is remembered while an adapter's and a model's files stay as they are; headers of models
are not, for some have tens of thousands of tensors: they are read again for an adapter that is new. Callable
from any thread: what is remembered is replaced whole, and at worst found out twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from mlxpool.parent.strangers import contained
from mlxpool.shared import adapters, checkpoint
from mlxpool.shared.adapters import Adapter, AdapterError, Fit, Stamp
from mlxpool.shared.checkpoint import Tensor
from mlxpool.shared.colibri.folder import is_only_streamed

# More models than a machine has.
_MODELS_KEPT = 1024

_STREAMED = Fit(False, "the model's experts are streamed, which goes with no adapter")


class Available(msgspec.Struct, frozen=True):
    """One adapter, and how a model and it get on. fits: None where only mounting tells. reason: why it does
    not fit, what is wrong with its files, or why that can't be told. What its files do not say is null."""

    id: str
    path: str
    fits: bool | None
    reason: str | None
    rank: int | None = None
    scale: float | None = None
    layers: int | None = None
    bytes: int | None = None
    base: str | None = None


class _Shelved(msgspec.Struct, frozen=True):
    """An adapter as its files were under `stamp`; a text instead of it: what is wrong with them."""

    folder: Path
    stamp: Stamp | None
    read: Adapter | str


class _Fits(msgspec.Struct, frozen=True):
    """Of a model whose files have this stamp, by id: for which files of the adapter, and what was found."""

    stamp: str
    found: dict[str, tuple[Stamp | None, Fit]]


class Shelf:
    """root: home/adapters."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._adapters: Mapping[str, _Shelved] = {}
        self._fits: dict[Path, _Fits] = {}

    def ids(self) -> list[str]:
        """Of every folder there, whatever is in it."""
        return adapters.listing(self.root)

    def available(self, model: Path, *, streamed: bool = False) -> list[Available]:
        """Every adapter, by id, against the model in that folder. streamed: its settings say that its experts
        are. Reads files. Never raises."""
        shelved = self._look()
        fits = dict.fromkeys(shelved, _STREAMED) if streamed else self._against(model, shelved)
        return [_available(adapter_id, one, fits) for adapter_id, one in shelved.items()]

    def fitting(self, models: Collection[Path]) -> dict[Path, list[str]]:
        """For each of these models the ids of those that fit. Reads files. Never raises."""
        shelved = self._look()
        if not shelved:
            return {model: [] for model in models}
        found = {model: self._against(model, shelved) for model in models}
        return {
            model: [one for one in shelved if one in fits and fits[one].fits] for model, fits in found.items()
        }

    def _look(self) -> Mapping[str, _Shelved]:
        """The adapters as they are now; files that have changed are read."""
        known = self._adapters
        self._adapters = seen = {one: self._shelved(self.root / one, known.get(one)) for one in self.ids()}
        return seen

    def _shelved(self, folder: Path, known: _Shelved | None) -> _Shelved:
        stamp = None
        try:
            with contained(folder):
                try:
                    adapters.inside(folder, [self.root])
                    stamp = adapters.stamp(folder)
                    if known is not None and known.stamp == stamp:
                        return known
                    return _Shelved(folder, stamp, adapters.read(folder))
                except AdapterError as problem:
                    return _Shelved(folder, stamp, str(problem))
        except checkpoint.CheckpointError as problem:
            return _Shelved(folder, stamp, str(problem))

    def _against(self, model: Path, shelved: Mapping[str, _Shelved]) -> Mapping[str, Fit]:
        """How those that can be read and a model get on. Its headers are read where that is not known yet."""
        whole = {
            one: (held.stamp, held.read) for one, held in shelved.items() if isinstance(held.read, Adapter)
        }
        try:
            with contained(model):
                stamp = checkpoint.stamp(model)
        except checkpoint.CheckpointError as problem:
            return dict.fromkeys(whole, _unloadable(problem))
        known = self._fits.get(model)
        found = {} if known is None or known.stamp != stamp else known.found
        new = {one: held for one, held in whole.items() if one not in found or found[one][0] != held[0]}
        if new:
            fresh = _fits([adapter for _, adapter in new.values()], model)
            found = found | {one: (new[one][0], fit) for one, fit in zip(new, fresh, strict=True)}
            while len(self._fits) >= _MODELS_KEPT:
                self._fits.pop(next(iter(self._fits)), None)
            self._fits[model] = _Fits(stamp, {one: found[one] for one in whole})
        return {one: found[one][1] for one in whole}


def _available(adapter_id: str, shelved: _Shelved, fits: Mapping[str, Fit]) -> Available:
    path, read = str(shelved.folder), shelved.read
    if isinstance(read, str):
        return Available(adapter_id, path, False, read)
    fit = fits[adapter_id]
    return Available(
        adapter_id, path, fit.fits, fit.reason, read.rank, read.scale, len(read.layers), read.size_bytes,
        read.base,
    )  # fmt: skip


def _fits(made: Sequence[Adapter], model: Path) -> list[Fit]:
    try:
        with contained(model):
            if is_only_streamed(model):
                return [_STREAMED] * len(made)
            tensors: Mapping[str, Tensor] = checkpoint.read(model).tensors
            return [adapters.fit(one, tensors) for one in made]
    except checkpoint.CheckpointError as problem:
        return [_unloadable(problem)] * len(made)


def _unloadable(problem: checkpoint.CheckpointError) -> Fit:
    return Fit(False, f"the model can't be loaded: {problem}")
