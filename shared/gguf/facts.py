"""Metadata of a GGUF by name, with the type and range that the reader needs; anything else is named."""

from __future__ import annotations

import math
from typing import Any

from mlxpool.shared.text import cut

from .header import GgufError

# More than any model has of anything that is counted here.
MAX_COUNT = 2**31


class Facts:
    """The metadata of one file. architecture: what its own keys begin with."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self.architecture = self.text("general.architecture")

    def own(self, name: str) -> str:
        """The key of one of the architecture's facts."""
        return f"{self.architecture}.{name}"

    def has(self, key: str) -> bool:
        return key in self._metadata

    def get(self, key: str) -> Any:
        """Whatever is there, None where nothing is."""
        return self._metadata.get(key)

    def text(self, key: str) -> str:
        """Raises GgufError where it is missing or no text."""
        value = self._needed(key)
        if not isinstance(value, str):
            raise _wrong(key, value, "a text")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0. Raises GgufError."""
        if default is not None and key not in self._metadata:
            return default
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_COUNT:
            raise _wrong(key, value, "one whole number above 0 for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0. Raises GgufError.

        It was written as a float32: the number that was meant is the shortest one that reads back.
        """
        if default is not None and key not in self._metadata:
            return default
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise _wrong(key, value, "a number above 0")
        return float(f"{value:.7g}")

    def truth(self, key: str, default: bool) -> bool:
        """Raises GgufError where it is neither true nor false."""
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            raise _wrong(key, value, "true or false")
        return value

    def _needed(self, key: str) -> Any:
        if key not in self._metadata:
            raise GgufError(f"the GGUF has no {key}")
        return self._metadata[key]


def _wrong(key: str, value: Any, wanted: str) -> GgufError:
    return GgufError(f"{key} is {cut(repr(value))}; {wanted} is what this import knows")
