"""Reader of Anthropic's `system` and `messages`: blocks, as the messages of every protocol.

A user's message with results of tools and text becomes messages of the roles `tool` and `user`, in that
order of theirs. An assistant's becomes one: what it thought, said and called. Clients send back what they
were given, by whichever server: signatures mean nothing here, what only a hosted model can read (encrypted
thinking, calls that its servers made) is left out with a warning. Ids of calls become the model's own again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.shared.api import parts, read, tool_use_ids
from mlxpool.shared.api.messages import ChatMessage, MadeCall
from mlxpool.shared.api.table import is_off
from mlxpool.shared.api.warned import Warnings

_ROLES = ("user", "assistant", "system")

# Blocks of one text are paragraphs of it; what a model said itself goes on as it said it.
_BETWEEN_BLOCKS = "\n"

# Calls that a hosted model's servers made, what came of them, and which model answered in another's place.
_HOSTED = (
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "fallback",
)
_MEDIA = ("image", "document", "container_upload", "search_result", "browser_state")

_BLOCKS = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input", "caller", "toolset_name"),
    "tool_result": ("tool_use_id", "content", "is_error", "toolset_name"),
    "tool_reference": ("tool_name",),
}
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}

_Blocks = list[tuple[str, dict[str, Any]]]


class Reading:
    """Reads one body's conversation. warnings: told of what is left out."""

    def __init__(self, warnings: Warnings) -> None:
        self._warnings = warnings

    def messages(self, system: object, value: object) -> tuple[ChatMessage, ...]:
        """`system` and `messages`. Raises ApiError 400 naming the block, its field and what would work."""
        if value is None:
            raise read.invalid("messages", "messages is missing; it must be a non-empty list of messages")
        if not isinstance(value, list) or not value:
            raise read.invalid(
                "messages", f"messages must be a non-empty list of messages, not {read.quoted(value)}"
            )
        found: list[ChatMessage] = []
        if system is not None:
            text = self._text(self._blocks("system", "system", system))
            if text:
                found.append(ChatMessage("system", text))
        for place, message in enumerate(value):
            found += self._message(f"messages[{place}]", message)
        if not found:
            raise read.invalid("messages", "messages holds nothing that a model could answer; add a message")
        return tuple(found)

    def _message(self, where: str, value: object) -> list[ChatMessage]:
        message = read.mapping(where, value, '{"role": "user", "content": "…"}')
        role = read.name_of(f"{where}.role", message.get("role"), _ROLES)
        read.only(where, message, ("role", "content", "cache_control"))
        parts.check_cache_control(where, message)
        inside = f"{where}.content"
        content = message.get("content")
        blocks = self._blocks(inside, role, content)
        if role == "system":
            text = self._text(blocks)
            return [ChatMessage("system", text)] if text else []
        if role == "user":
            return self._user(blocks)
        # A turn that is left out as a whole was none; one of an empty text was.
        if not blocks and isinstance(content, list) and any(block["type"] != "text" for block in content):
            return []
        return self._assistant(blocks)

    def _user(self, blocks: _Blocks) -> list[ChatMessage]:
        """Texts and results in their order; texts beside each other are one message."""
        found: list[ChatMessage] = []
        texts: list[str] = []

        def close() -> None:
            if texts:
                found.append(ChatMessage("user", _BETWEEN_BLOCKS.join(texts)))
                texts.clear()

        for where, block in blocks:
            if block["type"] == "text":
                texts.append(_text_of(where, block))
            else:
                close()
                found.append(self._result(where, block))
        close()
        return found or [ChatMessage("user", "")]

    def _assistant(self, blocks: _Blocks) -> list[ChatMessage]:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[MadeCall] = []
        for inside, block in blocks:
            kind = block["type"]
            if kind == "text":
                texts.append(_text_of(inside, block))
            elif kind == "thinking":
                thoughts.append(_thought(inside, block))
            else:
                calls.append(_call(inside, block))
        text, reasoning = "".join(texts), "".join(thoughts) or None
        nothing_said = not text and (bool(calls) or reasoning is not None)
        return [ChatMessage("assistant", None if nothing_said else text, None, reasoning, tuple(calls))]

    def _result(self, where: str, block: Mapping[str, Any]) -> ChatMessage:
        call_id = tool_use_ids.decode(read.filled(f"{where}.tool_use_id", block.get("tool_use_id")))
        _only_null(where, block, "toolset_name")
        content = block.get("content")
        text = ""
        if content is not None:
            inside = f"{where}.content"
            text = self._text(self._blocks(inside, "tool_result", content))
        if read.boolean(f"{where}.is_error", block.get("is_error"), default=False):
            text = f"Error: {text}" if text else "Error"
        return ChatMessage("tool", text, tool_call_id=call_id)

    def _text(self, blocks: _Blocks) -> str:
        """The text of blocks that are nothing but that."""
        texts = []
        for inside, block in blocks:
            if block["type"] == "text":
                texts.append(_text_of(inside, block))
            else:
                # A tool that was found by searching: all are declared to the model, so its name says it.
                texts.append(read.filled(f"{inside}.tool_name", block.get("tool_name")))
        return _BETWEEN_BLOCKS.join(texts)

    def _blocks(self, where: str, role: str, content: object) -> _Blocks:
        """The blocks that a message of this role, or a tool's result, may have, with their places; a string
        is one. Empty texts and what is left out are not among them."""
        if isinstance(content, str):
            return [(where, {"type": "text", "text": content})] if content else []
        if not isinstance(content, list):
            what = "is missing; it must be" if content is None else "must be"
            held = "" if content is None else f", not {read.quoted(content)}"
            raise read.invalid(where, f"{where} {what} a string or a list of blocks{held}")
        allowed = _OF_ROLE.get(role, ("text", "tool_reference"))
        found = []
        for place, entry in enumerate(content):
            inside = f"{where}[{place}]"
            block = read.mapping(inside, entry, '{"type": "text", "text": "…"}')
            if self._stays(inside, block, allowed):
                found.append((inside, block))
        return found

    def _stays(self, where: str, block: Mapping[str, Any], allowed: tuple[str, ...]) -> bool:
        """Whether the block is shown to the model. Raises ApiError 400 for one that it can't be."""
        kind = block.get("type")
        if not isinstance(kind, str):
            raise read.invalid(f"{where}.type", f"{where}.type must be a string, not {read.quoted(kind)}")
        if kind in _MEDIA:
            raise read.unsupported(
                f"{where}.type",
                f"{where}.type: a block of type {read.quoted(kind)} is not supported: this model reads text "
                "only; send what it says as a text block",
            )
        if kind in _HOSTED:
            self._warnings.add(where, f"{kind} is of another server; it was left out")
            return False
        if kind not in allowed:
            raise read.unsupported(
                f"{where}.type",
                f"{where}.type: a block of type {read.quoted(kind)} can't stand here; "
                f"{', '.join(allowed)} can",
            )
        parts.check_cache_control(where, block)
        if kind == "redacted_thinking":
            self._warnings.add(where, f"only the server that wrote {kind} can read it; it was left out")
            return False
        read.only(where, block, ("type", "cache_control", *_BLOCKS[kind]))
        return bool(kind != "text" or block.get("text") != "")


def _text_of(where: str, block: Mapping[str, Any]) -> str:
    text = read.text(f"{where}.text", block.get("text"))
    citations = block.get("citations")
    if not is_off(citations, ([], {"enabled": False})) and not isinstance(citations, list):
        raise read.unsupported(
            f"{where}.citations",
            f"{where}.citations: {read.quoted(citations)} is not supported; leave it out",
        )
    return text


def _thought(where: str, block: Mapping[str, Any]) -> str:
    text = read.text(f"{where}.thinking", block.get("thinking"))
    read.string(f"{where}.signature", block.get("signature"))
    return text


def _call(where: str, block: Mapping[str, Any]) -> MadeCall:
    given = block.get("input")
    _only_null(where, block, "toolset_name")
    caller = block.get("caller")
    if caller is not None and read.mapping(f"{where}.caller", caller).get("type") != "direct":
        raise read.unsupported(
            f"{where}.caller", f'{where}.caller must be {{"type": "direct"}}, not {read.quoted(caller)}'
        )
    return MadeCall(
        tool_use_ids.decode(read.filled(f"{where}.id", block.get("id"))),
        read.filled(f"{where}.name", block.get("name")),
        {} if given is None else read.mapping(f"{where}.input", given, "{}"),
    )


def _only_null(where: str, holder: Mapping[str, Any], name: str) -> None:
    if holder.get(name) is not None:
        raise read.unsupported(
            f"{where}.{name}", f"{where}.{name}: {read.quoted(holder[name])} is not supported; leave it out"
        )
