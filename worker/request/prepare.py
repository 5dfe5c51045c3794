"""Body → request → rendered prompt → form → ids → plans, off the event loop.

Parsing, rendering and encoding a long prompt takes tens of milliseconds; a small pool of threads does
it, so that running streams and heartbeats don't wait for it. The tokenizer is shared and immutable. A form
that has to be enforced is compiled in between, by a process of its own, and this request alone waits for
it. Where it turns out that it can't be, the prompt is rendered again with the form asked for in words; a raw
prompt stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from mlxpool.shared import adapters as names
from mlxpool.shared.api.asked import Asked, RawPrompt
from mlxpool.shared.api.chat import ChatRequest
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.errors import ApiError, context_exceeded, error
from mlxpool.shared.prompt.rendering import Rendered, Renderer
from mlxpool.worker.adapters.layers import AdapterSet
from mlxpool.worker.adapters.mounted import PARAM, Adapters
from mlxpool.worker.grammar.formats import closing_texts, reasoning_of
from mlxpool.worker.grammar.service import GrammarService, Held
from mlxpool.worker.grammar.spec import Demand
from mlxpool.worker.request.boundaries import Boundaries
from mlxpool.worker.request.plan import Defaults, Plan, Prompt, ThinkingLimit, Vocabulary, make_plans
from mlxpool.worker.text.format import AnswerFormat, DeclaredTool

# Two: one long prompt doesn't keep a short one waiting; more would only take turns at the GIL.
_THREADS = 2

# A body's reader: raises ApiError 400 for whatever is wrong with it.
Read = Callable[[bytes], Asked]


class Prepared(msgspec.Struct, frozen=True):
    """plans: those of the first prompt's choices, then the next one's. held: the grammar that each of their
    rows has a place in. adapters: on in the passes of their rows. warnings: what was asked for and is not
    done."""

    asked: Asked
    plans: tuple[Plan, ...]
    held: Held = Held()
    adapters: AdapterSet | None = None

    @property
    def request(self) -> ChatRequest:
        return self.asked.request

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self.asked.warnings, *self.held.warnings)


class NoRoom(ApiError):
    """The prompt of a request that is fine otherwise leaves no room for an answer. prepared: the request, of
    which there are no plans."""

    def __init__(self, refusal: ApiError, prepared: Prepared) -> None:
        super().__init__(
            refusal.status, refusal.code, refusal.message, param=refusal.param, anthropic=refusal.anthropic
        )
        self.prepared = prepared


class _Begun(msgspec.Struct, frozen=True):
    """A request, read and rendered. rendered: None for raw prompts. format: as it is where no grammar
    decides. demand: None where the answer's form is free. adapter: the set it asks for, None for the
    default."""

    asked: Asked
    rendered: Rendered | None
    format: AnswerFormat
    demand: Demand | None
    adapter: str | None = None


class Preparer:
    """Makes plans of bodies for one model. Call from the event loop; `close` ends its threads."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        base: Defaults,
        renderer: Renderer,
        grammars: GrammarService,
        adapters: Adapters,
    ) -> None:
        self._tokenizer = tokenizer
        self._base = base
        self._renderer = renderer
        self._families = renderer.families
        self._grammars = grammars
        self._adapters = adapters
        self._boundaries = Boundaries(renderer.text, tokenizer.encode)
        newline = tuple(tokenizer.encode("\n"))
        self._vocabulary = Vocabulary(
            tokenizer.vocab_size, tokenizer.eos_ids, newline if len(newline) == 1 else ()
        )
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")

    async def prepare(self, read: Read, body: bytes, adapter: str | None = None) -> Prepared:
        """adapter: of the model's name, where it had one. Raises ApiError: 400 for whatever is wrong with the
        body, its messages, its form or its adapters, NoRoom for its length; 429 when too many grammars are
        being compiled."""
        run = asyncio.get_running_loop().run_in_executor
        begun = await run(self._pool, self._begin, read, body, adapter)
        if isinstance(begun, Prepared):
            return begun
        adapters = await self._adapters.of(begun.adapter)
        held = Held() if begun.demand is None else await self._grammars.hold(begun.demand)
        return await run(self._pool, self._finish, begun, held, adapters)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, read: Read, body: bytes, named: str | None) -> _Begun | Prepared:
        """The whole way for an answer of free form by the model as it is, else up to where its grammar or its
        adapters are needed."""
        asked = read(body)
        adapter = _one_adapter(asked.request.adapter, named)
        begun = self._raw(asked) if asked.prompts else self._conversation(asked)
        if begun.demand is None and self._adapters.is_plain(adapter):
            return self._finish(begun, Held(), None)
        return msgspec.structs.replace(begun, adapter=adapter)

    def _raw(self, asked: Asked) -> _Begun:
        """A prompt that no template has seen: its answer is text and nothing else."""
        structure = asked.request.structure
        demand = None
        if structure is not None:
            demand = Demand(
                structure=structure,
                tools=(),
                choice=asked.request.tool_choice,
                parallel=True,
                family=None,
                reasoning=None,
                markers=self._grammars.markers,
            )
        return _Begun(asked, None, AnswerFormat(stops=asked.request.stop, continues=True), demand)

    def _conversation(self, asked: Asked) -> _Begun:
        request = asked.request
        rendered = self._renderer.render(request)
        reasoning = self._families.reasoning
        tools = request.tools if request.tool_choice.mode != "none" else ()
        answer_format = AnswerFormat(
            continues=request.continues,
            stops=request.stop,
            reasoning=reasoning,
            starts_inside=rendered.opened,
            tools=self._families.tools if tools else None,
            declared=tuple(DeclaredTool(tool.name, tool.parameters) for tool in tools),
            one_call=not request.parallel_tool_calls or request.tool_choice.mode == "one",
        )
        demand = None
        forced = request.tool_choice.mode in ("required", "one")
        # Strictness that no grammar takes up is answered with a warning.
        if request.structure is not None or forced or any(tool.strict for tool in tools):
            quiet = request.continues or (rendered.switched_off and not rendered.opened)
            demand = Demand(
                structure=request.structure,
                tools=tools,
                choice=request.tool_choice,
                parallel=not answer_format.one_call,
                family=answer_format.tools,
                reasoning=None if quiet else reasoning_of(reasoning, rendered.opened),
                markers=self._grammars.markers,
            )
        return _Begun(asked, rendered, answer_format, demand)

    def _finish(self, begun: _Begun, held: Held, adapters: AdapterSet | None) -> Prepared:
        try:
            plans = self._plans(begun, held)
            if adapters is not None:
                plans = tuple(msgspec.structs.replace(plan, namespace=adapters.namespace) for plan in plans)
            return Prepared(begun.asked, plans, held, adapters)
        except ApiError as refusal:
            if refusal.code != "context_length_exceeded":
                raise
            raise NoRoom(self._explained(refusal, begun, held), Prepared(begun.asked, (), held)) from refusal

    def _plans(self, begun: _Begun, held: Held) -> tuple[Plan, ...]:
        request, answer_format = begun.asked.request, begun.format
        if held.family is not None:
            answer_format = msgspec.structs.replace(answer_format, tools=held.family)
        if held.compiled is not None and begun.demand is not None and begun.demand.reasoning is None:
            # A form that leaves no place for reasoning is all answer, whatever it looks like.
            answer_format = msgspec.structs.replace(answer_format, reasoning=None)
        if begun.rendered is None:
            prompts = [
                Prompt(self._ids(raw, field), answer_format, field=field)
                for raw, field in zip(begun.asked.prompts, begun.asked.prompt_fields, strict=True)
            ]
        else:
            prompts = [self._prompt(begun.rendered, answer_format, held, request)]
        return tuple(
            plan for prompt in prompts for plan in make_plans(request, prompt, self._base, self._vocabulary)
        )

    def _explained(self, refusal: ApiError, begun: _Begun, held: Held) -> ApiError:
        """The refusal of a prompt that is too long. It begins as clients know it, and blames the form of the
        answer where without the words that ask for it there would be room."""
        structure, rendered = begun.asked.request.structure, begun.rendered
        if held.instruction is None or structure is None or rendered is None:
            return refusal
        alone = self._tokenizer.encode_within(rendered.text, self._base.context)
        if isinstance(alone, int) or len(alone) >= self._base.context:
            return refusal
        why = (
            f"; {structure.field} could not be enforced ({'; '.join(held.warnings)}): without the words that "
            f"ask for it instead there are {len(alone)} tokens"
        )
        return ApiError(
            refusal.status,
            refusal.code,
            refusal.message + why,
            param=structure.field,
            anthropic=None if refusal.anthropic is None else refusal.anthropic + why,
        )

    def _prompt(
        self, rendered: Rendered, answer_format: AnswerFormat, held: Held, request: ChatRequest
    ) -> Prompt:
        text, told = rendered.text, rendered.told
        if held.instruction is not None:
            told = "\n\n".join(filter(None, (told, held.instruction)))
            text = self._renderer.text(rendered.messages, told, rendered.variables, rendered.continues)
        ids = self._encoded(text, request.prompt_field)
        boundaries = self._boundaries.of(ids, rendered.messages, told, rendered.variables)
        thinking = self._thinking_limit(request.thinking_budget, held)
        return Prompt(ids, answer_format, rendered.reasons, boundaries, thinking)

    def _thinking_limit(self, budget: int | None, held: Held) -> ThinkingLimit | None:
        """None where nothing is asked, or the model marks no reasoning: then it spends no budget either."""
        family = self._families.reasoning
        if budget is None or family is None:
            return None
        closings, then = closing_texts(family, in_grammar=held.compiled is not None)
        return ThinkingLimit(
            budget,
            {closing: tuple(self._tokenizer.encode(text)) for closing, text in closings.items()},
            tuple(self._tokenizer.encode(then)[:1]),
        )

    def _ids(self, raw: RawPrompt, field: str) -> tuple[int, ...]:
        """Text gets the special tokens that the tokenizer adds by itself, ids are the client's own."""
        if isinstance(raw, str):
            return self._encoded(raw, field, add_special_tokens=True)
        return raw

    def _encoded(self, text: str, field: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Raises ApiError 400 for a text that is far too long, without having encoded all of it."""
        found = self._tokenizer.encode_within(text, self._base.context, add_special_tokens)
        if isinstance(found, int):
            raise context_exceeded(found, self._base.context, field)
        return tuple(found)


def _one_adapter(asked: str | None, named: str | None) -> str | None:
    """What the body asks for and the model's name: the same, or one of them nothing."""
    if asked is None or named is None:
        return named if asked is None else asked
    if names.read_set(asked) != names.read_set(named):
        raise error(
            "invalid_request",
            f"adapter {asked!r} contradicts {named!r}, which the model's name asks for; send one of them",
            param=PARAM,
        )
    return asked
