"""Items of a conversation put together as the messages that a template knows. Pure.

What one turn of a model left behind comes as several items: reasoning, a message, calls. A template wants
them as one message of the assistant; they are gathered until something of somebody else follows.
"""

from __future__ import annotations

from mlxpool.shared.api.messages import ChatMessage, MadeCall


class Turns:
    """Feed it the conversation in order, then take `messages`. Owned by the request's reader."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[MadeCall] = []
        # Two texts in a row are two messages; with something between them they are of one turn.
        self._said_last = False

    def reason(self, text: str) -> None:
        """Something that the assistant thought."""
        self._reasoning.append(text)
        self._said_last = False

    def say(self, text: str) -> None:
        """Something that the assistant said."""
        if self._said_last:
            self._close()
        self._texts.append(text)
        self._said_last = True

    def call(self, call: MadeCall) -> None:
        """A call that the assistant made."""
        self._calls.append(call)
        self._said_last = False

    def put(self, message: ChatMessage) -> None:
        """A message of somebody else."""
        self._close()
        self._messages.append(message)

    def messages(self) -> tuple[ChatMessage, ...]:
        self._close()
        return tuple(self._messages)

    def _close(self) -> None:
        if self._reasoning or self._texts or self._calls:
            content = "".join(self._texts) if self._texts else None
            reasoning = "".join(self._reasoning) or None
            self._messages.append(ChatMessage("assistant", content, None, reasoning, tuple(self._calls)))
        self._reasoning, self._texts, self._calls, self._said_last = [], [], [], False
