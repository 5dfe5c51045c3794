"""Body → request → rendered prompt → form → ids → plans, off the event loop.

Parsing, rendering and encoding a long prompt takes tens of milliseconds; a small pool of threads does
it, so that running streams and heartbeats don't wait for it. The tokenizer is shared and immutable. A form
that has to be enforced is compiled in between, by a process of its own, and this request alone waits for
it. Where it turns out that it can't be, the prompt is rendered again with the form asked for in words.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from mlxpool.shared.api.chat import ChatRequest, parse
from mlxpool.shared.api.normalise import template_messages
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.errors import ApiError, error
from mlxpool.worker.grammar.formats import reasoning_of
from mlxpool.worker.grammar.service import GrammarService, Held
from mlxpool.worker.grammar.spec import Demand
from mlxpool.worker.request import call_ids, thinking, toolless
from mlxpool.worker.request.boundaries import Boundaries
from mlxpool.worker.request.families import Families
from mlxpool.worker.request.plan import Defaults, Plan, Prompt, Vocabulary, make_plans
from mlxpool.worker.text.choose import opens_block
from mlxpool.worker.text.format import AnswerFormat, DeclaredTool

# Two: one long prompt doesn't keep a short one waiting; more would only take turns at the GIL.
_THREADS = 2

# Variables that clients set for every model; one whose template reads none of them does as it was trained.
_FOR_ANY_MODEL = frozenset({*thinking.SWITCHES, thinking.DEPTH, "preserve_thinking"})


class Prepared(msgspec.Struct, frozen=True):
    """plans: one per choice, of one prompt. held: the grammar that each of their rows has a place in, and
    what the answer's `Warning` header says."""

    request: ChatRequest
    plans: tuple[Plan, ...]
    held: Held = Held()


class _Asked(msgspec.Struct, frozen=True):
    """A request, read and rendered. messages, variables: what the template was given. told: what the server
    adds in words. format: as it is where no grammar decides. demand: None where the answer's form is free."""

    request: ChatRequest
    messages: list[dict[str, Any]]
    told: str
    variables: dict[str, Any]
    text: str
    format: AnswerFormat
    demand: Demand | None
    reasons: bool


class ChatPreparer:
    """Makes plans of chat bodies for one model. Call from the event loop; `close` ends its threads.

    thinking_default: the server's setting, None for the model's own.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        base: Defaults,
        families: Families,
        grammars: GrammarService,
        thinking_default: bool | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._base = base
        self._families = families
        self._grammars = grammars
        self._thinking_default = thinking_default
        self._boundaries = Boundaries(self._rendered, tokenizer.encode)
        newline = tuple(tokenizer.encode("\n"))
        self._vocabulary = Vocabulary(
            tokenizer.vocab_size, tokenizer.eos_ids, newline if len(newline) == 1 else ()
        )
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")

    async def prepare(self, body: bytes) -> Prepared:
        """Raises ApiError: 400 for whatever is wrong with the body, its messages, its form or its length;
        429 when too many grammars are being compiled."""
        run = asyncio.get_running_loop().run_in_executor
        begun = await run(self._pool, self._begin, body)
        if isinstance(begun, Prepared):
            return begun
        assert begun.demand is not None
        held = await self._grammars.hold(begun.demand)
        return await run(self._pool, self._finish, begun, held)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, body: bytes) -> _Asked | Prepared:
        """The whole way for an answer of free form, else up to where its grammar is needed."""
        asked = self._read(parse(body))
        return self._finish(asked, Held()) if asked.demand is None else asked

    def _read(self, request: ChatRequest) -> _Asked:
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
        if request.tools and self._families.tools is None:
            raise error(
                "unsupported_parameter",
                "tools: this server's settings say that this model calls none (tool_parser); leave tools out",
                param="tools",
            )
        tools = request.tools if request.tool_choice.mode != "none" else ()
        messages = template_messages(request.messages)
        if self._families.tools == call_ids.FAMILY:
            messages = call_ids.shortened(messages)
        written = [tool.written for tool in tools]
        variables = {**decided.variables, **request.template_kwargs}
        told = ""
        if not self._families.knows_tools:
            messages = toolless.rewrite(messages)
            told = toolless.instruction(written) if written else ""
        elif written:
            variables["tools"] = written
        text = self._rendered(messages, told, variables)
        reasoning = self._families.reasoning
        inside = reasoning is not None and opens_block(reasoning, text[-200:])
        answer_format = AnswerFormat(
            stops=request.stop,
            reasoning=reasoning,
            starts_inside=inside,
            tools=self._families.tools if tools else None,
            declared=tuple(DeclaredTool(tool.name, tool.parameters) for tool in tools),
            one_call=not request.parallel_tool_calls or request.tool_choice.mode == "one",
        )
        # Where the template took the switch the block is closed before the answer begins.
        switched_off = decided.enabled is False and bool(decided.variables.keys() & set(thinking.SWITCHES))
        demand = None
        forced = request.tool_choice.mode in ("required", "one")
        # Strictness that no grammar takes up is answered with a warning.
        if request.structure is not None or forced or any(tool.strict for tool in tools):
            demand = Demand(
                structure=request.structure,
                tools=tools,
                choice=request.tool_choice,
                parallel=not answer_format.one_call,
                family=answer_format.tools,
                reasoning=None if switched_off and not inside else reasoning_of(reasoning, inside),
                markers=self._grammars.markers,
            )
        return _Asked(
            request, messages, told, variables, text, answer_format, demand, decided.enabled is not False
        )

    def _finish(self, asked: _Asked, held: Held) -> Prepared:
        text, told = asked.text, asked.told
        if held.instruction is not None:
            told = "\n\n".join(filter(None, (told, held.instruction)))
            text = self._rendered(asked.messages, told, asked.variables)
        answer_format = asked.format
        if held.family is not None:
            answer_format = msgspec.structs.replace(answer_format, tools=held.family)
        if held.compiled is not None and asked.demand is not None and asked.demand.reasoning is None:
            # A form that leaves no place for reasoning is all answer, whatever it looks like.
            answer_format = msgspec.structs.replace(answer_format, reasoning=None)
        ids = tuple(self._tokenizer.encode(text))
        boundaries = self._boundaries.of(ids, asked.messages, told, asked.variables)
        prompt = Prompt(ids, answer_format, asked.reasons, boundaries)
        try:
            plans = make_plans(asked.request, prompt, self._base, self._vocabulary)
        except ApiError as refusal:
            structure = asked.request.structure
            if held.instruction is None or structure is None:
                raise
            raise error(
                refusal.code,
                f"{structure.field} could not be enforced ({'; '.join(held.warnings)}), and asked for in "
                f"words it leaves no room: {refusal.message}",
                param=structure.field,
            ) from refusal
        return Prepared(asked.request, plans, held)

    def _rendered(self, messages: list[dict[str, Any]], told: str, variables: dict[str, Any]) -> str:
        """The prompt's text. A template's refusal is the client's to hear only where its own messages are
        what is refused."""
        first, *others = toolless.arrangements(messages, told)
        try:
            return self._tokenizer.render(first, **variables)
        except ApiError as refusal:
            for other in others:
                if other == first:
                    continue
                with contextlib.suppress(ApiError):
                    return self._tokenizer.render(other, **variables)
            raise refusal

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
