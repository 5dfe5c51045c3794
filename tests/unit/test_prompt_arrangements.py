"""Conversations that chat templates refuse as they stand, in the ways that they take them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.api import chat, responses
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.errors import ApiError
from mlxpool.shared.prompt.arrangements import arrangements, with_system_text
from mlxpool.shared.prompt.families import families
from mlxpool.shared.prompt.rendering import Renderer
from tests.tools import tiny_models

_MESSAGE = (
    "[{{ m.role }}{{ m.tool_call_id or '' }}]"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }}>{% endfor %}"
)
TOOLS = "{% if tools %}{% endif %}"
# As Mistral's: user and assistant take turns.
TURNS = (
    "{% for m in messages %}{% if loop.index0 and m.role in ('user', 'assistant') "
    "and messages[loop.index0 - 1].role == m.role %}{{ raise_exception('in turns') }}{% endif %}"
    + _MESSAGE + "{% endfor %}" + TOOLS
)  # fmt: skip
# As Qwen 3.5's.
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    + _MESSAGE + "{% endfor %}" + TOOLS
)  # fmt: skip
# As Gemma's.
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + _MESSAGE + "{% endfor %}" + TOOLS
)  # fmt: skip
# As Qwen 3 Coder's: arguments are gone through, one by one.
ITERATING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for name, value in c.function.arguments | items %}<{{ name }}={{ value }}>{% endfor %}"
    "{% endfor %}{% endfor %}" + TOOLS
)
PRINTING = (
    "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}{{ c.function.arguments }}"
    "{% endfor %}{% endfor %}" + TOOLS
)


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def user(text: str) -> dict[str, Any]:
    return message("user", text)


def model(folder: Path, template: str) -> Renderer:
    tiny_models.tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = ChatTokenizer.open(folder)
    return Renderer(tokenizer, families(tokenizer))


def shown(folder: Path, template: str, *messages: dict[str, Any]) -> str:
    asked = chat.parse(json.dumps({"messages": messages}).encode())
    return model(folder, template).render(asked).text


def call(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_where_turns_are_wanted_no_call_and_no_thought_of_neighbours_is_lost(tmp_path: Path) -> None:
    text = shown(
        tmp_path, TURNS,
        user("env"), user("go"),
        message("assistant", "A", reasoning="one"),
        message("assistant", "", reasoning="two", tool_calls=[call("c1"), call("c2", "g")]),
        message("tool", "r1", tool_call_id="c1"), message("tool", "r2", tool_call_id="c2"),
    )  # fmt: skip
    assert text == (
        "[user]env\n\ngo[assistant](one\n\ntwo)A<c1 f><c2 g>[toolc1]r1[toolc2]r2"
    )  # fmt: skip


def test_items_of_a_response_keep_their_calls_and_results_where_turns_are_wanted(tmp_path: Path) -> None:
    items = [
        user("env"), user("go"), message("assistant", "A"), message("assistant", "B"),
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r1"},
    ]  # fmt: skip
    request = responses.parse(json.dumps({"input": items}).encode()).request
    text = model(tmp_path, TURNS).render(request).text
    assert text == "[user]env\n\ngo[assistant]A\n\nB<c1 f>[toolc1]r1"


def test_a_system_message_further_on_is_a_users_where_the_template_wants_it_first(tmp_path: Path) -> None:
    conversation = (
        message("system", "one"), message("system", "two"), user("x"), message("assistant", "y"),
        message("developer", "now read only"), user("go"),
    )  # fmt: skip
    said = "[user]x[assistant]y[user]now read only[user]go"
    assert shown(tmp_path, SYSTEM_FIRST, *conversation) == f"[system]one\n\ntwo{said}"
    as_it_stands = "{% for m in messages %}" + _MESSAGE + "{% endfor %}"
    assert shown(tmp_path, as_it_stands, *conversation) == (
        "[system]one[system]two[user]x[assistant]y[system]now read only[user]go"
    )


def test_a_system_message_further_on_stays_one_where_only_turns_are_wanted(tmp_path: Path) -> None:
    late = (user("a"), user("b"), message("system", "late"), user("c"))
    assert shown(tmp_path, TURNS, *late) == "[user]a\n\nb[system]late[user]c"


def test_system_messages_beside_each_other_stay_two_where_only_turns_are_wanted(tmp_path: Path) -> None:
    both = (message("system", "one"), message("system", "two"), user("a"), user("b"))
    assert shown(tmp_path, TURNS, *both) == "[system]one[system]two[user]a\n\nb"


def test_where_turns_and_the_system_first_are_wanted_the_servers_text_is_still_the_systems() -> None:
    *_, before, last = arrangements([user("a"), message("system", "late"), user("b")], "Do.")
    assert before == [message("system", "Do."), user("a\n\nlate\n\nb")]
    assert last == [user("Do.\n\na\n\nlate\n\nb")]


def test_the_clients_own_system_message_at_the_head_is_not_moved(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="no system"):
        shown(tmp_path, NO_SYSTEM, message("system", "x"), user("go"))


def test_the_first_refusal_is_the_one_that_the_client_hears(tmp_path: Path) -> None:
    counting = "{{ raise_exception(messages | length ~ ' messages') }}"
    with pytest.raises(ApiError, match="2 messages"):
        shown(tmp_path, counting, user("a"), user("b"))


CUT = message("assistant", "", tool_calls=[call("c1", "f", '{"path": "a'), call("c2", "f", '{"x": 1}')])


def test_a_call_that_was_cut_is_shown_to_a_template_that_goes_through_arguments(tmp_path: Path) -> None:
    assert shown(tmp_path, ITERATING, user("a"), CUT, user("b")) == (
        '[user]a[assistant]<_={"path": "a><x=1>[user]b'
    )


def test_a_call_that_was_cut_stays_text_where_a_template_prints_it(tmp_path: Path) -> None:
    assert shown(tmp_path, PRINTING, user("a"), CUT) == '[user][assistant]{"path": "a{\'x\': 1}'


def test_text_for_the_system_goes_to_the_first_message_and_to_no_later_one() -> None:
    later = [user("hi"), message("system", "late")]
    assert with_system_text(later, "Do.") == [message("system", "Do."), *later]
    assert with_system_text([message("system", "")], "Do.")[0]["content"] == "Do."


def test_for_templates_without_a_system_role_and_with_turns_the_text_is_the_users() -> None:
    messages = [user("a"), user("b"), message("assistant", "c"), user("d"), user("e")]
    *_, last = arrangements(messages, "Do.")
    assert last == [user("Do.\n\na\n\nb"), message("assistant", "c"), user("d\n\ne")]
    *_, alone = arrangements([message("assistant", "c")], "Do.")
    assert alone[0] == user("Do.")


def test_where_only_turns_are_wanted_the_servers_text_stays_the_systems() -> None:
    assert list(arrangements([user("a"), user("b")], "Do.")) == [
        [message("system", "Do."), user("a"), user("b")],
        [message("system", "Do."), user("a\n\nb")],
        [user("Do.\n\na\n\nb")],
    ]


def test_a_conversation_with_one_arrangement_has_one() -> None:
    messages = [message("system", "s"), message("system", "t")]
    assert list(arrangements([user("a")], "")) == [[user("a")]]
    # Two at the head are two in turns as well.
    assert list(arrangements(messages, "")) == [messages, [message("system", "s\n\nt")]]


def test_thousands_of_neighbours_cost_no_more_than_each_by_itself() -> None:
    many = [user("x" * 100) for _ in range(20_000)]
    started = time.process_time()
    *_, last = arrangements(many, "")
    assert last == [user("\n\n".join(["x" * 100] * 20_000))]
    # Joined one by one it takes ten seconds.
    assert time.process_time() - started < 1


def test_other_arrangements_are_made_only_of_what_was_refused() -> None:
    class Unread(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise AssertionError("nothing was refused")

    assert next(arrangements([Unread(user("a"))], "")) == [user("a")]
