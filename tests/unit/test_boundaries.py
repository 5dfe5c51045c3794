"""Where a prompt is cut so that later prompts begin with what is before the cut."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.control import Launch
from mlxpool.shared.prompt.arrangements import with_system_text
from mlxpool.shared.prompt.families import families
from mlxpool.shared.prompt.rendering import Renderer
from mlxpool.worker.grammar.service import GrammarService
from mlxpool.worker.request.boundaries import Boundaries
from mlxpool.worker.request.plan import defaults
from mlxpool.worker.request.prepare import Preparer
from mlxpool.worker.wire.endpoints import read_chat
from tests.tools import tiny_models
from tests.tools.running_engine import no_adapters

PLAIN = tiny_models.CHAT_TEMPLATE

# As the starter's: a system prompt of its own where none is given.
WITH_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + PLAIN
)

# As Qwen 3's: tools in the system prompt; reasoning is shown in the turn that is going on, and left out of
# those that are over; the primer closes the block where reasoning is switched off.
STRIPPING = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n"
    "{{ messages[0].content if messages[0].role == 'system' else '' }}"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > last.user %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)

# As Mistral's: the system prompt goes into the last user's turn.
LAST_TURN = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{% if loop.last %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)

# Roles must take turns, and no tools are known.
STRICT = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turns') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "What is a fjord?"}
REPLY = {"role": "assistant", "content": "An inlet.", "reasoning_content": "Let me see."}
NEXT = {"role": "user", "content": "And a skerry?"}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I look it up.",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "get", "arguments": {"x": 7}}}],
}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "c", "name": "get"}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


class Model:
    """A template over the tiny tokenizer; counts what is encoded and rendered for boundaries."""

    def __init__(self, template: str, tokenizer: ChatTokenizer | None = None) -> None:
        if tokenizer is None:
            made = tiny_models.tokenizer()
            tokenizer = ChatTokenizer(made, _compiled(template), {}, frozenset({tiny_models.EOS_ID}))
        self.tokenizer = tokenizer
        self.encoded: list[str] = []
        self.rendered = 0
        self.boundaries = Boundaries(self._rendered, self._encoded)

    def _rendered(self, messages: list[dict[str, Any]], told: str, variables: dict[str, Any]) -> str:
        self.rendered += 1
        return self.tokenizer.render(with_system_text(messages, told) if told else messages, **variables)

    def _encoded(self, text: str) -> Sequence[int]:
        self.encoded.append(text)
        return self.tokenizer.encode(text)

    def ids(self, *messages: dict[str, Any], told: str = "", **variables: Any) -> tuple[int, ...]:
        given = with_system_text(messages, told) if told else messages
        return tuple(self.tokenizer.encode(self.tokenizer.render(given, **variables)))

    def of(self, *messages: dict[str, Any], told: str = "", **variables: Any) -> tuple[int, ...]:
        ids = self.ids(*messages, told=told, **variables)
        return self.boundaries.of(ids, list(messages), told, variables)

    def before(self, *messages: dict[str, Any], told: str = "", **variables: Any) -> list[str]:
        """The text before each boundary."""
        ids = self.ids(*messages, told=told, **variables)
        lengths = self.boundaries.of(ids, list(messages), told, variables)
        return [self.text(ids[:length]) for length in lengths]

    def text(self, ids: Sequence[int]) -> str:
        named = self.tokenizer.special_tokens
        return b"".join(
            named[token].encode() if token in named else self.tokenizer.token_bytes(token) for token in ids
        ).decode()


def _compiled(template: str) -> Any:
    from mlxpool.shared.template import ChatTemplate

    return ChatTemplate(template)


def test_a_prompt_is_cut_before_the_primer_and_behind_the_system_prompt() -> None:
    system = "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\n"
    assert Model(PLAIN).before(SYSTEM, USER) == [system, f"{system}What is a fjord?<|im_end|>\n"]


def test_without_a_system_prompt_only_the_primer_is_cut_off() -> None:
    assert Model(PLAIN).before(USER) == ["<|im_start|>user\nWhat is a fjord?<|im_end|>\n"]


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}])
@pytest.mark.parametrize("template", [PLAIN, WITH_DEFAULT, STRIPPING])
def test_the_next_turn_begins_with_what_is_before_the_stable_boundary(
    template: str, tools: dict[str, Any], thinking: dict[str, Any]
) -> None:
    model, variables = Model(template), {**tools, **thinking}
    turn = (SYSTEM, USER)
    ids = model.ids(*turn, **variables)
    stable = model.of(*turn, **variables)[-1]
    assert model.ids(*turn, REPLY, NEXT, **variables)[:stable] == ids[:stable]
    # No more is cut off than the primer.
    assert model.text(ids[stable:]).startswith("<|im_start|>assistant\n") or (
        template == STRIPPING and model.text(ids[stable:]).startswith("<think>")
    )


def test_reasoning_that_is_left_out_of_turns_that_are_over_is_cut_off_with_the_primer() -> None:
    model = Model(STRIPPING)
    (before,) = model.before(USER)
    assert before == "<|im_start|>user\nWhat is a fjord?<|im_end|>\n"
    (before,) = model.before(USER, enable_thinking=False)
    assert before == "<|im_start|>user\nWhat is a fjord?<|im_end|>\n"


def test_a_tools_result_goes_on_in_the_same_turn() -> None:
    model = Model(STRIPPING)
    turn = (USER, CALL, RESULT)
    ids = model.ids(*turn, tools=[TOOL])
    stable = model.of(*turn, tools=[TOOL])[-1]
    assert model.text(ids[:stable]).endswith("<|im_start|>tool\n42<|im_end|>\n")
    assert model.ids(*turn, CALL, RESULT, tools=[TOOL])[:stable] == ids[:stable]


def test_other_conversations_begin_with_the_system_prompt_and_its_tools() -> None:
    model = Model(STRIPPING)
    first, *_ = model.before(SYSTEM, USER, REPLY, NEXT, tools=[TOOL])
    assert first.startswith("<|im_start|>system\nYou are terse.")
    assert json.dumps(TOOL) in first
    assert first.endswith("<|im_end|>\n<|im_start|>user\n")
    # Without a system prompt of the client's the tools are one.
    assert json.dumps(TOOL) in model.before(USER, tools=[TOOL])[0]
    # What the server adds in words is of it too.
    told = model.before(SYSTEM, USER, told="Answer in JSON.")
    assert told[0] == "<|im_start|>system\nYou are terse.\n\nAnswer in JSON.<|im_end|>\n<|im_start|>user\n"
    told = model.before(USER, told="Answer in JSON.")
    assert told[0] == "<|im_start|>system\nAnswer in JSON.<|im_end|>\n<|im_start|>user\n"


def test_a_system_prompt_in_the_last_turn_is_no_boundary() -> None:
    model = Model(LAST_TURN)
    assert model.before(SYSTEM, USER)[0] == "[INST]You are terse.\n\n"
    # Further on it stands behind what is said already, where no other conversation has it.
    (later,) = model.before(SYSTEM, USER, REPLY, NEXT)
    assert later.startswith("[INST]What is a fjord?[/INST] An inlet.<|im_end|>[INST]You are terse.")


def test_a_system_prompt_is_encoded_once() -> None:
    model = Model(PLAIN)
    long = {"role": "system", "content": "Rules. " * 3000}
    first = model.of(long, USER)
    assert sum(map(len, model.encoded)) < len(long["content"]) + 500
    rendered, encoded = model.rendered, len(model.encoded)
    assert model.of(long, USER) == first
    assert model.of(long, NEXT)[0] == first[0]
    assert model.of(long, USER, REPLY, NEXT)[0] == first[0]
    assert (model.rendered, len(model.encoded)) == (rendered, encoded)
    assert model.of({**long, "content": "Other rules."}, USER)[0] < first[0]


def test_a_primer_is_told_once_for_each_mode() -> None:
    model = Model(STRIPPING)
    model.of(USER)
    rendered = model.rendered
    model.of(NEXT)
    assert model.rendered == rendered
    model.of(USER, enable_thinking=False)
    assert model.rendered > rendered


def test_a_primer_may_differ_where_there_are_tools() -> None:
    model = Model(PLAIN + "{% if tools and add_generation_prompt %}<tools>{% endif %}")
    without, with_tools = model.of(USER)[-1], model.of(USER, tools=[TOOL])[-1]
    assert without == with_tools
    assert len(model.ids(USER, tools=[TOOL])) - with_tools == len(model.ids(USER)) - without + len("<tools>")


def test_what_the_next_turn_has_otherwise_is_cut_off_though_the_template_adds_it_in_any_case() -> None:
    always = PLAIN.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}") + "<think>\n"
    (before,) = Model(always).before(USER)
    assert before == "<|im_start|>user\nWhat is a fjord?<|im_end|>\n<|im_start|>assistant\n"
    marked = PLAIN.replace(
        "{{ message.content }}", "{{ message.content }}{% if loop.last %} /think{% endif %}"
    )
    (before,) = Model(marked).before(USER)
    assert before == "<|im_start|>user\nWhat is a fjord?"


def test_what_is_too_long_for_a_primer_is_none() -> None:
    assert Model(PLAIN + "{{ 'x' * 60 }}").of(USER) == ()
    assert len(Model(PLAIN + "{{ 'x' * 10 }}").of(USER)) == 1


def test_a_template_that_refuses_the_small_conversations_costs_the_boundary_and_one_complaint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Model("{% if messages[0].content == 'a' %}{{ raise_exception('too short') }}{% endif %}" + PLAIN)
    assert model.of(USER) == ()
    rendered = model.rendered
    assert model.of(USER) == ()
    assert model.rendered == rendered
    assert capsys.readouterr().err.count("can't be told") == 1
    # Tools are not known to it: the system prompt's end is told all the same.
    strict = Model(STRICT)
    assert len(strict.of(USER, REPLY, NEXT)) == 1
    assert strict.boundaries.of(strict.ids(USER), [USER, CALL, RESULT], "", {}) == ()


def test_variables_that_no_json_can_say_cost_the_boundaries_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert Model(PLAIN).of(USER, strange=object()) == ()
    assert "can't be told" in capsys.readouterr().err


def test_boundaries_lie_inside_of_the_prompt() -> None:
    model = Model("{{ messages[0].content }}")
    assert model.of({"role": "user", "content": "a"}) == ()
    assert model.of(SYSTEM) == (len("You are terse.") - 1,)


async def test_plans_carry_them(tmp_path: Path) -> None:
    tiny_models.tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": STRIPPING, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = ChatTokenizer.open(tmp_path)
    grammars = GrammarService(tokenizer, tiny_models.VOCAB_SIZE, 1)
    launch = Launch("m", str(tmp_path), "s", 4000, 4, 1, 1)
    renderer = Renderer(tokenizer, families(tokenizer))
    preparer = Preparer(tokenizer, defaults(launch, {}), renderer, grammars, no_adapters())
    try:
        body = {"messages": [SYSTEM, USER], "tools": [TOOL], "n": 2}
        plans = (await preparer.prepare(read_chat, json.dumps(body).encode())).plans
        assert len({plan.boundaries for plan in plans}) == 1
        system, stable = plans[0].boundaries
        assert 0 < system < stable < len(plans[0].ids)
        assert plans[0].namespace == ""
    finally:
        preparer.close()
        await grammars.close()


@pytest.mark.starter
def test_the_starters_template_and_tokenizer(starter_folder: Path) -> None:
    model = Model("", ChatTokenizer.open(starter_folder))
    system, stable = model.before(SYSTEM, USER)
    assert system == "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\n"
    assert stable == f"{system}What is a fjord?<|im_end|>\n"
    ids, length = model.ids(SYSTEM, USER), model.of(SYSTEM, USER)[-1]
    assert model.ids(SYSTEM, USER, REPLY, NEXT)[:length] == ids[:length]
    assert model.text(ids[length:]) == "<|im_start|>assistant\n"


@pytest.mark.starter
def test_a_known_mode_makes_preparing_hardly_slower(starter_folder: Path) -> None:
    model = Model("", ChatTokenizer.open(starter_folder))
    system = {"role": "system", "content": "You are an assistant with many rules to keep. " * 1000}
    taken_s: dict[str, list[float]] = {"prompt": [], "boundaries": []}
    for _ in range(15):
        began_s = time.thread_time()
        ids = model.ids(system, USER)
        between_s = time.thread_time()
        assert len(model.boundaries.of(ids, [system, USER], "", {})) == 2
        taken_s["prompt"].append(between_s - began_s)
        taken_s["boundaries"].append(time.thread_time() - between_s)
    assert min(taken_s["boundaries"]) < 0.1 * min(taken_s["prompt"])
