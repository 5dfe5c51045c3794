"""What a body of any protocol comes to, for everything behind its reader.

A conversation and its options are a `ChatRequest`, whatever the wire called them. What only the protocol's
own writer needs (names of tools as the client knows them, what a response object echoes) travels along as
`own`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mlxpool.shared.api.chat import ChatRequest

RawPrompt = str | tuple[int, ...]


class Asked(msgspec.Struct, frozen=True):
    """request: the options, and the conversation. prompts: in place of a conversation, texts or token ids
    that go to the model as they are, each with `request.n` answers. warnings: what was asked for and is not
    done, in sentences. own: of the protocol's writer alone. prompt_fields: what the wire calls each of the
    prompts."""

    request: ChatRequest
    prompts: tuple[RawPrompt, ...] = ()
    warnings: tuple[str, ...] = ()
    own: Any = None
    prompt_fields: tuple[str, ...] = ()
