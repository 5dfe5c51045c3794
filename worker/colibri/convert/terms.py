"""What the parts of a conversion say to each other."""

from __future__ import annotations

from typing import Protocol


class ConvertError(Exception):
    """The conversion can't be done; one line for a person, with what would work."""


class Teller(Protocol):
    """Where progress goes: shared/job_teller.py's, or a test's."""

    def progress(self, share: float, stage: str, detail: str = "") -> None:
        """share: 0 to 1 of the whole. stage: one word."""
