"""The adapters in the home, and which models each fits, told from headers: no worker is asked.

What was read of an adapter or of a model's files is remembered while those stay as they are. Callable from
any thread: what is remembered is replaced whole, and at worst read twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared import adapters, checkpoint
from mlxpool.shared.adapters import Adapter, AdapterError, Fit
from mlxpool.shared.checkpoint import Tensor

# Headers of models that are remembered: some have tens of thousands of tensors.
_MODELS_KEPT = 8


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


class _Read(msgspec.Struct, frozen=True):
    stamp: Any
    adapter: Adapter


class Shelf:
    """root: home/adapters."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._adapters: dict[str, _Read] = {}
        self._tensors: dict[Path, tuple[str, dict[str, Tensor]]] = {}

    def ids(self) -> list[str]:
        """Of every folder there, whatever is in it."""
        return adapters.listing(self.root)

    def available(self, model: Path) -> list[Available]:
        """Every adapter, by id, against the model in that folder. Reads files. Never raises."""
        return [self._available(adapter_id, model) for adapter_id in self.ids()]

    def fitting(self, model: Path) -> list[str]:
        """The ids of those that fit."""
        return [one.id for one in self.available(model) if one.fits]

    def _available(self, adapter_id: str, model: Path) -> Available:
        folder = self.root / adapter_id
        try:
            adapter = self._read(adapter_id, folder)
        except AdapterError as problem:
            return Available(adapter_id, str(folder), False, str(problem))
        try:
            found = adapters.fit(adapter, self._of_model(model))
        except checkpoint.CheckpointError as problem:
            found = Fit(False, f"the model can't be loaded: {problem}")
        return Available(
            adapter_id, str(folder), found.fits, found.reason, adapter.rank, adapter.scale,
            len(adapter.layers), adapter.size_bytes, adapter.base,
        )  # fmt: skip

    def _read(self, adapter_id: str, folder: Path) -> Adapter:
        adapters.inside(folder, [self.root])
        stamp = adapters.stamp(folder)
        known = self._adapters.get(adapter_id)
        if known is None or known.stamp != stamp:
            known = self._adapters[adapter_id] = _Read(stamp, adapters.read(folder))
        return known.adapter

    def _of_model(self, folder: Path) -> dict[str, Tensor]:
        stamp = checkpoint.stamp(folder)
        known = self._tensors.get(folder)
        if known is None or known[0] != stamp:
            while len(self._tensors) >= _MODELS_KEPT:
                self._tensors.pop(next(iter(self._tensors)), None)
            known = self._tensors[folder] = stamp, checkpoint.read(folder).tensors
        return known[1]
