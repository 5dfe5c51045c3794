"""The protocols of a worker: who reads a path's bodies, who writes its answers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mlxpool.shared.api import anthropic, completions, responses
from mlxpool.shared.api import chat as chat_body
from mlxpool.shared.api.asked import Asked
from mlxpool.shared.errors import Protocol
from mlxpool.worker.request.prepare import Prepared, Read
from mlxpool.worker.wire.chat import chat_writer
from mlxpool.worker.wire.completions import completion_writer
from mlxpool.worker.wire.messages import message_writer
from mlxpool.worker.wire.responses import ID_PREFIX, responses_writer
from mlxpool.worker.wire.writer import Identity, Writer


class Endpoint(msgspec.Struct, frozen=True):
    """protocol: whose envelope errors are in. id_prefix: of an answer's id that nobody gave. fails_in_stream:
    a prompt that is too long ends a stream, and is no refusal of its request: see docs/decisions/0008."""

    path: str
    protocol: Protocol
    id_prefix: str
    read: Read
    writer: Callable[[Prepared, Identity], Writer]
    fails_in_stream: bool = False


def read_chat(body: bytes) -> Asked:
    return Asked(chat_body.parse(body))


ENDPOINTS = (
    Endpoint("/v1/chat/completions", "openai", "chatcmpl-", read_chat, chat_writer),
    Endpoint("/v1/completions", "openai", "cmpl-", completions.parse, completion_writer),
    Endpoint("/v1/messages", "anthropic", "msg_", anthropic.parse, message_writer),
    Endpoint("/v1/responses", "responses", ID_PREFIX, responses.parse, responses_writer, True),
)
