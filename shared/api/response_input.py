"""Reader of a Responses request's `input`: a text, or the items of a conversation, as messages.

Clients send back the items that answers were made of, also of other servers and with whatever those add: an
item's own bookkeeping passes, what it says is read or refused. Items that a vendor's tools left in a history
say nothing that a model here could use: they are left out, and the client is told which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxpool.shared.api import parts, read
from mlxpool.shared.api.chat_messages import read_arguments
from mlxpool.shared.api.messages import ChatMessage, MadeCall
from mlxpool.shared.api.response_object import unseal
from mlxpool.shared.api.response_tools import INPUT, Declarations, joined
from mlxpool.shared.api.response_turns import Turns
from mlxpool.shared.api.warned import Warnings
from mlxpool.shared.text import cut

SUMMARY = "Summary of the conversation so far:\n\n"

# Bookkeeping of servers and clients, in any item; Codex notes in the longest of them which turn it was.
_EVERY_FIELDS = (
    "type", "id", "status", "phase", "metadata", "created_by", "caller", "async", "object",
    "internal_chat_message_metadata_passthrough",
)  # fmt: skip
_PART_FIELDS = ("type", "text", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint")
_ROLES = ("user", "assistant", "system", "developer")

# What a vendor's tools leave in a history.
_HOSTED = frozenset({
    "web_search_call", "file_search_call", "computer_call", "computer_call_output", "code_interpreter_call",
    "image_generation_call", "local_shell_call", "local_shell_call_output", "shell_call",
    "shell_call_output", "apply_patch_call", "apply_patch_call_output", "tool_search_call",
    "tool_search_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "program", "program_output",
})  # fmt: skip

_Reader = Callable[["_Input", str, Mapping[str, Any]], None]


def read_input(
    value: object, instructions: object, declarations: Declarations, warnings: Warnings
) -> tuple[ChatMessage, ...]:
    """The conversation: instructions, then the input. Tools that an item declares go to `declarations`.
    Raises ApiError 400 naming the item by index and type."""
    conversation = _Input(declarations, warnings)
    told = _instructions(instructions)
    if isinstance(value, str):
        conversation.turns.put(ChatMessage("user", value))
    elif isinstance(value, list) and value:
        for place, item in enumerate(value):
            conversation.read(f"input[{place}]", item)
    elif value is None:
        raise read.invalid("input", "input is missing; it must be a string or a non-empty list of items")
    else:
        raise read.invalid(
            "input", f"input must be a string or a non-empty list of items, not {read.quoted(value)}"
        )
    messages = conversation.turns.messages()
    if not messages:
        raise read.invalid(
            "input", "input holds no message, call or result that a model could answer; add a message"
        )
    return _with_instructions(told, messages)


def _instructions(value: object) -> str | None:
    if isinstance(value, list):
        raise read.unsupported(
            "instructions", "instructions as a list of items is not supported; send a string"
        )
    return read.string("instructions", value)


def _with_instructions(told: str | None, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """Instructions and the developer's messages right behind them as one system message: agents send both,
    and few templates take two."""
    if not told:
        return messages
    texts = [told]
    rest = 0
    while rest < len(messages) and messages[rest].role == "system":
        texts.append(messages[rest].content or "")
        rest += 1
    return (ChatMessage("system", "\n\n".join(filter(None, texts))), *messages[rest:])


class _Input:
    """One conversation while it is read."""

    def __init__(self, declarations: Declarations, warnings: Warnings) -> None:
        self.turns = Turns()
        self._declarations = declarations
        self._warnings = warnings

    def read(self, where: str, value: object) -> None:
        item = read.mapping(where, value, '{"type": "message", "role": "user", "content": "…"}')
        kind = item.get("type")
        if kind is None:
            kind = "item_reference" if "id" in item and "role" not in item else "message"
        if not isinstance(kind, str):
            raise read.invalid(f"{where}.type", f"{where}.type must be a string, not {read.quoted(kind)}")
        if kind in _HOSTED:
            self._warnings.add(where, f"{kind} is of a tool that this server doesn't run; it was left out")
        elif kind in _READERS:
            _READERS[kind](self, where, item)
        else:
            raise read.unsupported(
                f"{where}.type",
                f"{where}.type {read.quoted(kind)} is not supported; {', '.join(_READERS)} would work",
            )

    def message(self, where: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role == "tool":
            raise read.unsupported(
                f"{where}.role",
                f'{where}.role "tool" is not supported; send an item of type function_call_output',
            )
        role = read.name_of(f"{where}.role", role, _ROLES)
        _only(where, item, "role", "content", "name")
        text = parts.joined(f"{where}.content", item.get("content"), _part)
        name = read.string(f"{where}.name", item.get("name"))
        if role == "assistant":
            self.turns.say(text)
        else:
            self.turns.put(ChatMessage("user" if role == "user" else "system", text, name))

    def reasoning(self, where: str, item: Mapping[str, Any]) -> None:
        _only(where, item, "summary", "content", "encrypted_content")
        content = _thoughts(f"{where}.content", item.get("content"), ("reasoning_text", "text"), "")
        summary = _thoughts(f"{where}.summary", item.get("summary"), ("summary_text",), "\n\n")
        sealed = read.string(f"{where}.encrypted_content", item.get("encrypted_content"))
        ours = unseal(sealed) if sealed else None
        text = content or ours or summary
        if text:
            self.turns.reason(text)
        if sealed and ours is None and not content:
            self._warnings.add(
                where, "reasoning whose encrypted_content this server did not make can't be read"
            )

    def function_call(self, where: str, item: Mapping[str, Any]) -> None:
        _only(where, item, "call_id", "name", "namespace", "arguments")
        arguments = read_arguments(f"{where}.arguments", item.get("arguments"))
        self.turns.call(MadeCall(_call_id(where, item), _called(where, item), arguments))

    def custom_tool_call(self, where: str, item: Mapping[str, Any]) -> None:
        _only(where, item, "call_id", "name", "namespace", "input")
        text = item.get("input")
        if not isinstance(text, str):
            raise read.invalid(f"{where}.input", f"{where}.input must be a string, not {read.quoted(text)}")
        self.turns.call(MadeCall(_call_id(where, item), _called(where, item), {INPUT: text}))

    def call_output(self, where: str, item: Mapping[str, Any]) -> None:
        _only(where, item, "call_id", "name", "namespace", "output")
        name = _called(where, item) if item.get("name") is not None else None
        # Results that a client volunteers answer no call; then their name says what they are.
        call_id = None if item.get("call_id") is None and name is not None else _call_id(where, item)
        text = parts.joined(f"{where}.output", item.get("output"), _part)
        self.turns.put(ChatMessage("tool", text, name, tool_call_id=call_id))

    def compaction(self, where: str, item: Mapping[str, Any]) -> None:
        _only(where, item, "encrypted_content")
        text = unseal(read.filled(f"{where}.encrypted_content", item.get("encrypted_content")))
        if text is None:
            raise read.invalid(
                f"{where}.encrypted_content",
                f"{where}.encrypted_content: this server did not make it and can't read what it stands for; "
                "send the conversation itself, or one compacted here",
            )
        self.turns.put(ChatMessage("user", f"{SUMMARY}{text}"))

    def additional_tools(self, where: str, item: Mapping[str, Any]) -> None:
        _only(where, item, "role", "tools")
        self._declarations.read(f"{where}.tools", item.get("tools"))

    def reference(self, where: str, item: Mapping[str, Any]) -> None:
        raise read.unsupported(
            where,
            f"{where}: item_reference {read.quoted(item.get('id'))} is no item of a stored response; "
            "send the item itself",
        )


def _only(where: str, item: Mapping[str, Any], *own: str) -> None:
    """Raises ApiError 400 for a field that such an item has not, and for an id that is none."""
    read.only(where, item, (*_EVERY_FIELDS, *own))
    read.string(f"{where}.id", item.get("id"))


_READERS: dict[str, _Reader] = {
    "message": _Input.message,
    "reasoning": _Input.reasoning,
    "function_call": _Input.function_call,
    "function_call_output": _Input.call_output,
    "custom_tool_call": _Input.custom_tool_call,
    "custom_tool_call_output": _Input.call_output,
    "compaction": _Input.compaction,
    "compaction_summary": _Input.compaction,
    "additional_tools": _Input.additional_tools,
    "item_reference": _Input.reference,
}


def _call_id(where: str, item: Mapping[str, Any]) -> str:
    return read.filled(f"{where}.call_id", item.get("call_id"))


def _called(where: str, item: Mapping[str, Any]) -> str:
    namespace = read.string(f"{where}.namespace", item.get("namespace"))
    return joined(namespace, read.filled(f"{where}.name", item.get("name")))


def _part(where: str, value: object) -> str:
    part = read.mapping(where, value, '{"type": "input_text", "text": "…"}')
    kind = part.get("type")
    if kind == "refusal":
        read.only(where, part, ("type", "refusal"))
        return read.text(f"{where}.refusal", part.get("refusal"))
    if kind not in ("input_text", "output_text", "text"):
        raise parts.no_such_part(where, kind)
    read.only(where, part, _PART_FIELDS)
    return read.text(f"{where}.text", part.get("text"))


def _thoughts(where: str, value: object, kinds: tuple[str, ...], between: str) -> str:
    """The texts of a reasoning item's parts; "" for null and for a list of none."""
    if value is None:
        return ""
    if not isinstance(value, list):
        raise read.invalid(where, f"{where} must be a list of parts, not {read.quoted(value)}")
    texts = []
    for place, entry in enumerate(value):
        inside = f"{where}[{place}]"
        part = read.mapping(inside, entry, f'{{"type": "{kinds[0]}", "text": "…"}}')
        if part.get("type") not in kinds:
            raise read.unsupported(
                f"{inside}.type",
                f"{inside}.type must be {' or '.join(kinds)}, not {cut(read.quoted(part.get('type')))}",
            )
        read.only(inside, part, ("type", "text"))
        texts.append(read.text(f"{inside}.text", part.get("text")))
    return between.join(texts)
