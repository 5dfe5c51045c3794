"""Whole server-sent events out of a stream's pieces, found by their blank lines and not read.

A worker's stream may begin with events that open it. Where the parent has opened the stream already those
would come twice: they are left out, and all the rest stays as it came.
"""

from __future__ import annotations


class WholeEvents:
    """Feed it the pieces of one stream in order. left_out: how many of its first events are not passed on."""

    def __init__(self, left_out: int = 0) -> None:
        self._left_out = left_out
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
        while self._left_out and data:
            data = data.partition(b"\n\n")[2]
            self._left_out -= 1
        return data
