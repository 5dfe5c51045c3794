"""What can go wrong while experts are streamed."""

from __future__ import annotations


class ReadFault(Exception):
    """An expert could not be read. The message is for a person and names file, layer and expert.

    The request that needed it ends with this; the slots stay whole.
    """

    def __init__(self, layer: int, expert: int, file: str, reason: str) -> None:
        super().__init__(f"layer {layer}, expert {expert} could not be read from {file}: {reason}")
        self.layer, self.expert, self.file, self.reason = layer, expert, file, reason


class Interrupted(Exception):
    """Nobody waits for this pass any more: it was given up between two layers or two groups of experts."""
