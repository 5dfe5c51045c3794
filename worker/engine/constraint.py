"""What the engine knows of a grammar: which tokens may come next."""

from __future__ import annotations

from typing import Any, Protocol


class Constraint(Protocol):
    """One row's place in its grammar. Made before the row is submitted, then owned by the engine's thread;
    `release` is called once, at the row's end, whatever the end is. An ApiError of `fill` or `accept` is what
    the row's client is told."""

    @property
    def over(self) -> bool:
        """Whether the answer ends after the token that was accepted last: the grammar is complete, and this
        model has no token to say so with."""

    def fill(self, mask: Any) -> bool:
        """Write the tokens that may come next into `mask` (numpy int32 [ceil(vocabulary / 32)], bit i of
        word w set: token 32 w + i may come). False where every token may, and the mask is untouched."""

    def accept(self, token: int) -> bool:
        """Step over a sampled token, an eos included; False when the grammar has no place for it."""

    def release(self) -> None:
        """Give back what the matcher holds."""
