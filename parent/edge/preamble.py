"""What the parent says in a stream before the worker can: its opening, its keep-alives, its end.

A client that has waited 10 s for a queue or a load would time out. So the parent opens the stream itself,
under an id and a creation time that it hands to the worker, and the worker goes on from there. A protocol is
one `Preamble`; chat is the one there is.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from mlxpool.shared.errors import Protocol

# A stream that has waited this long is opened; after that it hears something this often. Clients' idle
# timers start at 15 s.
OPEN_AFTER_S = 10.0
KEEP_ALIVE_S = 10.0


class Preamble(msgspec.Struct, frozen=True):
    """The parent's part of one stream.

    response_id, created: of the answer, unix seconds. opening, keep_alive: whole SSE events. terminal: bytes
    that end a complete stream: after them nothing may follow, not even an error.
    """

    response_id: str
    created: int
    opening: bytes
    keep_alive: bytes
    terminal: bytes
    protocol: Protocol


def chat_preamble(model: str) -> Preamble:
    """A chat stream's role chunk, and the empty delta that keeps it alive."""
    response_id = f"chatcmpl-{secrets.token_hex(12)}"
    created = int(time.time())

    def chunk(delta: dict[str, str]) -> bytes:
        body = {
            "id": response_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        }
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    return Preamble(
        response_id,
        created,
        chunk({"role": "assistant", "content": ""}),
        chunk({}),
        b"data: [DONE]\n\n",
        "openai",
    )
