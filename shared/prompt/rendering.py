"""A conversation as the text of a prompt: what the model's template is shown, and how.

The worker makes plans of it; the parent counts it, for a client that asks how long a prompt would be.
Immutable, and safe to share between threads.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from mlxpool.shared.api.chat import ChatRequest
from mlxpool.shared.api.normalise import template_messages
from mlxpool.shared.api.template_kwargs import SWITCHES
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.prompt import call_ids, thinking, toolless
from mlxpool.shared.prompt.arrangements import arrangements
from mlxpool.shared.prompt.choose import opens_block
from mlxpool.shared.prompt.families import Families
from mlxpool.shared.template import RENDER_TIME_LIMIT_S

# Variables that clients set for every model; one whose template reads none of them does as it was trained.
_FOR_ANY_MODEL = frozenset({*SWITCHES, thinking.DEPTH, "preserve_thinking"})

# No template looks for it, and no text holds it but by design.
_OPEN_END = "\ue0f1\ue0f2\ue0f1"

# What a template writes behind the last message is far shorter.
_PRIMER_CHARS = 200


class Rendered(msgspec.Struct, frozen=True):
    """messages, variables: what the template was given. told: what the server adds in words. opened: whether
    the text has opened the model's block of reasoning. reasons: False where reasoning was switched off.
    switched_off: the template itself took that switch, so the block is closed before the answer begins.
    continues: the text ends in the last message's own, which the answer goes on from."""

    messages: list[dict[str, Any]]
    told: str
    variables: dict[str, Any]
    text: str
    opened: bool
    reasons: bool
    switched_off: bool
    continues: bool = False


class Renderer:
    """Renders for one model. thinking_default: the server's setting, None for the model's own."""

    def __init__(
        self, tokenizer: ChatTokenizer, families: Families, thinking_default: bool | None = None
    ) -> None:
        self.families = families
        self._tokenizer = tokenizer
        self._thinking_default = thinking_default

    def render(self, request: ChatRequest) -> Rendered:
        """Raises ApiError 400 where the model can't chat, can't call, or its template refuses."""
        tokenizer = self._tokenizer
        if not tokenizer.has_template:
            raise error(
                "invalid_request", "this model's folder has no chat template: it can't chat", param="model"
            )
        self._check_variables(request)
        decided = thinking.decide(
            request.thinking,
            request.reasoning_effort,
            self._thinking_default,
            tokenizer.template_reads,
            tokenizer.template_source,
        )
        if request.tools and self.families.tools is None:
            raise error(
                "unsupported_parameter",
                "tools: this server's settings say that this model calls none (tool_parser); leave tools out",
                param="tools",
            )
        tools = request.tools if request.tool_choice.mode != "none" else ()
        messages = template_messages(request.messages)
        if self.families.tools == call_ids.FAMILY:
            messages = call_ids.shortened(messages)
        written = [tool.written for tool in tools]
        variables = {**decided.variables, **request.template_kwargs}
        told = ""
        if not self.families.knows_tools:
            messages = toolless.rewrite(messages)
            told = toolless.instruction(written) if written else ""
        elif written:
            variables["tools"] = written
        text = self.text(messages, told, variables, request.continues)
        reasoning = self.families.reasoning
        return Rendered(
            messages,
            told,
            variables,
            text,
            opened=not request.continues
            and reasoning is not None
            and opens_block(reasoning, text[-_PRIMER_CHARS:]),
            reasons=decided.enabled is not False,
            switched_off=decided.enabled is False and bool(decided.variables.keys() & set(SWITCHES)),
            continues=request.continues,
        )

    def text(
        self, messages: list[dict[str, Any]], told: str, variables: dict[str, Any], continues: bool = False
    ) -> str:
        """The prompt's text. A template's refusal is the client's to hear only where it takes the messages in
        none of the ways that they can be arranged in. continues: it ends in the last message's text,
        without what would end the turn. Raises ApiError 400."""
        if continues:
            return self._open_text(messages, told, variables)
        first: ApiError | None = None
        give_up = time.monotonic() + RENDER_TIME_LIMIT_S
        for arranged in arrangements(messages, told):
            try:
                return self._tokenizer.render(arranged, **variables)
            except ApiError as refusal:
                first = first or refusal
            # A template that does not end does not end for any of them.
            if time.monotonic() > give_up:
                break
        assert first is not None
        raise first

    def _open_text(self, messages: list[dict[str, Any]], told: str, variables: dict[str, Any]) -> str:
        """Cut at a mark behind the last message's text: templates trim blanks there, and write an end of
        turn."""
        *before, last = messages
        marked = [*before, {**last, "content": f"{last['content']}{_OPEN_END}"}]
        text, found, _ = self.text(marked, told, {**variables, "add_generation_prompt": False}).rpartition(
            _OPEN_END
        )
        if not found:
            raise error(
                "invalid_request",
                "the last message is the assistant's, but this model's chat template does not write it as it "
                "is, so no answer can go on from it; end with a user's message",
                param="messages",
            )
        return text

    def _check_variables(self, request: ChatRequest) -> None:
        reads = self._tokenizer.template_reads
        for name in request.template_kwargs:
            if name not in reads and name not in _FOR_ANY_MODEL:
                own = sorted(reads - {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
                raise error(
                    "unsupported_parameter",
                    f"chat_template_kwargs.{name} is not supported: this model's chat template does not read "
                    f"it; it reads {', '.join(own) or 'no variables of its own'}",
                    param=f"chat_template_kwargs.{name}",
                )
