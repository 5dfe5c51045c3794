"""The kinds of job there are. A kind is a name, the shape of its configuration, and a command line."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from mlxpool.shared.config import Settings

from .pull import Pull


class Kind(Protocol):
    """One kind of job."""

    @property
    def config(self) -> type[msgspec.Struct]:
        """What it is configured with; reading it validates it."""

    def argv(self, config: Any, settings: Settings) -> list[str]:
        """The process that does it, but for its tether. It speaks `jobs/lines.py` on stdout."""


KINDS: dict[str, Kind] = {"pull": Pull()}
