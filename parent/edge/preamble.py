"""What the parent says in a stream before the worker can: its opening, its keep-alives, its end.

A client that has waited 10 s for a queue, a load or a worker that still prepares would time out. So the
parent opens the stream itself. Every stream's id and creation time are made here and handed to the worker,
for when the request goes out nobody knows yet who will open it. A protocol is one class like `ChatPreamble`;
chat is the one there is.
"""

from __future__ import annotations

import secrets
import time

import msgspec

# A stream that has waited this long is opened; after that it hears something this often. Clients' idle
# timers start at 15 s.
OPEN_AFTER_S = 10.0
KEEP_ALIVE_S = 10.0


class ChatPreamble:
    """The parent's part of one chat stream.

    response_id, created: of the answer, unix seconds. terminal: bytes that end a complete stream: after them
    nothing may follow, not even an error.
    """

    terminal = b"data: [DONE]\n\n"

    def __init__(self, model: str) -> None:
        self.response_id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._model = model

    def opening(self) -> bytes:
        """The role chunk of the first choice: the event that a worker's own stream begins with."""
        return self._chunk({"role": "assistant", "content": ""})

    def keep_alive(self) -> bytes:
        """An event that says nothing."""
        return self._chunk({})

    def _chunk(self, delta: dict[str, str]) -> bytes:
        body = {
            "id": self.response_id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self._model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        }
        return b"data: " + msgspec.json.encode(body) + b"\n\n"
