"""Whole server-sent events out of a stream's pieces, found by their blank lines and not read.

A worker's stream always begins with the event that opens it. Where the parent has opened the stream already
that event would come twice: something else is put in its place, and all the rest stays as it came.
"""

from __future__ import annotations


class WholeEvents:
    """Feed it the pieces of one stream in order. opening: sent in place of the first event; b"" keeps it."""

    def __init__(self, opening: bytes = b"") -> None:
        self._opening = opening
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """The events that this piece completes, b"" where there are none yet."""
        data = self._rest + piece if self._rest else piece
        if data.endswith(b"\n\n"):
            self._rest = b""
        else:
            cut = data.rfind(b"\n\n") + 2
            if cut == 1:
                self._rest = data
                return b""
            data, self._rest = data[:cut], data[cut:]
        if self._opening:
            data = self._opening + data.partition(b"\n\n")[2]
            self._opening = b""
        return data
