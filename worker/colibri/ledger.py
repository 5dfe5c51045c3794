"""Which experts a model is asked for, learned over its life: counts per layer and expert, kept on disk.

Old choices count less: everything halves over HALF_LIFE_TOKENS of each layer's own. A file belongs to one
state of a model's files (its fingerprint names it) and is replaced whole, so that a reader finds the old one
or the new one. What can't be read, or is of another shape, is no reason to refuse a model: it learns anew.
Owned by the engine's thread; `counts` may be asked by any.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from mlxpool.shared.files import write_whole

FORMAT = 1

# A few long conversations: favourites follow what a machine is used for, within a day.
HALF_LIFE_TOKENS = 20_000

# Writing takes some milliseconds, and what a crash loses is only learned again.
SAVE_EVERY_S = 30.0

# Files of other models, and of states that this one had, are kept up to here, the newest.
KEPT_FILES = 64


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    fingerprint: str
    layers: dict[int, list[float]]


_DECODER = msgspec.json.Decoder(_File)


class Ledger:
    """path: None keeps it in memory alone. experts: how many each layer has. clock: seconds."""

    def __init__(
        self,
        path: Path | None,
        fingerprint: str,
        experts: Mapping[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._clock = clock
        self._counts = {layer: np.zeros(count) for layer, count in experts.items()}
        self._added = dict.fromkeys(experts, 0)
        self._saved_s = clock()
        self._changed = False
        self._told = False

    @staticmethod
    def open(
        folder: str | None,
        fingerprint: str,
        experts: Mapping[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> Ledger:
        """With what is known of this state of the model. folder: None for nowhere. Never fails."""
        path = None if folder is None else Path(folder) / f"{fingerprint}.json"
        ledger = Ledger(path, fingerprint, experts, clock)
        if path is not None:
            ledger._read(path)
        return ledger

    def _read(self, path: Path) -> None:
        try:
            found = _DECODER.decode(path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            _say(f"what is known of this model's experts can't be read, it learns anew: {problem}")
            return
        read = {layer: np.array(counts, dtype=np.float64) for layer, counts in found.layers.items()}
        fits = (
            found.format == FORMAT
            and found.fingerprint == self._fingerprint
            and {layer: len(counts) for layer, counts in read.items()}
            == {layer: len(counts) for layer, counts in self._counts.items()}
            and all(np.isfinite(counts).all() and (counts >= 0).all() for counts in read.values())
        )
        if not fits:
            _say("what is known of this model's experts is of another one, it learns anew")
            return
        self._counts = read

    def add(self, layer: int, ids: npt.NDArray[np.integer]) -> None:
        """A pass's routed choices in one layer, of any shape [tokens, choices of each]."""
        counts = self._counts[layer]
        counts += np.bincount(ids.reshape(-1), minlength=len(counts))
        self._added[layer] += ids.size // max(1, ids.shape[-1])
        self._changed = True

    def counts(self, layer: int) -> npt.NDArray[np.float64]:
        """How often each expert was chosen, old choices counting less. A copy."""
        return self._counts[layer].copy()

    def hottest(self, layer: int, most: int) -> list[int]:
        """At most so many experts that were chosen at all, the most chosen first."""
        counts = self._counts[layer]
        order = np.argsort(-counts, kind="stable")[: max(0, most)]
        return [int(expert) for expert in order if counts[expert] > 0]

    def turn_ended(self) -> None:
        """Let what came before count less, and write now and then."""
        for layer, tokens in self._added.items():
            if tokens:
                self._counts[layer] *= 0.5 ** (tokens / HALF_LIFE_TOKENS)
                self._added[layer] = 0
        if self._clock() - self._saved_s >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write what has changed. A disk that takes it not costs the file alone."""
        self._saved_s = self._clock()
        path = self._path
        if path is None or not self._changed:
            return
        layers = {
            layer: [round(count, 3) for count in counts.tolist()] for layer, counts in self._counts.items()
        }
        body = msgspec.json.encode(_File(FORMAT, self._fingerprint, layers))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The engine's thread waits for no disk; what a crash of the machine takes is learned again.
            write_whole(path, lambda file: file.write(body), durable=False)
            _keep_newest(path.parent)
        except OSError as problem:
            if not self._told:
                _say(f"what is learned of this model's experts can't be written: {problem}")
            self._told = True
            return
        self._changed = False


def _keep_newest(folder: Path) -> None:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # Another model's process may be at the same.
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith(".json"):
                    found.append((entry.stat().st_mtime_ns, entry.path))
    for _, path in sorted(found)[:-KEPT_FILES]:
        Path(path).unlink(missing_ok=True)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
